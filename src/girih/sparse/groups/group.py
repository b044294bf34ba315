"""An embedding group on a device: ids to pooled rows and back, with one operation for all its tables.

Shapes: F features, N ids in the batch, U unique keys of a group, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.cpu.update import Terms
from girih.sparse.groups.bags import BagPooler
from girih.sparse.groups.pack import Group, Sized
from girih.sparse.groups.shards import GroupKeys, Ids, ShardKeys, Shards
from girih.store import Store

Fill = Callable[[slice], None]
"""Fills in, of a group's outputs, what is some examples'."""


@dataclass(frozen=True)
class GroupRead:
    """The rows of one group for one batch, pooled.

    Attributes:
        outputs: the tensors of the group's outputs, on its device.
        keys: whose rows they are.
    """

    outputs: Sequence[Any]
    keys: GroupKeys


@dataclass(frozen=True)
class GroupGradients:
    """Gradients of keys.

    Attributes:
        totals: float32[·, W], that of the key of each number; or those of outputs, which are its terms.
        nonfinite_key: a key whose own is not finite, or -1.
        terms_of: for a shard's keys, the sums that their gradients are; None where ``totals`` are these.
    """

    totals: NDArray[np.float32]
    nonfinite_key: int
    terms_of: Callable[[ShardKeys], Terms] | None = None


class ReadRows(Protocol):
    """A group's rows for one batch; what else it says is the group's own."""

    @property
    def outputs(self) -> Sequence[Any]:
        """The tensors of the group's outputs, on its device."""
        ...


class SummedGradients(Protocol):
    """Gradients of a group's keys; what else it says is the group's own."""

    @property
    def nonfinite_key(self) -> Any:
        """A key whose own is not finite, or -1: an int, or int32[1] on the group's device."""
        ...


class EmbeddingGroup(Protocol):
    """One group over the shards of one process: the seam between devices.

    Attributes:
        group: tables, features and outputs.
        device_type: the type of the torch device of its outputs; None for arrays of this machine's memory.
    """

    group: Group

    @property
    def device_type(self) -> str | None: ...

    def find(self, batch: Batch) -> Any:
        """The unique keys of a batch, which depend on its ids alone, as the group's other verbs take them."""
        ...

    def fetch(self, keys: Any) -> None:
        """Begins to read the rows of the next lookup from tiers below memory; changes no result."""
        ...

    def lookup(
        self, batch: Batch, step: int, *, train: bool, keys: Any | None = None
    ) -> tuple[ReadRows, Fill]:
        """Reads the rows of a batch; ``train`` gives new keys rows and marks rows as used.

        Args:
            keys: the result of :meth:`find`; None calls it now.

        Returns:
            The rows, of which no output is filled in, and what does that; all of it before another verb.
        """
        ...

    def gradients(self, read: Any, gradients: Sequence[Any], batch: Batch) -> SummedGradients | None:
        """The gradient of each unique key; None where no output took part in the loss.

        Args:
            gradients: the gradient of each output, float32[·, D] on this group's device, or None.
        """
        ...

    def apply(self, read: Any, gradients: Any, step: int, lr_scale: float) -> None:
        """Moves the rows by their gradients."""
        ...

    def inverse(self, read: Any) -> Any:
        """int32[N], an array, or a tensor on the group's device: the number of the key of each of the group's ids, by which one whose gradient is not finite is named."""
        ...

    def absent(self, read: Any) -> NDArray[np.bool_]:
        """bool[·]: whether the key of each number has no row."""
        ...


class CpuGroup:
    """A group in this machine's memory.

    Args:
        shards: the stores; keys are spread evenly over them.
        pool: runs the shards side by side; None runs them in turn.
    """

    device_type = None

    def __init__(self, group: Group, shards: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self._keys = Shards(shards, pool)
        self._bags = BagPooler(group, len(shards), pool)

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
    """A batch's ids, as far as they are the group's."""
    return Ids(batch.ids, batch.offsets, batch.num_examples, group.features, group.tables)


def feature_of(group: Group, inverse: NDArray[np.int32], key: int, batch: Sized) -> str:
    """Name of a feature that has an id of this key number."""
    names = {
        f: name for output in group.outputs for f, name in zip(output.features, output.names, strict=True)
    }
    return next((name for f, name in names.items() if (inverse[batch.ids_of(f)] == key).any()), "?")


READ, EVALUATED, UNSEEN = KINDS = ("ids.", "evaluated.", "unseen.")
"""Prefixes of a feature's name: ids in training steps, ids in evaluations, and ids in evaluations that had no row."""


class FeatureCounts:
    """Counts the ids of the features of some groups: how many training read, how many evaluations read, and how many of those had no row.

    Every occurrence of an id counts.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        outputs = [output for group in groups for output in group.outputs]
        self._names = {
            int(f): n for output in outputs for f, n in zip(output.features, output.names, strict=True)
        }
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
