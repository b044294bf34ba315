"""Turns ids into unique keys of each shard, reads the rows of keys, and updates rows with gradients.

The thread of each shard finds the shard's keys among all ids, so threads sort and copy nothing for each other. Key
numbers are unique across shards: the keys of shard s start at s · n, and n is the number of ids of the group.

Shapes: F features of the group, N ids, U unique keys of a shard, W columns of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError, WireError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu import dedup as kernels
from girih.kernels.cpu import routing
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.update import Terms
from girih.sparse.options import MOST_THREADS
from girih.store import Keys, Push, RowUpdate, Store

T = TypeVar("T")
NO_AMOUNTS = sealed(np.empty(0, np.int32))
FEW_IDS = 8192  # with fewer ids, one thread finishes before a second thread wakes
COPIED_BYTES = 20 << 20  # up to this size, the rows of a batch are copied; more would not fit into the caches
WIDE = 64  # narrower rows are copied up to a larger size: following an address costs the same for any width


@dataclass
class ShardKeys:
    """The unique keys of one shard in one batch.

    Attributes:
        keys, tables, counts: int64[U], int32[U], int32[U]. A count says how often the key occurs.
        first: the number of the first key.
        ends: int64[F], the number of keys up to and including each feature's table. Keys of one table are adjacent.
        rows: int32[U], row numbers in the shard, -1 for keys without a row. They are a hint, which the store verifies.
            None before the rows are looked up.
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
        inverse: int32[N], the key number of each of the group's ids.
        num_ids: the number of the batch's ids that belong to the group.
    """

    shards: list[ShardKeys]
    inverse: NDArray[np.int32]
    num_ids: int

    @property
    def end(self) -> int:
        """The first number after all key numbers."""
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
        """Returns bool[·], by key number: True for keys without a row. Call it after the rows were read."""
        absent = np.zeros(self.end, np.bool_)
        for shard in self.shards:
            absent[shard.first : shard.first + len(shard.keys)] = shard.rows is not None and shard.rows < 0
        return absent


@dataclass(frozen=True)
class UniqueRows:
    """The rows of the unique keys of a batch.

    Attributes:
        addresses: int64[·], by key number: the address of each row's float32[W], valid until the shards' next verb.
        memory: arrays that must stay alive because they hold copies of rows.
    """

    addresses: NDArray[np.int64]
    memory: Sequence[NDArray[np.float32]]

    @classmethod
    def received(
        cls, arrays: Sequence[NDArray[Any]], sizes: Sequence[int], width: int, label: str = "rows"
    ) -> UniqueRows:
        """Makes the object from received rows: float32[size, W] from each sender, in order.

        Raises:
            WireError: an array has another dtype or shape, or is not contiguous.
        """
        checked = [as_rows(array, size, width, label) for array, size in zip(arrays, sizes, strict=True)]
        return cls(np.concatenate([addresses_in(array) for array in checked]), checked)


def as_rows(array: NDArray[Any], size: int, width: int, label: str) -> NDArray[np.float32]:
    """Checks and returns a received array of rows. Kernels read it by addresses, without checks.

    Args:
        label: names the array in errors.

    Raises:
        WireError: the array is not a contiguous float32[size, width].
    """
    whole = bool(array.flags.c_contiguous)
    if array.dtype != np.float32 or array.shape != (size, width) or not whole:
        raise WireError(
            f"{label}: {array.dtype}{list(array.shape)}{'' if whole else ' in pieces'}; expected float32[{size}, {width}]"
            " in one piece; do all processes train the same model?"
        )
    return array


def addresses_in(array: NDArray[np.float32], out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Returns int64[·], the address of each row of a C-contiguous array. Writes to ``out`` if it is given."""
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
    """The ids of some features, in the layout of a :class:`girih.data.batch.Batch`.

    Attributes:
        features, tables: int64[F], int32[F]: the features, and the table of each. Features of the same table are
            adjacent.
        sizes: the number of ids of all these features, and of the table that has the most.
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
    """Finds unique keys in one thread. It holds the thread's hash table, and memory for the ids of one table."""

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
        """Returns the unique keys that belong to one of ``num_shards`` shards.

        Args:
            inverse: int32[N], output: the number of each id's key.
            first: the number of the first key.
            amounts: int32[N], the count of each id; ``inverse`` must then be -1 before the call. None counts each id
                once.
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
        """Returns the unique keys and their counts, sorted by the place that owns each key.

        Args:
            inverse: int32[N], output: the number of each id's key.
            shards_each: the number of shards of each place, which are adjacent.
            behind: int64[M], the first example after each micro-batch.
            ends: int64[P · M, T], output: the number of the first key after the keys of each place, micro-batch and
                table.
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
        num_slots = kernels.SLOTS_PER_ID * ids_of_table  # one part may have all ids of a table
        if len(self._slots) < num_slots:
            self._slots = np.zeros(1 << (num_slots - 1).bit_length(), np.int32)
            self._base = 1
        elif self._base + num_ids > kernels.MAX_NUMBER:
            self._slots[:] = 0
            self._base = 1


