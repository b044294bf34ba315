"""The keys' side of a group: ids become unique keys of each shard, keys become rows, gradients move rows.

Every shard's thread finds its own keys among all ids, so that nothing is sorted or copied between them. Keys are numbered
across shards: those of shard s start at s · n, where n is the number of ids of the group.

Shapes: F features of the group, N ids, U unique keys of a shard, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError, WireError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu import dedup as kernels
from girih.kernels.cpu import routing
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.update import Terms
from girih.store import Keys, Push, RowUpdate, Store

T = TypeVar("T")
NO_AMOUNTS = sealed(np.empty(0, np.int32))
FEW_IDS = 8192  # one thread is done with fewer before a second thread wakes
COPIED_BYTES = 20 << 20  # rows of a batch are copied up to this size, because more would leave the caches
WIDE = 64  # columns below which that pays later: an address costs as much to follow however narrow its row


@dataclass
class ShardKeys:
    """The unique keys of one shard in one batch.

    Attributes:
        keys, tables, counts: int64[U], int32[U], int32[U], how often each occurs.
        first: the number of the first key.
        ends: int64[F], how many keys there are after each feature; those of one table stand together.
        rows: int32[U], row numbers in the shard, -1 for keys without a row: a hint, which the store verifies;
            None where nobody looked.
    """

    keys: NDArray[np.int64]
    tables: NDArray[np.int32]
    counts: NDArray[np.int32]
    first: int
    ends: NDArray[np.int64]
    rows: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class GroupKeys:
    """The unique keys of a batch in all shards of a group.

    Attributes:
        inverse: int32[N], the number of the key of each of the group's ids.
        num_ids: how many ids of the batch are the group's.
    """

    shards: list[ShardKeys]
    inverse: NDArray[np.int32]
    num_ids: int

    @property
    def end(self) -> int:
        """The number behind all keys'."""
        last = self.shards[-1]
        return last.first + len(last.keys)

    @cached_property
    def num_keys(self) -> int:
        """Number of unique keys in all shards."""
        count = 0
        for shard in self.shards:
            count += len(shard.keys)
        return count

    def absent(self) -> NDArray[np.bool_]:
        """Whether each key has no row, by the keys' numbers: bool[·]. Their rows were read before."""
        absent = np.zeros(self.end, np.bool_)
        for shard in self.shards:
            absent[shard.first : shard.first + len(shard.keys)] = shard.rows is not None and shard.rows < 0
        return absent


@dataclass(frozen=True)
class UniqueRows:
    """The rows of the unique keys of a batch.

    Attributes:
        addresses: int64[·], by the keys' numbers: where each row's float32[W] lie, until the shards' next verb.
        memory: arrays that hold them, where they are copies.
    """

    addresses: NDArray[np.int64]
    memory: Sequence[NDArray[np.float32]]

    @classmethod
    def received(
        cls, arrays: Sequence[NDArray[Any]], sizes: Sequence[int], width: int, label: str = "rows"
    ) -> UniqueRows:
        """Rows that came over a wire, float32[size, W] from each sender, one after the other.

        Raises:
            WireError: an array is something else.
        """
        checked = [as_rows(array, size, width, label) for array, size in zip(arrays, sizes, strict=True)]
        return cls(np.concatenate([addresses_in(array) for array in checked]), checked)


def as_rows(array: NDArray[Any], size: int, width: int, label: str) -> NDArray[np.float32]:
    """An array that came over a wire, as kernels take it, which follow addresses and check nothing.

    Raises:
        WireError: it is not float32[size, width] in one piece; says whose it is.
    """
    whole = bool(array.flags.c_contiguous)
    if array.dtype != np.float32 or array.shape != (size, width) or not whole:
        raise WireError(
            f"{label}: {array.dtype}{list(array.shape)}{'' if whole else ' in pieces'}; expected float32[{size}, {width}]"
            " in one piece; do all processes train the same model?"
        )
    return array


def addresses_in(array: NDArray[np.float32], out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The address of each row of a C-contiguous array, int64[·]; written to ``out`` where it is given."""
    size, width = array.shape
    addresses: NDArray[np.int64] = np.multiply(
        _numbers(size.bit_length())[:size], array.itemsize * width, out=out
    )
    addresses += array.ctypes.data
    return addresses


@lru_cache(maxsize=32)
def _numbers(bits: int) -> NDArray[np.int64]:
    return np.arange(1 << bits, dtype=np.int64)


@dataclass(frozen=True)
class Ids:
    """The ids of some features as they lie in a batch: see :class:`girih.data.batch.Batch`.

    Attributes:
        features, tables: int64[F], int32[F]: which features, and the table of each; those of one table
            stand together.
        sizes: numbers of ids: of these features together, and of the table with most.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int32]
    num_examples: int
    features: NDArray[np.int64]
    tables: NDArray[np.int32]

    @cached_property
    def sizes(self) -> tuple[int, int]:
        firsts = self.features * self.num_examples
        counts = self.offsets[firsts + self.num_examples] - self.offsets[firsts]
        starts = np.flatnonzero(np.diff(self.tables, prepend=-1))
        return int(counts.sum()), int(np.add.reduceat(counts, starts).max())


