"""Requests of a batch for rows that lie on other trainers' GPUs: ids to routed keys, rows that came to bags.

Shapes: n ids of the group in the batch, U unique keys, R ranks, T tables of the group, K keys that are asked of this rank,
W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.exchange import Counts
from girih.data.batch import Batch
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.wire_codecs import KAPPA, SMALL
from girih.kernels.gpu import jit
from girih.kernels.gpu.dedup import route
from girih.sparse.groups.gpu_bags import GpuBags, GpuKeys, RowAddresses, places_and_positions
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.groups.pack import Group
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.group_state import GroupState

KEY_WORDS = 3
"""A key takes so many words of a message: two for its id, and one for how often it occurs. Its table follows from its place."""


@dataclass(frozen=True)
class Sections:
    """The stretches of a message that one rank asks of one table, table by table.

    Attributes:
        positions_of, tables: int32[2 · T · R], int32[T · R]: as :func:`girih.kernels.gpu.dedup.unique` takes them.
        most: int64[T], keys of each table, on the host.
    """

    positions_of: Tensor
    tables: Tensor
    most: NDArray[np.int64]

    @classmethod
    def of(cls, asked: Counts, device: torch.device) -> Sections:
        """Those of a message of so many keys of each rank and table, int64[R, T], rank by rank."""
        num_ranks, num_tables = asked.shape
        begins = (asked.reshape(-1).cumsum() - asked.reshape(-1)).reshape(asked.shape)
        described = places_and_positions(begins.T.reshape(-1), asked.T.reshape(-1))
        tables = np.repeat(np.arange(num_tables, dtype=np.int32), num_ranks)
        return cls(to_device(described, device), to_device(tables, device), asked.sum(axis=0))


@dataclass(frozen=True)
class GpuTraffic:
    """One group in one step: what this rank asks for, and what it is asked for.

    Attributes:
        keys, order: the unique keys, and the order in which they are sent; see :meth:`GpuRouter.ask`.
        asks, asked: int64[R, T], how many keys of each table this rank asks of each, and each one of it; on the host.
        message: int32[U, KEY_WORDS], the keys as they are sent. sections: of what comes.
    """

    keys: GpuKeys
    order: Tensor
    asks: Counts
    asked: Counts
    message: Tensor
    sections: Sections


class GpuRouter:
    """The asking part of one group, whose rows lie on the GPUs of all ranks.

    Args:
        state: this rank's shard, on whose GPU all is done.
        shared_copy: see :class:`GpuBags`.
    """

    def __init__(self, group: Group, state: GroupState, num_ranks: int, shared_copy: SharedCopy) -> None:
        self.group, self._state, self._num_ranks = group, state, num_ranks
        self.bags = GpuBags(group, state.device, shared_copy)

    @property
    def width(self) -> int:
        """W."""
        return self._state.kernels.segments.num_columns

    def ask(self, batch: Batch, *, train: bool) -> tuple[GpuKeys, Tensor, Tensor]:
        """The unique keys of a batch, routed; waits for nothing.

        Returns:
            The keys; the order in which they are sent, int64[n], and ends, int64[R · T]: see :func:`girih.kernels.gpu.dedup.route`.
        """
        keys = self.bags.find(batch, train=train)
        return keys, *route(keys.unique, self._num_ranks, len(self.group.spec.tables))

    def traffic(self, keys: GpuKeys, order: Tensor, asks: Counts, asked: Counts) -> GpuTraffic:
        """The same, once all ranks have told how many keys they ask for; see :class:`GpuTraffic`."""
        unique_keys, order = keys.unique, order[: int(asks.sum())]
        ids = unique_keys.keys[order].view(torch.int32).view(len(order), 2)
        message = torch.cat([ids, unique_keys.counts[order].unsqueeze(1)], dim=1)
        sections = Sections.of(asked, self.bags.device)
        return GpuTraffic(keys, order, asks, asked, message, sections)

    def fill(
        self,
        outputs: Sequence[Tensor],
        traffic: GpuTraffic,
        coming: Callable[[], Tensor],
        batch: Batch,
        parts: Sequence[slice],
    ) -> Iterator[None]:
        """Fills in the outputs, micro-batch by micro-batch.

        Args:
            coming: gives the rows, float32[U, W], in the order of the keys that were sent.
        """
        rows = coming()
        addresses = torch.zeros(len(traffic.keys.unique.keys), dtype=torch.int64, device=rows.device)
        row_numbers = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
        addresses[traffic.order] = rows.data_ptr() + 4 * self.width * row_numbers
        there = RowAddresses(addresses, at.FLOAT32, jit.aligned(rows.data_ptr(), 4 * self.width))
        for examples in parts:
            self.bags.fill(outputs, traffic.keys, there, batch, examples)
            yield

    def gradients(
        self, traffic: GpuTraffic, gradients: Sequence[Tensor | None], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each key that was sent, float32[U, W], zeros where no output took part in the loss.

        Returns:
            These, and int32[1]: the number of a key of this rank whose gradient is not finite, or -1.
        """
        terms, pieces = traffic.keys.of_training()
        contiguous = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        sources = self.bags.sources(contiguous, batch)
        totals, nonfinite = self._state.kernels.sums(traffic.keys.keys, terms, pieces, sources)
        return totals[traffic.order], nonfinite


_SCALE_HALVES = 2  # a float32 in the place of so many float16


@dataclass(frozen=True, slots=True)
class GpuRowCodec:
    """Encoding of rows; see :class:`girih.sparse.routing.key_router.RowCodec`."""

    float16: bool = False

    def width(self, dim: int) -> int:
        """Numbers that a packed row of ``dim`` numbers takes."""
        return dim + _SCALE_HALVES * self.float16

    def pack(self, rows: Tensor) -> Tensor:
        """float32[K, W] as it is, or float16[K, W + 2], of which the last two are the bits of the scale."""
        if not self.float16:
            return rows
        sizes = torch.where(rows.isfinite(), rows, 0.0).abs()
        scales = sizes.amax(dim=1, keepdim=True).clamp(min=SMALL)
        halves = (rows * (KAPPA / scales)).half()
        return torch.cat([halves, scales.view(torch.float16)], dim=1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Undoes :meth:`pack`: float32[K, W]."""
        if not self.float16:
            return packed
        halves, scales = packed[:, :-_SCALE_HALVES], packed[:, -_SCALE_HALVES:]
        bits = scales.clone(memory_format=torch.contiguous_format)
        return halves.float() * (bits.view(torch.float32) * (1 / KAPPA))
