"""One group with rows spread over the trainers: the interface for all devices, and the group in the memory of hosts.

    ids ─► keys that this rank asks for ─► message ─► (owners) ─► keys that all ranks ask of this rank
    bags ◄─ received rows ◄─ (owners) ◄─ rows, spread into the message
    gradients of bags ─► gradients of keys ─► (owners) ─► sums ─► updated rows

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that all ranks ask of
this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.exchange import Counts, Passage
from girih.data.batch import Batch
from girih.kernels.cpu import pool as pool_kernels
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import GroupKeys, UniqueRows, addresses_in
from girih.sparse.routing.key_router import KeyRouter, RoutedKeys
from girih.sparse.routing.shard_reader import MergedRequest, ShardReader
from girih.store import Store

KEY_WORDS = 3
"""Words of a key in a message: two for its id, and one for how often it occurs. Its table follows from its position."""
_KEY = np.dtype([("id", np.int64), ("count", np.int32)])

Asked = TypeVar("Asked")
"""The keys of one group that this rank asks for."""
Served = TypeVar("Served")
"""The keys of one group that all ranks ask of this rank, without repeats."""
Rows = NDArray[np.float32] | Tensor


@dataclass(frozen=True)
class KeyCounts:
    """The numbers of keys of one group in a message, by rank, micro-batch and table, in this order.

    Attributes:
        counts: int64[R, M, T], keys of each table by the first micro-batch that needs them.
    """

    counts: Counts

    @cached_property
    def bounds(self) -> list[int]:
        """The number of the first key of each rank and micro-batch, and the number of all keys."""
        return [0, *self.counts.sum(axis=2).reshape(-1).cumsum().tolist()]

    def of_rank(self, rank: int, part: int | None = None) -> slice:
        """Returns the slice of the keys of one rank, in one micro-batch or in all."""
        num_parts = self.counts.shape[1]
        first, behind = (0, num_parts) if part is None else (part, part + 1)
        return slice(self.bounds[rank * num_parts + first], self.bounds[rank * num_parts + behind])


@dataclass(eq=False)
class GroupWays:
    """The facts about one group's keys in one step that its messages need.

    Attributes:
        number: number of the group.
        dim: W.
        message: int32[U, KEY_WORDS], the keys in the form in which they are sent.
        passage: counts of the keys of all groups. The counts of this group begin at column ``first_column``.
        asks, asked: the number of keys that this rank asks of each rank, and that each rank asks of this rank.
    """

    number: int
    dim: int
    message: Tensor
    passage: Passage
    first_column: int
    asks: KeyCounts
    asked: KeyCounts

    def columns(self, part: int | None) -> slice:
        """Returns the columns of the passage that count the keys of one micro-batch, or of all if ``part`` is None."""
        _, num_parts, num_tables = self.asks.counts.shape
        first, behind = (0, num_parts) if part is None else (part, part + 1)
        return slice(self.first_column + first * num_tables, self.first_column + behind * num_tables)


@dataclass(eq=False)
class GroupTraffic(GroupWays, Generic[Asked, Served]):
    """One group in one step: the keys that this rank asks for, and later the keys that all ranks ask of it."""

    keys: Asked
    served: Served = field(init=False)


@dataclass(frozen=True)
class ServedRows:
    """Rows of the keys that all ranks ask of this rank. They are valid until the next verb of the shards.

    Attributes:
        spread: copies the rows of consecutive keys, from a number on, to float32[·, W].
        asked_once: a slice of the keys → bool[·], whether no other rank asks for the same key.
    """

    spread: Callable[[int, Tensor], None]
    asked_once: Callable[[slice], Tensor]


@dataclass(frozen=True)
class IncomingRows:
    """Rows of one group on their way into its outputs.

    Attributes:
        outputs: float32[B, F, D], or [L, D] for a whole sequence.
        take: records the received rows of consecutive keys that were asked for, from a number on, float32[·, W].
        fill: fills in the outputs of some examples. The rows of their keys must have arrived.
    """

    outputs: Sequence[Rows]
    take: Callable[[int, Tensor], None]
    fill: Callable[[slice], None]


class RoutedGroup(Protocol[Asked, Served]):
    """One group on a device.

    No method waits for a GPU unless its docstring says so. A GPU returns a number as a tensor of one element.

    Attributes:
        group: tables, features and outputs.
    """

    group: Group

    def ask(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> tuple[Asked, Tensor]:
        """Returns the unique keys of a batch, and how many of them are asked of each rank, int64[R, M, T].

        Args:
            parts: the micro-batches in which rows will come.
        """
        ...

    def message(self, keys: Asked, asks: KeyCounts, asked: KeyCounts) -> Tensor:
        """Returns the keys in the form in which they are sent. For the counts see :class:`GroupWays`.

        Call it once all ranks know the counts.
        """
        ...

    def serve(self, traffic: GroupTraffic[Asked, Served], message: Tensor, *, train: bool) -> Served:
        """Returns the keys that all ranks ask of this rank. ``message`` is int32[K, KEY_WORDS], rank by rank."""
        ...

    def fetch(self, served: Served) -> None:
        """Begins to read rows of the next :meth:`read` from tiers below. Changes no result. May wait for the keys."""
        ...

    def read(self, served: Served, step: int, *, train: bool) -> ServedRows:
        """Reads rows. With ``train``, new keys get rows, and rows are marked as used."""
        ...

    def absent(self, served: Served) -> Tensor:
        """Returns uint8[K]: 1 for each key asked of this rank that has no row. Call it after :meth:`read`."""
        ...

    def incoming(self, keys: Asked, batch: Batch) -> IncomingRows:
        """Returns the outputs, which are still to fill, with the functions that fill them in."""
        ...

    def inverse(self, keys: Asked) -> NDArray[np.int32] | Tensor:
        """Returns int32[N], the key number of each of the group's ids."""
        ...

    def by_number(self, keys: Asked, flags: Tensor) -> NDArray[np.uint8]:
        """Takes flags in the order in which keys are sent. Returns them by key number, on the host. Waits for them."""
        ...

    def gradients(self, keys: Asked, gradients: Gradients, batch: Batch) -> tuple[Tensor, int | Tensor]:
        """Returns the gradient of each sent key, float32[U, W], and a key whose gradient is not finite, or -1."""
        ...

    def sum_gradients(self, served: Served, gradients: Sequence[Tensor]) -> tuple[Tensor, int | Tensor]:
        """Sums the gradients of all ranks, in the order of ranks: float32[·, W] for K keys in all.

        Returns:
            The sums, and the number of a table with a sum that is not finite, or -1. All groups number their tables
                together.
        """
        ...

    def num_unique(self, served: Served) -> int | Tensor:
        """Returns the number of unique keys that all ranks ask of this rank."""
        ...

    def apply(self, served: Served, sums: Tensor, refused: Tensor, step: int, lr_scale: float) -> None:
        """Updates rows by sums of gradients, if ``refused``, int32[4], is negative."""
        ...


