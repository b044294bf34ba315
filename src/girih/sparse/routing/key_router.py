"""Requests of a batch for rows that lie elsewhere, and the way back: the part of a group that needs no store.

    ids ─► unique keys ─► routed: those of place 0, of place 1, … ─► (elsewhere) ─► values ─► bags
    gradients of bags ─► gradients of routed keys ─► (elsewhere)

Shapes: N ids in the batch, U unique keys, P processes, T tables, W columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers
from girih.sparse.groups.bags import Bags
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup, GroupKeys, ShardKeys

KeyRequest = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""A message to one place about one group: how many keys of each table, int64[T]; the keys; how often each occurs."""


@dataclass(frozen=True)
class RoutedKeys:
    """One group's unique keys in one batch, routed: those of place 0 first, each place's table by table.

    Attributes:
        keys: as of one shard, numbered as they are routed; their tables are left out.
        ends: int64[P, T], the number of the first key behind each place's of each table.
    """

    keys: GroupKeys
    ends: NDArray[np.int64]

    def bounds(self) -> list[int]:
        """The number of the first key of each place, and U."""
        return [0, *self.ends[:, -1].tolist()]

    def of_place(self, place: int) -> KeyRequest:
        """Keys that one place is asked for."""
        first, behind = self.bounds()[place : place + 2]
        (unique,) = self.keys.shards
        lengths = np.diff(self.ends[place], prepend=first)
        return lengths, unique.keys[first:behind], unique.counts[first:behind]


class KeyRouter:
    """One group, whose shards are elsewhere: the same number in each process, neighbours together.

    Attributes:
        bags: makes outputs of the rows of routed keys, float32[U, W], and gradients of rows of those of outputs.
    """

    def __init__(self, group: Group, num_processes: int, shards_each: int) -> None:
        self.group = group
        self._num_processes, self._shards_each = num_processes, shards_each
        self.bags = Bags(group, 1, None)
        self._buffers = Buffers()
        self._dedup = Dedup(self._buffers)

    def ask(self, batch: Batch) -> RoutedKeys:
        """The unique keys of a batch, routed."""
        group, ids = self.group, ids_of(batch, self.group)
        inverse = self._buffers.take(np.int32, len(batch.ids))
        ends = np.empty((self._num_processes, len(group.spec.tables)), np.int64)
        num_shards = self._num_processes * self._shards_each
        keys, counts = self._dedup.routed(ids, inverse, num_shards, self._shards_each, ends)
        no_tables, behind = np.empty(0, np.int32), np.full(len(group.features), len(keys), np.int64)
        routed = GroupKeys([ShardKeys(keys, no_tables, counts, 0, behind)], inverse, ids.sizes[0])
        return RoutedKeys(routed, ends)