class Dedup:
    """One thread's hash table, and memory for the ids of one table."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._slots: NDArray[np.int32] = np.zeros(kernels.LEAST_SLOTS, np.int32)
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._positions: NDArray[np.int32] = np.empty(0, np.int32)
        self._ends = np.empty(kernels.NUM_PARTS, np.int64)
        self._base = 1

    def unique(
        self,
        of: Ids,
        inverse: NDArray[np.int32],
        shard: int = 0,
        num_shards: int = 1,
        first: int = 0,
        amounts: NDArray[np.int32] | None = None,
    ) -> ShardKeys:
        """The unique keys that belong to one of so many shards; writes their numbers, from ``first`` on, to
        ``inverse``.

        Args:
            amounts: int32[N], how often each id stands for itself, where ``inverse`` is -1 before; None is once.
        """
        num_ids, of_table = of.sizes
        self._make_room(num_ids, of_table)
        take = self._buffers.take
        keys, tables, counts = take(np.int64, num_ids), take(np.int32, num_ids), take(np.int32, num_ids)
        ends = np.empty(len(of.features), np.int64)
        num_keys = kernels.dedup(
            sealed(of.ids), sealed(of.offsets), of.num_examples, of.features, of.tables, shard, num_shards,
            self._slots, self._base, self._hashes, first, self._positions, self._ends,
            NO_AMOUNTS if amounts is None else sealed(amounts), inverse, keys, tables, counts, ends,
        )  # fmt: skip
        self._base += num_keys
        return ShardKeys(keys[:num_keys], tables[:num_keys], counts[:num_keys], first, ends)

    def routed(
        self,
        of: Ids,
        inverse: NDArray[np.int32],
        num_shards: int,
        shards_each: int,
        behind: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The unique keys, and how often each occurs, routed to the places that own so many neighbours of all shards.

        Args:
            inverse: int32[N], written: the number of each id's key.
            behind: int64[M], the first example behind each micro-batch.
            ends: int64[P · M, T], written: the number of the first key behind those of each place, micro-batch and table.
        """
        num_ids, of_table = of.sizes
        self._make_room(num_ids, of_table)
        take = self._buffers.take
        raw, keys = take(np.int64, num_ids), take(np.int64, num_ids)
        raw_tables, raw_counts, places, numbers, counts = (take(np.int32, num_ids) for _ in range(5))
        num_keys = routing.unique_and_partition(
            sealed(of.ids), sealed(of.offsets), of.num_examples, of.features, of.tables, num_shards, shards_each,
            self._slots, self._base, self._hashes, self._positions, self._ends, raw, raw_tables, raw_counts,
            np.empty(len(of.features), np.int64), places, numbers, behind, ends, inverse, keys, counts,
        )  # fmt: skip
        self._base += num_keys
        return keys[:num_keys], counts[:num_keys]

    def _make_room(self, num_ids: int, ids_of_table: int) -> None:
        parted = ids_of_table > kernels.MOST_TOGETHER
        if len(self._hashes) < ids_of_table * (1 + parted):
            self._hashes = np.empty(ids_of_table * (1 + parted), np.uint64)
            self._positions = np.empty(ids_of_table * (1 + parted), np.int32)
        num_slots = kernels.SLOTS_PER_ID * ids_of_table  # all of a table's ids may be of one part
        if len(self._slots) < num_slots:
            self._slots = np.zeros(1 << (num_slots - 1).bit_length(), np.int32)
            self._base = 1
        elif self._base + num_ids > kernels.MAX_NUMBER:
            self._slots[:] = 0
            self._base = 1


