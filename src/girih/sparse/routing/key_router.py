"""Requests of a batch for rows that lie elsewhere, and the way back: the part of a group that needs no store.

    ids ─► unique keys ─► routed: those of place 0, of place 1, … ─► (elsewhere) ─► values ─► bags
    gradients of bags ─► gradients of routed keys ─► (elsewhere)

Shapes: N ids in the batch, U unique keys, P processes, M micro-batches, T tables, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers
from girih.sparse.groups.bags import BagPooler
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup, GroupKeys, ShardKeys

KeyRequest = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""A message to one place about one group: how many keys of each table each micro-batch is the first to need, int64[M · T];
the keys; how often each occurs."""


@dataclass(frozen=True)
class RoutedKeys:
    """One group's unique keys in one batch, routed: those of place 0 first, each place's in the order in which micro-batches
    first need them, table by table.

    Attributes:
        keys: as of one shard, numbered as they are routed; their tables are left out.
        ends: int64[P, M, T], the number of the first key behind these.
    """

    keys: GroupKeys
    ends: NDArray[np.int64]

    def bounds(self) -> list[int]:
        """The number of the first key of each place, and U."""
        return [0, *self.ends[:, -1, -1].tolist()]

    def of_place(self, place: int) -> KeyRequest:
        """Keys that one place is asked for."""
        first, behind = self.bounds()[place : place + 2]
        (unique,) = self.keys.shards
        lengths = np.diff(self.ends[place].reshape(-1), prepend=first)
        return lengths, unique.keys[first:behind], unique.counts[first:behind]


class KeyRouter:
    """One group, whose shards are elsewhere: the same number in each process, neighbours together.

    Attributes:
        bags: makes outputs of the rows of routed keys, float32[U, W], and gradients of rows of those of outputs.
    """

    def __init__(self, group: Group, num_processes: int, shards_each: int) -> None:
        self.group = group
        self._num_processes, self._shards_each = num_processes, shards_each
        self.bags = BagPooler(group, 1, None)
        self._buffers = Buffers()
        self._dedup = Dedup(self._buffers)

    def ask(self, batch: Batch, parts: Sequence[slice] = (slice(0, 0),)) -> RoutedKeys:
        """The unique keys of a batch, routed.

        Args:
            parts: the micro-batches that it is cut into, where there are several.
        """
        group, ids = self.group, ids_of(batch, self.group)
        inverse = self._buffers.take(np.int32, len(batch.ids))
        behind = np.array([part.stop for part in parts], np.int64)
        ends = np.empty((self._num_processes * len(parts), len(group.spec.tables)), np.int64)
        num_shards = self._num_processes * self._shards_each
        keys, counts = self._dedup.routed(ids, inverse, num_shards, self._shards_each, behind, ends)
        no_tables, all_keys = np.empty(0, np.int32), np.full(len(group.features), len(keys), np.int64)
        routed = GroupKeys([ShardKeys(keys, no_tables, counts, 0, all_keys)], inverse, ids.sizes[0])
        return RoutedKeys(routed, ends.reshape(self._num_processes, len(parts), -1))