class Shards:
    """The shards of a group that this process holds.

    Many shards of one process share threads. Then one thread sorts all unique keys by shard, instead of each shard
    searching all ids.

    Args:
        stores: adjacent shards of the group. Keys are spread evenly over all shards of the group.
        pool: runs the shards in parallel; None runs them in turn.

    Attributes:
        dim: W.
    """

    def __init__(self, stores: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.stores, self.dim = tuple(stores), stores[0].spec.dim
        self.pool = pool
        self._sorts = threads_for(len(stores)) < len(stores) == stores[0].num_shards
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
        """Reads the rows of the keys that these shards own.

        With ``train``, new keys get rows, and rows are marked as used.

        In the result, the key numbers of ids of other shards are arbitrary, or -1 if ``counts`` is given.

        Args:
            counts: int32[N], the count of each id. None counts each id once.
            keys: the result of :meth:`find`, which serves at most one lookup. None calls it now.

        Returns:
            The keys, and their rows.

        Raises:
            ConfigError: the ids and shards are too many to number the keys with 32 bits.
        """
        num_ids = of.sizes[0]
        if keys is None and self._sorts and counts is None:
            keys = self._sorted(of)
        inverse = self._inverse(of, marked=counts is not None) if keys is None else keys.inverse
        num_rows = len(self.stores) * num_ids if keys is None else keys.end
        values = self._buffers.take(np.float32, num_rows, self.dim)
        addresses = self._buffers.take(np.int64, num_rows)

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
        """Returns the unique keys that these shards own, without rows.

        Arguments and errors are the same as in :meth:`lookup`.
        """
        if self._sorts and counts is None:
            return self._sorted(of)
        inverse = self._inverse(of, marked=counts is not None)
        find_shard = partial(self._unique, of, inverse, counts=counts)
        num_ids = of.sizes[0]
        return GroupKeys(run_parts(self.pool, len(self.stores), find_shard, num_ids), inverse, num_ids)

    def fetch(self, keys: GroupKeys) -> None:
        """Starts to read the rows of the next lookup from tiers below memory. Changes no result."""
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
        """Updates rows with gradients. Returns the number of gradients that were dropped because their key has no row.

        Args:
            gradients: float32[·, W], by key number. If ``terms_of`` is given: the rows to be summed.
            terms_of: returns, for a shard's keys, the rows of ``gradients`` that each key's gradient sums.
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

    def _sorted(self, of: Ids) -> GroupKeys:
        """Returns the unique keys of all shards of the group, numbered without gaps."""
        inverse = self._buffers.take(np.int32, len(of.ids))
        num_tables = len(self.stores[0].spec.tables)
        ends = np.empty((len(self.stores), num_tables), np.int64)
        none = np.zeros(1, np.int64)
        keys, counts = self._dedups[0].routed(of, inverse, len(self.stores), 1, none, ends)
        lengths = np.diff(ends.reshape(-1), prepend=0)
        tables = np.repeat(np.tile(np.arange(num_tables, dtype=np.int32), len(self.stores)), lengths)
        shards = [
            ShardKeys(keys[a:b], tables[a:b], counts[a:b], a, of_shard[of.tables] - a)
            for of_shard, (a, b) in zip(ends, pairwise([0, *ends[:, -1].tolist()]), strict=True)
        ]
        return GroupKeys(shards, inverse, of.sizes[0])

    def _inverse(self, of: Ids, *, marked: bool = False) -> NDArray[np.int32]:
        """Returns memory for the key number of each id; ``marked`` fills it with -1."""
        num_ids, num_shards = of.sizes[0], len(self.stores)
        if num_ids * num_shards > kernels.MAX_NUMBER:
            raise ConfigError(
                f"group {self.stores[0].spec.name}: {num_ids:,} ids in one batch × {num_shards} shards, expected at"
                f" most {kernels.MAX_NUMBER:,}: lower data.batch_size or store.shards"
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


def threads_for(num_shards: int) -> int:
    """Returns the number of threads for shards. Many shards get one thread per core, because Python runs one at a time."""
    return num_shards if num_shards <= MOST_THREADS else len(os.sched_getaffinity(0))


def copied(num_keys: int, dim: int) -> bool:
    """Returns whether rows are copied for pooling, and gradients are summed before the update, instead of in place."""
    return 4 * num_keys * dim * min(1, dim / WIDE) <= COPIED_BYTES


def run_parts(
    pool: ThreadPoolExecutor | None, num_parts: int, work: Callable[[int], T], num_ids: int
) -> list[T]:
    """Runs the parts in parallel, the first in this thread. Runs them in turn without a pool or for a small batch."""
    if pool is None or num_ids < FEW_IDS:
        return list(map(work, range(num_parts)))
    others = [pool.submit(work, part) for part in range(1, num_parts)]
    try:
        first = work(0)
    finally:  # after an error too, no thread may go on working
        wait(others)
    return [first, *(other.result() for other in others)]