class Shards:
    """The shards of a group that this process holds.

    Args:
        stores: neighbours among all shards of the group, over which keys are spread evenly.
        pool: runs them side by side; None runs them in turn.

    Attributes:
        dim: W.
    """

    def __init__(self, stores: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.stores, self.dim = tuple(stores), stores[0].spec.dim
        self.pool = pool
        self._buffers = Buffers()
        self._dedups = [Dedup(self._buffers) for _ in stores]

    def lookup(
        self,
        of: Ids,
        step: int,
        *,
        train: bool,
        counts: NDArray[np.int32] | None = None,
        keys: GroupKeys | None = None,
    ) -> tuple[GroupKeys, UniqueRows]:
        """Reads the rows of the keys that belong here; ``train`` gives new keys rows and marks rows as used.

        Numbers of ids that belong elsewhere are any, or -1 where ``counts`` are given.

        Args:
            counts: int32[N], how often each id stands for itself; None is once.
            keys: the result of :meth:`find`, read at most once; None calls it now.

        Returns:
            The keys, and their rows.

        Raises:
            ConfigError: 32 bits cannot number the keys of this many ids and shards.
        """
        num_ids = of.sizes[0]
        inverse = self._inverse(of, marked=counts is not None) if keys is None else keys.inverse
        values = self._buffers.take(np.float32, len(self.stores) * num_ids, self.dim)
        addresses = self._buffers.take(np.int64, len(self.stores) * num_ids)

        def read_shard(s: int) -> ShardKeys:
            store = self.stores[s]
            mine = self._unique(of, inverse, s, counts) if keys is None else keys.shards[s]
            part = slice(mine.first, mine.first + len(mine.keys))
            out = values[part]
            row_addresses: NDArray[np.int64] | None = addresses[part]
            if copied(len(self.stores) * len(mine.keys), self.dim):
                row_addresses = None
                addresses_in(out, addresses[part])
            asked = Keys(mine.keys, mine.tables, mine.counts)
            if train:
                mine.rows = store.lookup(asked, step, out, row_addresses)
            else:
                mine.rows = store.peek(asked, out, row_addresses)
            return mine

        read_keys = GroupKeys(run_parts(self.pool, len(self.stores), read_shard, num_ids), inverse, num_ids)
        return read_keys, UniqueRows(addresses, (values,))

    def find(self, of: Ids, *, counts: NDArray[np.int32] | None = None) -> GroupKeys:
        """The unique keys that belong here; no row is read, and none is known. Args, and errors, as of :meth:`lookup`."""
        inverse = self._inverse(of, marked=counts is not None)
        find_shard = partial(self._unique, of, inverse, counts=counts)
        num_ids = of.sizes[0]
        return GroupKeys(run_parts(self.pool, len(self.stores), find_shard, num_ids), inverse, num_ids)

    def fetch(self, keys: GroupKeys) -> None:
        """Begins to read the rows of the next lookup from tiers below memory; changes no result."""
        for store, mine in zip(self.stores, keys.shards, strict=True):
            store.fetch(Keys(mine.keys, mine.tables))

    def apply(
        self,
        keys: GroupKeys,
        gradients: NDArray[np.float32],
        step: int,
        lr_scale: float,
        terms_of: Callable[[ShardKeys], Terms] | None = None,
        push: Push | None = None,
    ) -> int:
        """Moves rows by gradients, float32[·, W], one for the key of each number; returns how many were dropped.

        Args:
            terms_of: for a shard's keys, the sums that their gradients are; ``gradients`` are then what is summed.
            push: see :meth:`girih.store.Store.apply_gradients`.
        """

        def apply_shard(s: int) -> int:
            part = keys.shards[s]
            terms = None if terms_of is None else terms_of(part)
            grads = gradients[part.first : part.first + len(part.keys)] if terms is None else gradients
            moved = Keys(part.keys, part.tables, rows=part.rows)
            return self.stores[s].apply_gradients(moved, RowUpdate(grads, step, lr_scale, terms, push))

        num_ids = keys.num_keys if terms_of is None else len(keys.inverse)
        return sum(run_parts(self.pool, len(keys.shards), apply_shard, num_ids))

    def _inverse(self, of: Ids, *, marked: bool = False) -> NDArray[np.int32]:
        """Memory for the number of each id's key; ``marked`` fills it with -1."""
        num_ids, num_shards = of.sizes[0], len(self.stores)
        if num_ids * num_shards > kernels.MAX_NUMBER:
            raise ConfigError(
                f"group {self.stores[0].spec.name}: {num_ids:,} ids in one batch × {num_shards} shards, expected at"
                f" most {kernels.MAX_NUMBER:,}: lower data.batch_size, or store.shards"
            )
        inverse = self._buffers.take(np.int32, len(of.ids))
        if marked:
            inverse.fill(-1)
        return inverse

    def _unique(
        self, of: Ids, inverse: NDArray[np.int32], s: int, counts: NDArray[np.int32] | None = None
    ) -> ShardKeys:
        store = self.stores[s]
        return self._dedups[s].unique(of, inverse, store.shard, store.num_shards, s * of.sizes[0], counts)


def copied(num_keys: int, dim: int) -> bool:
    """Whether rows of so many keys are pooled from copies and moved by sums that are formed before, rather than in place."""
    return 4 * num_keys * dim * min(1, dim / WIDE) <= COPIED_BYTES


def run_parts(
    pool: ThreadPoolExecutor | None, num_parts: int, work: Callable[[int], T], num_ids: int
) -> list[T]:
    """Runs the parts in parallel, the first one in this thread; without a pool, or for a small batch, in turn."""
    if pool is None or num_ids < FEW_IDS:
        return list(map(work, range(num_parts)))
    others = [pool.submit(work, part) for part in range(1, num_parts)]
    try:
        first = work(0)
    finally:  # whatever happens, nobody works on after this
        wait(others)
    return [first, *(other.result() for other in others)]
