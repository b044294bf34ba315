"""One group's way from ids to tensors and back, in one process: dedup, look up, pool; scatter, apply.

Shapes: N ids in the batch, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.sparse.groups.bags import Bags
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Ids, ShardKeys, Shards
from girih.store import Store


@dataclass
class GroupPulled:
    """What one group read for one batch, and what it needs to find its way back."""

    shards: list[ShardKeys]
    inverse: NDArray[np.int32]
    """int32[N], the number of the key of each of the group's ids."""
    leaves: list[Tensor] = field(default_factory=list)
    """One tensor an output of the group; they collect the gradients."""


@dataclass
class GroupGradients:
    """The gradient of the key of each number, float32[·, W], and a key whose own is not finite, or -1."""

    totals: NDArray[np.float32]
    nonfinite_key: int


class EmbeddingGroup:
    """A packed group over its shards.

    Args:
        group: tables, features and outputs.
        shards: the stores; keys are spread evenly over them.
        pool: runs the shards side by side; None runs them in turn.
    """

    def __init__(self, group: Group, shards: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self.shards = tuple(shards)
        self._keys = Shards(shards, pool)
        self._bags = Bags(group, len(shards), pool)

    def read(self, batch: Batch, step: int, *, train: bool) -> GroupPulled:
        """Reads and pools the rows of a batch; ``train`` gives new keys rows and marks rows as used."""
        found = self._keys.read(ids_of(batch, self.group), step, train=train)
        outputs = self._bags.pool(found.values, found.inverse, batch)
        return GroupPulled(found.shards, found.inverse, as_leaves(outputs, train=train))

    def gradients(self, pulled: GroupPulled, batch: Batch) -> GroupGradients | None:
        """The gradient of each unique key; None where no output took part in the loss."""
        given = gradients_of(pulled.leaves)
        if all(gradient is None for gradient in given):
            return None
        return GroupGradients(*self._bags.scatter(given, pulled.shards, pulled.inverse, batch))

    def feature_of(self, pulled: GroupPulled, key: int, batch: Batch) -> int | None:
        """A feature (its index in the batch) that has an id of this key number, if any."""
        return feature_of(self.group, pulled.inverse, key, batch)

    def apply(self, pulled: GroupPulled, gradients: GroupGradients, step: int, lr_scale: float) -> None:
        """Moves the rows by their gradients."""
        self._keys.apply(pulled.shards, gradients.totals, step, lr_scale)


def ids_of(batch: Batch, group: Group) -> Ids:
    """A batch's ids, as far as they are the group's."""
    return Ids(batch.ids, batch.offsets, batch.num_examples, group.features, group.tables)


def as_leaves(outputs: Sequence[NDArray[np.float32]], *, train: bool) -> list[Tensor]:
    """Tensors over the same memory; with ``train`` they collect gradients."""
    return [torch.from_numpy(output).requires_grad_(train) for output in outputs]


def gradients_of(leaves: Sequence[Tensor]) -> list[NDArray[np.float32] | None]:
    """float32[·, D] of each, or None where it took no part in the loss."""
    return [
        None if leaf.grad is None else leaf.grad.contiguous().view(-1, leaf.grad.shape[-1]).numpy()
        for leaf in leaves
    ]


def feature_of(group: Group, inverse: NDArray[np.int32], key: int, batch: Batch) -> int | None:
    """A feature of the group (its index in the batch) that has an id of this key number, if any."""
    size = batch.num_examples
    for feature in group.features:
        ids = slice(batch.offsets[feature * size], batch.offsets[(feature + 1) * size])
        if (inverse[ids] == key).any():
            return int(feature)
    return None
