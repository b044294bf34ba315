"""Counts of each feature's ids: how many training read, how many evaluations read, and how many of those had no row.

Shapes: F features, N ids in the batch, U unique keys of a group.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.sparse.groups.pack import Group

READ, EVALUATED, UNSEEN = KINDS = ("ids.", "evaluated.", "unseen.")
"""Prefixes of a feature's name: ids in training steps, ids in evaluations, and ids in evaluations that had no row."""


class FeatureCounts:
    """Counts the ids of the features of some groups. Every occurrence of an id counts."""

    def __init__(self, groups: Iterable[Group]) -> None:
        outputs = [output for group in groups for output in group.outputs]
        self._names = {int(f): n for each in outputs for f, n in zip(each.features, each.names, strict=True)}
        self._counts = np.zeros((len(KINDS), 1 + max(self._names, default=-1)), np.int64)

    def add_training(self, batch: Batch) -> None:
        """Counts a batch of training."""
        if batch.num_examples:
            self._counts[0] += np.diff(batch.offsets[:: batch.num_examples])[: self._counts.shape[1]]

    def add_evaluation(
        self, batch: Batch, group: Group, inverse: NDArray[np.int32], absent: NDArray[np.generic]
    ) -> None:
        """Counts the ids that a batch of an evaluation has of one group.

        Args:
            inverse: int32[N], the number of the key of each of the group's ids.
            absent: bool or uint8[U], whether the key of each number has no row.
        """
        for feature in group.features.tolist():
            keys = inverse[batch.ids_of(feature)]
            self._counts[1:, feature] += [len(keys), int(np.count_nonzero(absent[keys]))]

    def read(self) -> dict[str, int]:
        """The counts so far, by a prefix and the feature's name."""
        return {k + n: int(self._counts[i, f]) for i, k in enumerate(KINDS) for f, n in self._names.items()}
