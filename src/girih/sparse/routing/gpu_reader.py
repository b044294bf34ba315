"""Rows on this GPU that trainers ask for: requests of several ranks become one read of the shard, and one update.

A key that several ask for is read, counted and moved once. Sums are formed in the order of ranks.

Shapes: K keys of all requests, U unique ones, R ranks, T tables, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.kernels.gpu import jit, pool
from girih.kernels.gpu.dedup import BagTerms, Unique, describe_terms, unique
from girih.kernels.gpu.gradients import Pieces, Sources
from girih.sparse.groups.gpu_group import on_gpu
from girih.sparse.groups.pack import Group
from girih.sparse.routing.gpu_router import Sections
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.group_state import DeviceUpdate, RowNumbers
from girih.store.gpu.record_kernels import DeviceKeys


@dataclass(frozen=True)
class GpuServed:
    """The keys that all ranks ask of this one in a step.

    Attributes:
        num_sections: R · T, stretches of the message.
        unique: the keys, each once, and the number of the key at each position of the message.
        keys: the same, as the store takes them.
        terms, pieces: the positions of each key; None where no gradient will come.
    """

    num_sections: int
    unique: Unique
    keys: DeviceKeys
    terms: BagTerms | None
    pieces: Pieces | None


class GpuReader:
    """The one shard of a group on this GPU."""

    def __init__(self, group: Group, shards: Sequence[Store]) -> None:
        self.state = on_gpu(group, shards)
        self._device = self.state.device
        self._zeros = torch.zeros(2, dtype=torch.int32, device=self._device)

    def find(self, message: Tensor, sections: Sections, *, train: bool) -> GpuServed:
        """The keys of a message, each once, and how often all ranks together have it; waits for nothing.

        Args:
            message: int32[K, 3]: see :data:`girih.sparse.routing.gpu_router.KEY_WORDS`.
        """
        num_asked = len(message)
        ids = message[:, :2].clone(memory_format=torch.contiguous_format).view(torch.int64).view(-1)
        dedup = unique(ids, sections.positions_of, sections.tables, num_asked)
        uses = torch.zeros_like(dedup.counts).index_add_(0, dedup.inverse, message[:, 2])
        keys = DeviceKeys(dedup.keys, dedup.tables, uses, dedup.num_keys, sections.most)
        if not train:
            return GpuServed(len(sections.tables), dedup, keys, None, None)
        none = torch.zeros_like(sections.tables)
        terms = describe_terms(dedup, sections.positions_of, self._zeros, none, none, None, num_asked, 1)
        return GpuServed(len(sections.tables), dedup, keys, terms, Pieces(dedup.counts))

    def begin_read(self, served: GpuServed) -> None:
        """Has rows brought in from tiers below, on the current stream; waits for their keys where there are such tiers."""
        self.state.begin_read(served.keys)

    def read(self, served: GpuServed, step: int, *, train: bool) -> tuple[RowNumbers, Tensor]:
        """Reads rows: where they are, as the store has it, and float32[K, W], the row of each key of the message."""
        state = self.state
        num_asked, segments = len(served.unique.inverse), state.kernels.segments
        rows, addresses = state.read(served.keys, step) if train else state.peeked(served.keys)
        values = torch.empty((num_asked, segments.num_columns), dtype=torch.float32, device=self._device)
        columns = jit.columns_of(segments.num_columns)
        jit.launch(
            pool.spread, num_asked, jit.rows_at_once(columns), addresses, served.unique.inverse, values, 0, num_asked, 0,
            segments.num_columns, DTYPE=segments.dtype, ALIGNED=segments.aligned(0, segments.num_columns), COLUMNS=columns,
        )  # fmt: skip
        return rows, values

    def asked_once(self, served: GpuServed, some: slice) -> Tensor:
        """bool[·]: whether no other rank asks for the same key, for some positions of a message."""
        return served.unique.counts[served.unique.inverse[some].long()] == 1

    def sum_gradients(self, served: GpuServed, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Sums what several ranks have for one key; waits for nothing.

        Args:
            gradients: float32[K, W], of each key of the message.

        Returns:
            float32[K, W], of which the first U are those of unique keys; int32[1]: a key whose own is not finite, or -1.

        Raises:
            ConfigError: the rows were read for evaluation.
        """
        if served.terms is None or served.pieces is None:
            raise ConfigError("gradients of rows that were read for evaluation; read them for training")
        row = 4 * self.state.kernels.segments.num_columns
        sources = []
        for first, *_ in self.state.kernels.segments.described:
            described = np.zeros((4, served.num_sections), np.int64)
            described[2:] = [[gradients.data_ptr() + 4 * first], [row]]
            aligned = not (described % 16).any()
            there = to_device(described, self._device)
            sources.append(Sources(there, pooled=False, whole=True, aligned=aligned))
        return self.state.kernels.sums(served.keys, served.terms, served.pieces, sources)

    def bad_table(self, served: GpuServed, refused: Tensor) -> Tensor:
        """int64[1]: 1 + the table of a key that is refused, or 0 where none is."""
        if not len(served.keys):
            return torch.zeros(1, dtype=torch.int64, device=self._device)
        table = served.unique.tables[refused.clamp(min=0).long()].long()
        return torch.where(refused < 0, torch.zeros_like(table), 1 + table)

    def apply(
        self, served: GpuServed, rows: RowNumbers, totals: Tensor, refused: Tensor, step: int, lr_scale: float
    ) -> None:
        """Moves rows, which are where :meth:`read` said, by the sums of gradients."""
        self.state.move(served.keys, rows, DeviceUpdate(totals, refused, step, lr_scale))
