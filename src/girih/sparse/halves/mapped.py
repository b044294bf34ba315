"""The sparse half of a server: rows in mapped files, which it reads alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from girih.data.batch import Batch
from girih.models.embeddings import Embeddings
from girih.sparse.groups.group import CpuGroup
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.pack import Group, sequence_bounds
from girih.store.mapped import Stack


class MappedSparse:
    """Stacks of mapped files, read as a half with shards of its own is read by :meth:`~girih.sparse.half.SparseHalf.peek`.

    One thread at a time may use it; the stacks themselves may be shared.

    Args:
        groups: see :func:`girih.sparse.groups.served.served_groups`. stacks: the rows of each.
    """

    def __init__(self, groups: Sequence[Group], stacks: Sequence[Stack]) -> None:
        self.groups, self.stacks = tuple(groups), tuple(stacks)
        # a stack has what a group asks of a store where it reads
        self._groups = [
            CpuGroup(group, cast(Any, [stack]), None) for group, stack in zip(groups, stacks, strict=True)
        ]

    def peek(self, batch: Batch) -> PeekedHere:
        """Reads a batch; see :meth:`girih.sparse.half.SparseHalf.peek`."""
        reads = [group.read(batch, 0, train=False) for group in self._groups]
        outputs = [output for read in reads for output in read.outputs]
        return PeekedHere(Leaves(self.groups, outputs, sequence_bounds(self.groups, batch), train=False))


class PeekedHere:
    """Embeddings that were read when they were asked for."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def wait(self) -> Embeddings:
        """Returns at once."""
        return self._leaves.embeddings()
