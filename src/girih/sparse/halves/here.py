"""Base of the sparse halves whose shards are in this process: reads and updates happen at once, during the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.data.batch import Batch
from girih.models.embeddings import Embeddings
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.pack import Group, by_group, sequence_bounds
from girih.sparse.half import SparseStats
from girih.store import Store

Read = TypeVar("Read")
"""Facts about one group's rows that a half needs to move them."""


class Done:
    """An update that was applied when it was made, or that moves nothing."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class PulledHere:
    """A batch whose embeddings are here already.

    Args:
        update: applies the gradients of all outputs, as one step of that number.
    """

    def __init__(self, leaves: Leaves, update: Callable[[Gradients, int, float], None]) -> None:
        self.staleness = 0
        self._leaves, self._update = leaves, update

    def wait(self, examples: slice | None = None) -> Embeddings:
        """The embeddings."""
        return self._leaves.embeddings(examples)

    def push(self, step: int, lr_scale: float = 1.0) -> Done:
        """Applies the gradients: one optimizer step.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no row was moved.
        """
        self._update(self._leaves.gradients(), step, lr_scale)
        return Done()

    def discard(self, *, refused: bool = True) -> Done:
        """No-op: nothing is kept for a batch elsewhere."""
        return Done()


class ShardedHalf(ABC, Generic[Read]):
    """A sparse half with shards in this process.

    Attributes:
        last_step: number of the last update.
    """

    def __init__(self, groups: Sequence[Group], shards: LocalShards) -> None:
        self.last_step = 0
        self._packed, self._shards = groups, shards

    @abstractmethod
    def read(self, batch: Batch, step: int, *, train: bool) -> tuple[list[Read], list[NDArray[np.float32]]]:
        """Reads a batch's rows; returns what :meth:`update` needs of each group, and the outputs of all groups."""

    @abstractmethod
    def update(
        self, batch: Batch, reads: list[Read], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """Moves rows by the gradients of each group's outputs.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no row was moved.
        """

    def pull(self, batch: Batch) -> PulledHere:
        """Reads a batch's rows for training."""
        return self._pulled(batch, train=True)

    def peek(self, batch: Batch) -> PulledHere:
        """Reads for evaluation; keys without a row give their initial value."""
        return self._pulled(batch, train=False)

    def sync(self) -> None:
        """No-op: nothing is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards."""
        return SparseStats(self._shards.counters(), self._shards.rows())

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a live snapshot of every shard here, to be written as parts of a checkpoint."""
        return self._shards.begin_save(writer)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows by those of any number of shards that belong here."""
        self._shards.load(reader)
        self.last_step = step

    def stores(self) -> Iterator[tuple[str, Store]]:
        """Every shard here, and the place of its file in a checkpoint."""
        return self._shards.files()

    def close(self) -> None:
        """Gives the memory back; the half cannot be used after it."""
        self._shards.close()

    def _pulled(self, batch: Batch, *, train: bool) -> PulledHere:
        reads, outputs = self.read(batch, self.last_step + 1, train=train)
        leaves = Leaves(self._packed, outputs, sequence_bounds(self._packed, batch), train=train)

        def update(gradients: Gradients, step: int, lr_scale: float) -> None:
            self.update(batch, reads, by_group(self._packed, gradients), step, lr_scale)
            self.last_step = step

        return PulledHere(leaves, update)
