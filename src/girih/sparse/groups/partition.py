"""Partition of a group's work on the way back: parts that share no key, and outputs that one pass serves.

Shapes: P features of an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from girih.sparse.groups.pack import Group, GroupOutput


@dataclass(frozen=True)
class Members:
    """Some features of an output: which, where they stand in it, and how they are pooled."""

    features: NDArray[np.int64]
    places: NDArray[np.int64]
    modes: NDArray[np.int8]


@dataclass(frozen=True)
class WorkSlice:
    """Keys that no other part has: all those of some tables, or all those of one shard.

    Attributes:
        first, last: the features whose tables they are, among the group's.
        shard: the one shard, or None for all.
        members: of each output.
    """

    first: int
    last: int
    shard: int | None
    members: tuple[Members, ...]

    def key_range(self, shard: int, first_key: int, ends: NDArray[np.int64]) -> tuple[int, int]:
        """Numbers of the first of a shard's keys that are the part's, and of the first behind them.

        Args:
            first_key: number of the shard's first key; ends: how many it has after each feature.
        """
        if self.shard not in (None, shard):
            return first_key, first_key
        before = int(ends[self.first - 1]) if self.first else 0
        return first_key + before, first_key + int(ends[self.last - 1])


def partition(group: Group, num_shards: int) -> list[WorkSlice]:
    """At most so many parts: by tables, features spread evenly, where there are tables enough; else by shards."""
    num_features = len(group.features)
    changes = [f for f in range(1, num_features) if group.tables[f] != group.tables[f - 1]]
    if len(changes) + 1 < num_shards:
        return [_part(group, 0, num_features, shard) for shard in range(num_shards)]
    wanted = [part * num_features / num_shards for part in range(1, num_shards)]
    cuts = {min(changes, key=lambda f, w=w: abs(f - w)) for w in wanted}  # type: ignore[misc]
    return [_part(group, first, last, None) for first, last in pairwise([0, *sorted(cuts), num_features])]


def _part(group: Group, first: int, last: int, shard: int | None) -> WorkSlice:
    inside = set(group.features[first:last].tolist())
    members = []
    for output in group.outputs:
        places = [place for place, feature in enumerate(output.features) if int(feature) in inside]
        members.append(Members(output.features[places], np.array(places, np.int64), output.modes[places]))
    return WorkSlice(first, last, shard, tuple(members))


def passes(outputs: tuple[GroupOutput, ...]) -> list[tuple[int, ...]]:
    """Which outputs one pass serves: embeddings and first-order weights, columns side by side, of the same features;
    else one."""
    pooled = [number for number, output in enumerate(outputs) if not output.whole]
    whole = [(number,) for number, output in enumerate(outputs) if output.whole]
    if len(pooled) == 2 and np.array_equal(outputs[pooled[0]].features, outputs[pooled[1]].features):
        return [tuple(pooled), *whole]
    return [*((number,) for number in pooled), *whole]
