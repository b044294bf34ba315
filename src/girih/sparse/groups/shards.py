"""The keys' side of a group: ids become unique keys of each shard, keys become rows, gradients move rows.

Every shard's thread finds its own keys among all ids, so that nothing is sorted or copied between them. All
shards number their keys together: those of shard s from s · n on, n being the ids of the group.

Shapes: F features of the group, N ids, U unique keys of a shard, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.kernels.buffers import Buffers
from girih.kernels.cpu import dedup as kernels
from girih.sparse.groups.threads import each
from girih.store import Store

SLOTS_PER_ID = 3  # at least: few enough to stay in L2, many enough that homes are free


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


@dataclass
class Found:
    """The unique keys of all shards, and their rows' values.

    Attributes:
        inverse: int32[N], the number of the key of each of the group's ids.
        values: float32[·, W], the row of the key of each number.
    """

    shards: list[ShardKeys]
    inverse: NDArray[np.int32]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Ids:
    """The ids of some features as they lie in a batch: see :class:`girih.data.batch.Batch`.

    Attributes:
        features, tables: int64[F], int32[F]: which features, and the table of each; those of one table
            stand together.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int32]
    num_examples: int
    features: NDArray[np.int64]
    tables: NDArray[np.int32]


class Dedup:
    """One thread's hash table, and memory for the ids of one feature."""

    def __init__(self) -> None:
        self._slots: NDArray[np.int32] = np.zeros(1 << 10, np.int32)
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._own: NDArray[np.int32] = np.empty(0, np.int32)
        self._base = 1

    def unique(
        self,
        of: Ids,
        sizes: tuple[int, int, int],
        inverse: NDArray[np.int32],
        buffers: Buffers,
        shard: int = 0,
        num_shards: int = 1,
        first: int = 0,
    ) -> ShardKeys:
        """The unique keys that belong to one of so many shards; writes their numbers, from ``first`` on, to
        ``inverse``.

        Args:
            sizes: ``count_ids`` of the same ids.
        """
        num_ids, longest, of_table = sizes
        self._make_room(longest, of_table, num_ids)
        keys, tables, counts = (buffers.take(kind, num_ids) for kind in (np.int64, np.int32, np.int32))
        ends = np.empty(len(of.features), np.int64)
        num_keys = kernels.dedup(
            of.ids, of.offsets, of.num_examples, of.features, of.tables, shard, num_shards, self._slots, self._base,
            self._hashes, first, self._own, inverse, keys, tables, counts, ends,
        )  # fmt: skip
        self._base += num_keys
        return ShardKeys(keys[:num_keys], tables[:num_keys], counts[:num_keys], first, ends)

    def _make_room(self, ids_of_feature: int, ids_of_table: int, num_ids: int) -> None:
        if len(self._hashes) < ids_of_feature:
            self._hashes = np.empty(ids_of_feature, np.uint64)
            self._own = np.empty(ids_of_feature, np.int32)
        if len(self._slots) < SLOTS_PER_ID * ids_of_table:
            self._slots = np.zeros(1 << (SLOTS_PER_ID * ids_of_table - 1).bit_length(), np.int32)
            self._base = 1
        elif self._base + num_ids > kernels.MAX_NUMBER:
            self._slots[:] = 0
            self._base = 1


class Shards:
    """The shards of a group that this process holds.

    Args:
        stores: neighbours among all shards of the group, over which keys are spread evenly.
        pool: runs them side by side; None runs them in turn.
    """

    def __init__(self, stores: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.stores = tuple(stores)
        self.pool = pool
        self._dedups = [Dedup() for _ in stores]
        self._buffers = Buffers()

    def read(self, of: Ids, step: int, *, train: bool, counts: NDArray[np.int32] | None = None) -> Found:
        """Reads the rows of the keys that belong here; ``train`` gives new keys rows and marks rows as used.

        Numbers of ids that belong elsewhere are any, or -1 where ``counts`` are given.

        Args:
            counts: int32[N], how often each id stands for itself; None is once.
        """
        sizes = kernels.count_ids(of.offsets, of.num_examples, of.features, of.tables)
        num_ids = sizes[0]
        inverse = self._buffers.take(np.int32, len(of.ids))
        if counts is not None:
            inverse.fill(-1)
        values = self._buffers.take(np.float32, len(self.stores) * num_ids, self.stores[0].spec.dim)

        def read_shard(s: int) -> ShardKeys:
            store, first = self.stores[s], s * num_ids
            mine = self._dedups[s].unique(
                of, sizes, inverse, self._buffers, store.shard, store.num_shards, first
            )
            if counts is not None:
                kernels.sum_counts(inverse, counts, first, mine.counts)
            out = values[first : first + len(mine.keys)]
            if train:
                mine.rows = store.lookup(mine.keys, mine.tables, mine.counts, step, out)
            else:
                mine.rows = store.peek(mine.keys, mine.tables, out)
            return mine

        return Found(each(self.pool, len(self.stores), read_shard, num_ids), inverse, values)

    def find(self, of: Ids) -> Found:
        """The unique keys that belong here; no row is read, and none is known."""
        sizes = kernels.count_ids(of.offsets, of.num_examples, of.features, of.tables)
        inverse = self._buffers.take(np.int32, len(of.ids))

        def find_shard(s: int) -> ShardKeys:
            store, first = self.stores[s], s * sizes[0]
            return self._dedups[s].unique(
                of, sizes, inverse, self._buffers, store.shard, store.num_shards, first
            )

        shards = each(self.pool, len(self.stores), find_shard, sizes[0])
        return Found(shards, inverse, np.empty((0, self.stores[0].spec.dim), np.float32))

    def apply(
        self, shards: Sequence[ShardKeys], gradients: NDArray[np.float32], step: int, lr_scale: float
    ) -> int:
        """Moves rows by gradients, float32[·, W], one for the key of each number; returns how many were dropped."""

        def apply_shard(s: int) -> int:
            part = shards[s]
            own = gradients[part.first : part.first + len(part.keys)]
            return self.stores[s].apply_gradients(part.keys, part.tables, part.rows, own, step, lr_scale)

        return sum(each(self.pool, len(shards), apply_shard, sum(len(part.keys) for part in shards)))