@dataclass(frozen=True)
class CpuServed:
    """The keys that all ranks ask of this rank."""

    request: MergedRequest
    keys: GroupKeys


class CpuRoutedGroup:
    """One group in the memory of this host.

    Args:
        shards: the stores of this rank. All ranks have the same number of stores. pool: see :class:`ShardReader`.
        first_table: the number of the group's first table among the tables of all groups.
    """

    def __init__(
        self,
        group: Group,
        shards: Sequence[Store],
        pool: ThreadPoolExecutor | None,
        num_ranks: int,
        first_table: int,
    ) -> None:
        self.group, self._first_table = group, first_table
        self._router = KeyRouter(group, num_ranks, len(shards))
        self._reader = ShardReader(shards, pool)
        self._tables = [table.name for table in group.spec.tables]

    def ask(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> tuple[RoutedKeys, Tensor]:
        """See :class:`RoutedGroup`."""
        routed = self._router.ask(batch, parts)
        counts = np.diff(routed.ends.reshape(-1), prepend=0)
        return routed, torch.from_numpy(counts.reshape(routed.ends.shape))

    def message(self, keys: RoutedKeys, asks: KeyCounts, asked: KeyCounts) -> Tensor:
        """See :class:`RoutedGroup`."""
        (unique,) = keys.keys.shards
        words = np.empty(len(unique.keys), _KEY)
        words["id"], words["count"] = unique.keys, unique.counts
        return torch.from_numpy(words.view(np.int32).reshape(-1, KEY_WORDS))

    def serve(
        self, traffic: GroupTraffic[RoutedKeys, CpuServed], message: Tensor, *, train: bool
    ) -> CpuServed:
        """See :class:`RoutedGroup`."""
        words = message.numpy().reshape(-1).view(_KEY)
        keys, counts = np.ascontiguousarray(words["id"]), np.ascontiguousarray(words["count"])
        request = MergedRequest.of(keys, counts, traffic.asked.counts.reshape(-1, len(self._tables)))
        return CpuServed(request, self._reader.find_keys(request))

    def fetch(self, served: CpuServed) -> None:
        """See :class:`RoutedGroup`."""
        self._reader.fetch(served.keys)

    def read(self, served: CpuServed, step: int, *, train: bool) -> ServedRows:
        """See :class:`RoutedGroup`."""
        request, inverse = served.request, served.keys.inverse
        _, rows = self._reader.lookup(request.ids, step, train=train, counts=request.counts, keys=served.keys)

        def spread(start: int, out: Tensor) -> None:
            pool_kernels.spread(rows.addresses, 0, inverse, start, out.numpy())

        def asked_once(part: slice) -> Tensor:
            return torch.from_numpy(np.bincount(inverse)[inverse[part]] == 1)

        return ServedRows(spread, asked_once)

    def absent(self, served: CpuServed) -> Tensor:
        """See :class:`RoutedGroup`."""
        return torch.from_numpy(served.keys.absent()[served.keys.inverse].view(np.uint8))

    def incoming(self, keys: RoutedKeys, batch: Batch) -> IncomingRows:
        """See :class:`RoutedGroup`."""
        memory: list[NDArray[np.float32]] = []
        rows = UniqueRows(np.empty(keys.keys.end, np.int64), memory)
        pooling = self._router.bags.pooling(rows, keys.keys, batch)

        def take(first: int, came: Tensor) -> None:
            memory.append(came.numpy())
            addresses_in(memory[-1], rows.addresses[first : first + len(came)])

        return IncomingRows(pooling.outputs, take, pooling.fill)

    def inverse(self, keys: RoutedKeys) -> NDArray[np.int32]:
        """See :class:`RoutedGroup`."""
        return keys.keys.inverse

    def by_number(self, keys: RoutedKeys, flags: Tensor) -> NDArray[np.uint8]:
        """See :class:`RoutedGroup`."""
        in_order: NDArray[np.uint8] = flags.numpy()
        return in_order

    def gradients(self, keys: RoutedKeys, gradients: Gradients, batch: Batch) -> tuple[Tensor, int]:
        """See :class:`RoutedGroup`."""
        totals, nonfinite = self._router.bags.scatter(gradients, keys.keys, batch)
        return torch.from_numpy(totals), nonfinite

    def sum_gradients(self, served: CpuServed, gradients: Sequence[Tensor]) -> tuple[Tensor, int]:
        """See :class:`RoutedGroup`."""
        totals, table = self._reader.sum_gradients(served.keys, [part.numpy() for part in gradients])
        bad = -1 if table is None else self._first_table + self._tables.index(table)
        return torch.from_numpy(totals), bad

    def num_unique(self, served: CpuServed) -> int:
        """See :class:`RoutedGroup`."""
        return served.keys.num_keys

    def apply(self, served: CpuServed, sums: Tensor, refused: Tensor, step: int, lr_scale: float) -> None:
        """See :class:`RoutedGroup`."""
        if refused[0] < 0:
            self._reader.apply(served.keys, sums.numpy(), step, lr_scale)
