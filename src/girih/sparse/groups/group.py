"""An embedding group on one device: turns ids into pooled rows, and gradients into row updates.

One operation serves all tables of the group.

Shapes: F features, N ids in the batch, U unique keys of a group, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.cpu.update import Terms
from girih.sparse.groups.bags import BagPooler
from girih.sparse.groups.pack import Group, Sized
from girih.sparse.groups.shards import GroupKeys, Ids, ShardKeys, Shards, threads_for
from girih.store import Store

Fill = Callable[[slice], None]
"""Fills in a range of examples in all outputs of a group."""


@dataclass(frozen=True)
class GroupRead:
    """The pooled rows of one group for one batch.

    Attributes:
        outputs: the tensors of the group's outputs, on its device.
        keys: the unique keys of these rows.
    """

    outputs: Sequence[NDArray[np.float32]]
    keys: GroupKeys


@dataclass(frozen=True)
class GroupGradients:
    """The gradients of a group's keys.

    Attributes:
        totals: float32[·, W], the gradient of each key, by key number. If ``terms_of`` is given: the gradients of
            outputs, which are not summed yet.
        nonfinite_key: a key with a gradient that is not finite, or -1.
        terms_of: returns, for a shard's keys, the rows of ``totals`` that each key's gradient sums. None if
            ``totals`` holds the sums.
    """

    totals: NDArray[np.float32]
    nonfinite_key: int
    terms_of: Callable[[ShardKeys], Terms] | None = None


class CpuGroup:
    """An embedding group in host memory.

    Args:
        shards: the stores. Keys are spread evenly over them.
        pool: runs the shards in parallel; None runs them in turn.
    """

    device_type = None

    def __init__(self, group: Group, shards: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self._keys = Shards(shards, pool)
        self._bags = BagPooler(group, threads_for(len(shards)), pool)

    def find(self, batch: Batch) -> GroupKeys:
        """See :class:`EmbeddingGroup`."""
        return self._keys.find(ids_of(batch, self.group))

    def fetch(self, keys: GroupKeys) -> None:
        """See :class:`EmbeddingGroup`."""
        self._keys.fetch(keys)

    def lookup(
        self, batch: Batch, step: int, *, train: bool, keys: GroupKeys | None = None
    ) -> tuple[GroupRead, Fill]:
        """See :class:`EmbeddingGroup`."""
        keys, rows = self._keys.lookup(ids_of(batch, self.group), step, train=train, keys=keys)
        pooling = self._bags.pooling(rows, keys, batch)
        return GroupRead(pooling.outputs, keys), pooling.fill

    def read(self, batch: Batch, step: int, *, train: bool) -> GroupRead:
        """:meth:`lookup` with all outputs filled in."""
        read, fill = self.lookup(batch, step, train=train)
        fill(slice(0, batch.num_examples))
        return read

    def gradients(
        self, read: GroupRead, gradients: Sequence[NDArray[np.float32] | None], batch: Batch
    ) -> GroupGradients | None:
        """See :class:`EmbeddingGroup`."""
        if {*map(type, gradients)} == {type(None)}:
            return None
        direct = self._bags.terms(gradients, read.keys, batch)
        if direct is not None:
            return GroupGradients(direct.gradient, -1, direct.terms_of)
        return GroupGradients(*self._bags.scatter(gradients, read.keys, batch))

    def apply(self, read: GroupRead, gradients: GroupGradients, step: int, lr_scale: float) -> None:
        """See :class:`EmbeddingGroup`."""
        self._keys.apply(read.keys, gradients.totals, step, lr_scale, gradients.terms_of)

    def inverse(self, read: GroupRead) -> NDArray[np.int32]:
        """See :class:`EmbeddingGroup`."""
        keys: GroupKeys = read.keys
        return keys.inverse

    def absent(self, read: GroupRead) -> NDArray[np.bool_]:
        """See :class:`EmbeddingGroup`."""
        return read.keys.absent()


def ids_of(batch: Batch, group: Group) -> Ids:
    """Returns the ids of a group's features in a batch."""
    return Ids(batch.ids, batch.offsets, batch.num_examples, group.features, group.tables)


def feature_of(group: Group, inverse: NDArray[np.int32], key: int, batch: Sized) -> str:
    """Returns the name of a feature that has an id with this key number."""
    names = {
        f: name for output in group.outputs for f, name in zip(output.features, output.names, strict=True)
    }
    return next((name for f, name in names.items() if (inverse[batch.ids_of(f)] == key).any()), "?")


READ, EVALUATED, UNSEEN = KINDS = ("ids.", "evaluated.", "unseen.")
"""Prefixes of feature names: ids in training steps, ids in evaluations, and ids in evaluations that had no row."""


class FeatureCounts:
    """Counts the ids of each feature: ids read in training, ids read in evaluations, and the latter without a row.

    Every occurrence of an id counts.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        outputs = [output for group in groups for output in group.outputs]
        self._names = {
            int(f): n for output in outputs for f, n in zip(output.features, output.names, strict=True)
        }
        self._counts = np.zeros((len(KINDS), 1 + max(self._names, default=-1)), np.int64)

    def add_training(self, batch: Batch) -> None:
        """Counts the ids of a training batch."""
        if batch.num_examples:
            self._counts[0] += np.diff(batch.offsets[:: batch.num_examples])[: self._counts.shape[1]]

    def add_evaluation(
        self, batch: Batch, group: Group, inverse: NDArray[np.int32], absent: NDArray[np.generic]
    ) -> None:
        """Counts one group's ids in an evaluation batch.

        Args:
            inverse: int32[N], the key number of each of the group's ids.
            absent: bool or uint8[U], by key number: True for keys without a row.
        """
        for feature in group.features.tolist():
            keys = inverse[batch.ids_of(feature)]
            self._counts[1:, feature] += [len(keys), int(np.count_nonzero(absent[keys]))]

    def read(self) -> dict[str, int]:
        """Returns the counts so far, by prefix and feature name."""
        return {k + n: int(self._counts[i, f]) for i, k in enumerate(KINDS) for f, n in self._names.items()}
