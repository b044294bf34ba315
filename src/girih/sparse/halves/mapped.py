"""The sparse half of a server that makes predictions. It only reads rows, from mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers
from girih.models.embeddings import Embeddings
from girih.sparse.groups.bags import passes
from girih.sparse.groups.group import CpuGroup
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.pack import Group, sequence_bounds
from girih.store.mapped import Stack


class MappedSparse:
    """Reads rows from stacks of mapped files, like :meth:`~girih.sparse.half.SparseHalf.peek` of other halves.

    One thread at a time may use it. Several halves may share the stacks.

    Args:
        groups: see :func:`girih.sparse.groups.pack.served_groups`. stacks: the rows of each group.
    """

    def __init__(self, groups: Sequence[Group], stacks: Sequence[Stack]) -> None:
        self.groups, self.stacks = tuple(groups), tuple(stacks)
        self._groups = [_MappedGroup(group, stack) for group, stack in zip(groups, stacks, strict=True)]

    def peek(self, batch: Batch) -> PeekedHere:
        """Reads a batch; see :meth:`girih.sparse.half.SparseHalf.peek`."""
        outputs = [output for group in self._groups for output in group.read(batch)]
        return PeekedHere(Leaves(self.groups, outputs, sequence_bounds(self.groups, batch), train=False))


class _MappedGroup:
    """One group with its rows in a stack."""

    def __init__(self, group: Group, stack: Stack) -> None:
        self._group, self._stack = group, stack
        self._buffers = Buffers()
        # a stack has all methods of a store that are called for reading
        self._by_keys = CpuGroup(group, cast(Any, [stack]), None)
        self._places = _places_in_one_pass(group)

    def read(self, batch: Batch) -> Sequence[NDArray[np.float32]]:
        """Returns the tensors of all outputs."""
        if self._places is None or batch.weights is not None or not batch.has_single_ids:
            return self._by_keys.read(batch, 0, train=False).outputs
        outputs = [self._buffers.take(np.float32, *output.shape_in(batch)) for output in self._group.outputs]
        tail = outputs[1] if len(outputs) > 1 else None
        self._stack.copy_each(
            batch.ids, self._group.features, self._group.tables, self._places, outputs[0], tail
        )
        return outputs


def _places_in_one_pass(group: Group) -> NDArray[np.int64] | None:
    """Returns the index of each of a group's features in its outputs.

    Returns None if one pass over rows cannot make all outputs.
    """
    first, features = group.outputs[0], group.features.tolist()
    if first.whole or first.first_column or len(passes(group.outputs)) > 1:
        return None
    places = first.features.tolist()
    return np.array([places.index(feature) for feature in features]) if set(places) == set(features) else None


class PeekedHere:
    """Embeddings that are already read."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def wait(self) -> Embeddings:
        """Returns the embeddings immediately."""
        return self._leaves.embeddings()
