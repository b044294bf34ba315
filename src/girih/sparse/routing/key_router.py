"""Requests of a batch for rows that lie elsewhere, and the way back: the part of a group that needs no store.

    ids ─► unique keys ─► routed: those of place 0, of place 1, … ─► (elsewhere) ─► values ─► bags
    gradients of bags ─► gradients of routed keys ─► (elsewhere)

Shapes: N ids in the batch, U unique keys, P processes, T tables, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers, Take
from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import routing
from girih.sparse.groups.bags import Bags
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup, ShardKeys


@dataclass(frozen=True)
class ShardTopology:
    """The spread of every table's shards: the same number in each process, neighbours together."""

    num_processes: int
    shards_each: int

    @property
    def num_shards(self) -> int:
        """Total number of shards."""
        return self.num_processes * self.shards_each


@dataclass
class RoutedKeys:
    """One group's unique keys in one batch, routed.

    Attributes:
        keys, counts: int64[U], int32[U]; those of place 0 first, each place's table by table.
        ends: int64[P, T], the number of the first key behind each place's of each table.
        inverse: int32[N], the routed number of the key of each of the group's ids.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int32]
    ends: NDArray[np.int64]
    inverse: NDArray[np.int32]

    def bounds(self) -> list[int]:
        """The number of the first key of each place, and U."""
        return [0, *self.ends[:, -1].tolist()]

    def lengths(self, place: int) -> NDArray[np.int64]:
        """int64[T]: how many keys of each table one place is asked for."""
        first = self.ends[place - 1, -1] if place else 0
        lengths: NDArray[np.int64] = np.diff(self.ends[place], prepend=first)
        return lengths


class KeyRouter:
    """One group, whose shards are elsewhere."""

    def __init__(self, group: Group, topology: ShardTopology) -> None:
        self.group = group
        self.topology = topology
        self._dedup = Dedup()
        self._buffers = Buffers()
        self._bags = Bags(group, 1, None)

    def ask(self, batch: Batch) -> RoutedKeys:
        """The unique keys of a batch, routed."""
        group, take = self.group, self._buffers.take
        of = ids_of(batch, group)
        sizes = dedup_kernels.count_ids(of.offsets, of.num_examples, of.features, of.tables)
        inverse = take(np.int32, len(batch.ids))
        unique = self._dedup.unique(of, sizes, inverse, self._buffers)
        size = len(unique.keys)
        where, numbers, counts = (take(np.int32, size) for _ in range(3))
        keys, ends = (
            take(np.int64, size),
            np.empty((self.topology.num_processes, len(group.spec.tables)), np.int64),
        )
        routing.places_of(
            unique.keys, unique.tables, self.topology.num_shards, self.topology.shards_each, where, ends
        )
        routing.route(unique.keys, unique.tables, unique.counts, where, ends, numbers, keys, counts)
        routing.renumber(inverse, batch.offsets, batch.num_examples, group.features, numbers)
        return RoutedKeys(keys, counts, ends, inverse)

    def pool(
        self, asked: RoutedKeys, values: NDArray[np.float32], batch: Batch, take: Take | None = None
    ) -> list[NDArray[np.float32]]:
        """The group's outputs from the rows of the routed keys, float32[U, W]; see ``Bags.pool``."""
        return self._bags.pool(values, asked.inverse, batch, take)

    def scatter(
        self, asked: RoutedKeys, given: Sequence[NDArray[np.float32] | None], batch: Batch
    ) -> tuple[NDArray[np.float32], int]:
        """The gradients of the routed keys, float32[U, W], and one that is not finite, or -1."""
        size = len(asked.keys)
        ends = np.full(len(self.group.features), size, np.int64)
        unique = ShardKeys(asked.keys, np.empty(0, np.int32), asked.counts, 0, ends)
        return self._bags.scatter(given, [unique], asked.inverse, batch)
