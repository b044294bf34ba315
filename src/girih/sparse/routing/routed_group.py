"""One group whose rows are spread over the trainers: the seam between devices, and the group in this machine's memory.

    ids ─► keys that this rank asks for ─► message ─► (owners) ─► keys that all ranks ask of this one
    bags ◄─ rows that came ◄─ (owners) ◄─ rows, spread into the message
    gradients of bags ─► gradients of keys ─► (owners) ─► sums ─► rows move

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this
rank, W columns of a row.
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
"""A key takes so many words of a message: two for its id, and one for how often it occurs. Its table follows from its place."""
_KEY = np.dtype([("id", np.int64), ("count", np.int32)])

Asked = TypeVar("Asked")
"""The keys of one group that this rank asks for."""
Served = TypeVar("Served")
"""The keys of one group that all ranks ask of this one, each once."""
Rows = NDArray[np.float32] | Tensor


@dataclass(frozen=True)
class KeyCounts:
    """How many keys of one group lie side by side: those of rank 0 first, each one's by micro-batch and table.

    Attributes:
        counts: int64[R, M, T], keys of each table by the first micro-batch that needs them.
    """

    counts: Counts

    @cached_property
    def bounds(self) -> list[int]:
        """The number of the first key of each rank and micro-batch, and of all keys."""
        return [0, *self.counts.sum(axis=2).reshape(-1).cumsum().tolist()]

    def of_rank(self, rank: int, part: int | None = None) -> slice:
        """The keys of one rank, in one micro-batch or in all."""
        num_parts = self.counts.shape[1]
        first, behind = (0, num_parts) if part is None else (part, part + 1)
        return slice(self.bounds[rank * num_parts + first], self.bounds[rank * num_parts + behind])


@dataclass(eq=False)
class GroupWays:
    """The keys of one group in one step, and the ways there and back, as far as messages depend on them.

    Attributes:
        number: of the group.
        dim: W.
        message: int32[U, KEY_WORDS], the keys as they are sent.
        passage: counts of the keys of all groups; those of this one are in the columns from ``first_column`` on.
        asks, asked: how many keys this rank asks of each, and each one of it.
    """

    number: int
    dim: int
    message: Tensor
    passage: Passage
    first_column: int
    asks: KeyCounts
    asked: KeyCounts

    def columns(self, part: int | None) -> slice:
        """The columns of the passage that count the keys of one micro-batch; of all where None."""
        _, num_parts, num_tables = self.asks.counts.shape
        first, behind = (0, num_parts) if part is None else (part, part + 1)
        return slice(self.first_column + first * num_tables, self.first_column + behind * num_tables)


@dataclass(eq=False)
class GroupTraffic(GroupWays, Generic[Asked, Served]):
    """One group in one step: what this rank asks for, and what it is asked for once that has come."""

    keys: Asked
    served: Served = field(init=False)


@dataclass(frozen=True)
class ServedRows:
    """Rows of the keys that are asked of this rank, until the shards' next verb.

    Attributes:
        spread: copies the rows of the keys from a number on to float32[·, W].
        asked_once: bool[·], whether no other rank asks for the same key, for a slice of the keys.
    """

    spread: Callable[[int, Tensor], None]
    asked_once: Callable[[slice], Tensor]


@dataclass(frozen=True)
class IncomingRows:
    """Rows of one group on their way into its outputs.

    Attributes:
        outputs: float32[B, F, D], or [L, D] where one is whole.
        take: notes where rows lie that came, float32[·, W], those of the keys that were asked for from a number on.
        fill: fills in the outputs of some examples; the rows of their keys must be there.
    """

    outputs: Sequence[Rows]
    take: Callable[[int, Tensor], None]
    fill: Callable[[slice], None]


class RoutedGroup(Protocol[Asked, Served]):
    """One group on a device. No method waits for a GPU unless it says so: a GPU gives a number as a tensor of one element.

    Attributes:
        group: tables, features and outputs.
    """

    group: Group

    def ask(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> tuple[Asked, Tensor]:
        """The unique keys of a batch, and how many of them are asked of each rank, int64[R, M, T].

        Args:
            parts: the micro-batches in which rows are to come.
        """
        ...

    def message(self, keys: Asked, asks: KeyCounts, asked: KeyCounts) -> Tensor:
        """The keys as they are sent; called once all ranks know the counts. For the counts see :class:`GroupWays`."""
        ...

    def serve(self, traffic: GroupTraffic[Asked, Served], message: Tensor, *, train: bool) -> Served:
        """The keys that all ranks ask of this one: ``message`` is int32[K, KEY_WORDS], that of rank 0 first."""
        ...

    def fetch(self, served: Served) -> None:
        """Begins to read the rows of the next read from tiers below; changes no result. May wait for the keys."""
        ...

    def read(self, served: Served, step: int, *, train: bool) -> ServedRows:
        """Reads rows; ``train`` gives new keys rows and marks rows as used."""
        ...

    def absent(self, served: Served) -> Tensor:
        """uint8[K], of each key that is asked of this rank: whether it has no row. It was read before."""
        ...

    def incoming(self, keys: Asked, batch: Batch) -> IncomingRows:
        """Outputs that are still to be filled."""
        ...

    def inverse(self, keys: Asked) -> NDArray[np.int32] | Tensor:
        """int32[N], the number of the key of each of the group's ids."""
        ...

    def by_number(self, keys: Asked, flags: Tensor) -> NDArray[np.uint8]:
        """Flags of keys in the order in which they were sent → in that of their numbers, on the host. Waits for them."""
        ...

    def gradients(self, keys: Asked, gradients: Gradients, batch: Batch) -> tuple[Tensor, int | Tensor]:
        """The gradient of each key that was sent, float32[U, W], and a key whose own is not finite, or -1."""
        ...

    def sum_gradients(self, served: Served, gradients: Sequence[Tensor]) -> tuple[Tensor, int | Tensor]:
        """Sums the gradients of all ranks in their order, float32[·, W] for K keys in all.

        Returns:
            The sums, and the number of a table among those of all groups with one that is not finite, or -1.
        """
        ...

    def num_unique(self, served: Served) -> int | Tensor:
        """The number of unique keys that are asked of this rank."""
        ...

    def apply(self, served: Served, sums: Tensor, refused: Tensor, step: int, lr_scale: float) -> None:
        """Moves rows by sums of gradients; none unless ``refused``, int32[4], is negative."""
        ...


@dataclass(frozen=True)
class CpuServed:
    """The keys that all ranks ask of this one."""

    request: MergedRequest
    keys: GroupKeys


class CpuRoutedGroup:
    """One group in this machine's memory.

    Args:
        shards: the stores of this rank, as many as each other rank has. pool: see :class:`ShardReader`.
        first_table: the number of its first table among those of all groups.
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
