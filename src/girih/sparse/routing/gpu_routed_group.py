"""One group with rows on the GPUs of all trainers. It routes keys, and merges the requests of several ranks.

Requests of several ranks become one read and one update: a key that several ranks ask for is read, counted and updated
once. Gradients are summed in the order of ranks.

Shapes: n ids of the group in the batch, U unique keys, R ranks, T tables of the group, K keys that all ranks ask of
this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import jit, pool
from girih.kernels.gpu.dedup import BagTerms, Unique, describe_terms, route, unique
from girih.kernels.gpu.gradients import Pieces, Sources
from girih.sparse.groups.gpu_bags import GpuBags, GpuKeys, RowAddresses, places_and_positions
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.groups.gpu_group import on_gpu
from girih.sparse.groups.pack import Group
from girih.sparse.routing.routed_group import GroupTraffic, IncomingRows, KeyCounts, Rows, ServedRows
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device, to_host
from girih.store.gpu.group_state import DeviceUpdate, RowNumbers
from girih.store.gpu.record_kernels import DeviceKeys


class Sections(NamedTuple):
    """The sections of a message: the keys that one rank asks of one table, table by table.

    Attributes:
        positions_of, tables: int32[2 · T · R] and int32[T · R], arguments of :func:`girih.kernels.gpu.dedup.unique`.
        most: int64[T], keys of each table, on the host.
    """

    positions_of: Tensor
    tables: Tensor
    most: NDArray[np.int64]


@dataclass(eq=False)
class GpuAsked:
    """The keys that this rank asks for.

    Attributes:
        order: int64[U], the number of each key in the order in which keys are sent; int64[n] until counts are known.
        sections: sections of the message that this rank receives.
    """

    keys: GpuKeys
    order: Tensor
    sections: Sections = field(init=False)


@dataclass(eq=False)
class GpuServed:
    """The keys that all ranks ask of this rank.

    Attributes:
        num_sections: R · T, the sections of the message.
        unique: the keys without repeats, and the number of the key at each position of the message.
        keys: the same keys, in the form in which the store takes them.
        terms, pieces: the positions of each key; None if no gradient will come.
        rows: row numbers that the store returned.
    """

    num_sections: int
    unique: Unique
    keys: DeviceKeys
    terms: BagTerms | None
    pieces: Pieces | None
    rows: RowNumbers = field(init=False)


class GpuRoutedGroup:
    """One group with rows on the GPUs of all ranks; see :class:`girih.sparse.routing.routed_group.RoutedGroup`.

    Args:
        shards: this rank's only store. All work runs on its GPU.
        first_table: the number of the group's first table among the tables of all groups.
        shared_copy: see :class:`GpuBags`.
    """

    def __init__(
        self,
        group: Group,
        shards: Sequence[Store],
        num_ranks: int,
        first_table: int,
        shared_copy: SharedCopy,
    ) -> None:
        self.group, self.state = group, on_gpu(group, shards)
        self._num_ranks, self._first_table = num_ranks, first_table
        self._device = self.state.device
        self._bags = GpuBags(group, self._device, shared_copy)
        self._zeros = torch.zeros(2, dtype=torch.int32, device=self._device)

    def ask(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> tuple[GpuAsked, Tensor]:
        """See :class:`RoutedGroup`. All rows come together, as one micro-batch."""
        num_tables = len(self.group.spec.tables)
        keys = self._bags.find(batch, train=train)
        order, ends = route(keys.unique, self._num_ranks, num_tables)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return GpuAsked(keys, order), counts.view(self._num_ranks, 1, num_tables)

    def message(self, keys: GpuAsked, asks: KeyCounts, asked: KeyCounts) -> Tensor:
        """See :class:`RoutedGroup`."""
        unique_keys, keys.order = keys.keys.unique, keys.order[: asks.bounds[-1]]
        ids = unique_keys.keys[keys.order].view(torch.int32).view(len(keys.order), 2)
        num_asked = asked.counts[:, 0]  # int64[R, T]
        begins = num_asked.reshape(-1).cumsum().reshape(num_asked.shape) - num_asked
        tables = np.repeat(np.arange(num_asked.shape[1], dtype=np.int32), len(num_asked))
        keys.sections = Sections(
            to_device(places_and_positions(begins.T.reshape(-1), num_asked.T.reshape(-1)), self._device),
            to_device(tables, self._device),
            num_asked.sum(axis=0),
        )
        return torch.cat([ids, unique_keys.counts[keys.order].unsqueeze(1)], dim=1)

    def serve(self, traffic: GroupTraffic[GpuAsked, GpuServed], message: Tensor, *, train: bool) -> GpuServed:
        """See :class:`RoutedGroup`."""
        num_asked, sections = len(message), traffic.keys.sections
        ids = message[:, :2].clone(memory_format=torch.contiguous_format).view(torch.int64).view(-1)
        dedup = unique(ids, sections.positions_of, sections.tables, num_asked)
        uses = torch.zeros_like(dedup.counts).index_add_(0, dedup.inverse, message[:, 2])
        keys = DeviceKeys(dedup.keys, dedup.tables, uses, dedup.num_keys, sections.most)
        if not train:
            return GpuServed(len(sections.tables), dedup, keys, None, None)
        none = torch.zeros_like(sections.tables)
        terms = describe_terms(dedup, sections.positions_of, self._zeros, none, none, None, num_asked, 1)
        return GpuServed(len(sections.tables), dedup, keys, terms, Pieces(dedup.counts))

    def fetch(self, served: GpuServed) -> None:
        """See :class:`RoutedGroup`. Runs on the current stream. Waits for the keys if there are tiers below."""
        self.state.begin_read(served.keys)

    def read(self, served: GpuServed, step: int, *, train: bool) -> ServedRows:
        """See :class:`RoutedGroup`."""
        state, dedup = self.state, served.unique
        served.rows, addresses = state.read(served.keys, step) if train else state.peeked(served.keys)

        def spread(start: int, out: Tensor) -> None:
            segments, (num_rows, dim) = state.kernels.segments, out.shape
            columns = jit.columns_of(dim)
            jit.launch(
                pool.spread, num_rows, jit.rows_at_once(columns), addresses, dedup.inverse, out, start, num_rows, 0, dim,
                DTYPE=segments.dtype, ALIGNED=segments.aligned(0, dim), COLUMNS=columns,
            )  # fmt: skip

        def asked_once(part: slice) -> Tensor:
            return dedup.counts[dedup.inverse[part].long()] == 1

        return ServedRows(spread, asked_once)

    def absent(self, served: GpuServed) -> Tensor:
        """See :class:`RoutedGroup`."""
        absent = torch.as_tensor(served.rows, device=self._device) < 0
        return absent[served.unique.inverse.long()].to(torch.uint8)

    def incoming(self, keys: GpuAsked, batch: Batch) -> IncomingRows:
        """See :class:`RoutedGroup`."""
        outputs, memory = self._bags.outputs(batch), list[Tensor]()
        addresses = torch.zeros(len(keys.keys.unique.keys), dtype=torch.int64, device=self._device)

        def take(first: int, came: Tensor) -> None:
            num_rows, dim = came.shape
            numbers = torch.arange(num_rows, dtype=torch.int64, device=self._device)
            addresses[keys.order[first : first + num_rows]] = came.data_ptr() + 4 * dim * numbers
            memory.append(came)

        def fill(examples: slice) -> None:
            is_aligned = all(jit.aligned(came.data_ptr(), 4 * came.shape[1]) for came in memory)
            rows = RowAddresses(addresses, at.FLOAT32, is_aligned)
            self._bags.fill(outputs, keys.keys, rows, batch, examples)

        return IncomingRows(outputs, take, fill)

    def inverse(self, keys: GpuAsked) -> Tensor:
        """See :class:`RoutedGroup`."""
        return keys.keys.unique.inverse

    def by_number(self, keys: GpuAsked, flags: Tensor) -> NDArray[np.uint8]:
        """See :class:`RoutedGroup`."""
        numbered = flags.new_zeros(len(keys.keys.unique.keys))
        numbered[keys.order] = flags
        return to_host(numbered)

    def gradients(
        self, keys: GpuAsked, gradients: Sequence[Rows | None], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """See :class:`RoutedGroup`. Gradients are zeros if no output took part in the loss."""
        terms, pieces = keys.keys.of_training()
        contiguous = [None if each is None else torch.as_tensor(each).contiguous() for each in gradients]
        sources = self._bags.sources(contiguous, batch)
        totals, nonfinite = self.state.kernels.sums(keys.keys.keys, terms, pieces, sources)
        return totals[keys.order], nonfinite

    def sum_gradients(self, served: GpuServed, gradients: Sequence[Tensor]) -> tuple[Tensor, int | Tensor]:
        """See :class:`RoutedGroup`.

        Raises:
            ConfigError: the rows were read for evaluation.
        """
        if served.terms is None or served.pieces is None:
            raise ConfigError("gradients of rows that were read for evaluation; read them for training")
        values = gradients[0] if len(gradients) == 1 else torch.cat(list(gradients))
        row = 4 * values.shape[1]
        sources = []
        for first, *_ in self.state.kernels.segments.described:
            described = np.zeros((4, served.num_sections), np.int64)
            described[2:] = [[values.data_ptr() + 4 * first], [row]]
            aligned = not (described % 16).any()
            there = to_device(described, self._device)
            sources.append(Sources(there, pooled=False, whole=True, aligned=aligned))
        totals, refused = self.state.kernels.sums(served.keys, served.terms, served.pieces, sources)
        if not len(served.keys):
            return totals, refused
        table = served.unique.tables[refused.clamp(min=0).long()].long()
        return totals, torch.where(refused < 0, -1, self._first_table + table)

    def num_unique(self, served: GpuServed) -> Tensor:
        """See :class:`RoutedGroup`."""
        return served.keys.num

    def apply(self, served: GpuServed, sums: Tensor, refused: Tensor, step: int, lr_scale: float) -> None:
        """See :class:`RoutedGroup`."""
        self.state.move(served.keys, served.rows, DeviceUpdate(sums, refused[:1], step, lr_scale))
