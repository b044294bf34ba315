"""The part of a group that needs no store: routes keys to other processes, and pools the rows that come back.

    ids ─► unique keys ─► routed: keys of process 0, of process 1, … ─► (other processes) ─► values ─► bags
    gradients of bags ─► gradients of routed keys ─► (other processes)

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
"""A message to one process about one group: lengths, int64[M · T], the keys, and how often each key occurs.

The lengths count the keys of each table by the first micro-batch that needs them, or by shard."""


@dataclass(frozen=True)
class RoutedKeys:
    """One group's unique keys in one batch, in the order in which they are sent.

    The keys of process 0 come first. The keys of a process are in the order in which micro-batches first need them, and
    by table for each micro-batch; or by shard and table.

    Attributes:
        keys: the keys as if of one shard, numbered in this order, without their tables.
        ends: int64[P, M, T], the number of the first key after those of each process, micro-batch (or shard) and table.
    """

    keys: GroupKeys
    ends: NDArray[np.int64]

    def bounds(self) -> list[int]:
        """Returns the number of the first key of each process, and U."""
        return [0, *self.ends[:, -1, -1].tolist()]

    def of_place(self, place: int) -> KeyRequest:
        """Returns the keys that one process is asked for."""
        first, behind = self.bounds()[place : place + 2]
        (unique,) = self.keys.shards
        lengths = np.diff(self.ends[place].reshape(-1), prepend=first)
        return lengths, unique.keys[first:behind], unique.counts[first:behind]


class KeyRouter:
    """Finds and routes the keys of one group with shards in other processes.

    Each process has the same number of shards, with consecutive numbers.

    Args:
        by_shard: True sorts the keys of a process by shard, which takes no micro-batches.

    Attributes:
        bags: makes outputs from the rows of routed keys, float32[U, W], and gradients of rows from gradients of
            outputs.
    """

    def __init__(self, group: Group, num_processes: int, shards_each: int, *, by_shard: bool = False) -> None:
        self.group = group
        self._num_processes, self._num_shards = num_processes, num_processes * shards_each
        self._shards_each = 1 if by_shard else shards_each  # of a place to which keys are routed
        self.bags = BagPooler(group, 1, None)
        self._buffers = Buffers()
        self._dedup = Dedup(self._buffers)

    def ask(self, batch: Batch, parts: Sequence[slice] = (slice(0, 0),)) -> RoutedKeys:
        """Returns the unique keys of a batch, routed.

        Args:
            parts: the micro-batches of the batch, if there are several.
        """
        group, ids = self.group, ids_of(batch, self.group)
        inverse = self._buffers.take(np.int32, len(batch.ids))
        behind = np.array([part.stop for part in parts], np.int64)
        num_places = self._num_shards // self._shards_each
        ends = np.empty((num_places * len(parts), len(group.spec.tables)), np.int64)
        keys, counts = self._dedup.routed(ids, inverse, self._num_shards, self._shards_each, behind, ends)
        no_tables, all_keys = np.empty(0, np.int32), np.full(len(group.features), len(keys), np.int64)
        routed = GroupKeys([ShardKeys(keys, no_tables, counts, 0, all_keys)], inverse, ids.sizes[0])
        return RoutedKeys(routed, ends.reshape(self._num_processes, -1, ends.shape[1]))
