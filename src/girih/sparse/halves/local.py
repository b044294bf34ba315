"""The sparse half of one process: shards in its own memory, on threads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.sparse.groups.group import BY_DEVICE, EmbeddingGroup, GroupRead, bounds_in, feature_of
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.half import SparseStats
from girih.sparse.halves.done import Done
from girih.sparse.spec import SparseSpec
from girih.store import Store


class LocalPulled:
    """A batch whose embeddings are here already."""

    def __init__(self, half: LocalSparse, batch: Batch, reads: list[GroupRead], *, train: bool) -> None:
        self.staleness = 0
        self._half, self._batch, self._reads = half, batch, reads
        groups = [group.group for group in half.groups]
        self._leaves = Leaves(groups, [read.outputs for read in reads], bounds_in(batch), train=train)

    def wait(self, examples: slice | None = None) -> Embeddings:
        """The embeddings."""
        return self._leaves.embeddings(examples)

    def push(self, step: int, lr_scale: float = 1.0) -> Done:
        """Applies the gradients: one optimizer step.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no row was moved.
        """
        updates = []
        for group, read, given in zip(self._half.groups, self._reads, self._leaves.gradients(), strict=True):
            gradients = group.gradients(read, given, self._batch)
            if gradients is None:
                continue
            if gradients.nonfinite_key >= 0:
                feature = feature_of(group.group, read.inverse, gradients.nonfinite_key, self._batch)
                name = "?" if feature is None else self._half.schema.sparse[feature].name
                raise NonFiniteError(f"the gradient of feature {name!r} is NaN or infinite")
            updates.append((group, read, gradients))
        for group, read, gradients in updates:
            group.apply(read, gradients, step, lr_scale)
        self._half.last_step = step
        return Done()

    def discard(self, *, refused: bool = True) -> Done:
        """No-op: nothing is kept for a batch elsewhere."""
        return Done()


class LocalSparse:
    """Tables in this process.

    Args:
        spec: tables, and how they are kept.
        process, elsewhere: which process this is, and what tables others hold: see ``LocalShards``.
        devices: device of each group, by name; the CPU where a group is missing.

    Attributes:
        last_step: number of the last update.
    """

    def __init__(
        self,
        spec: SparseSpec,
        *,
        process: int = 0,
        elsewhere: Collection[str] | None = None,
        devices: Mapping[str, str] | None = None,
    ) -> None:
        self.schema = spec.schema
        self.last_step = 0
        groups = spec.groups()
        self._shards = LocalShards(groups, spec.resolved_store(), place=process, elsewhere=elsewhere)
        self.groups: list[EmbeddingGroup] = [
            BY_DEVICE[(devices or {}).get(group.spec.name, "cpu")](group, stores, self._shards.pool)
            for group, stores in zip(groups, self._shards.stores, strict=True)
        ]

    def pull(self, batch: Batch) -> LocalPulled:
        """Reads a batch's rows for training."""
        return self._read(batch, train=True)

    def peek(self, batch: Batch) -> LocalPulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return self._read(batch, train=False)

    def sync(self) -> None:
        """No-op: nothing is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards."""
        return SparseStats(self._shards.counters(), self._shards.rows())

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a live snapshot of every shard, to be written as a part of a checkpoint."""
        return self._shards.begin_save(writer)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows by those of any number of shards."""
        self._shards.load(reader)
        self.last_step = step

    def stores(self) -> Iterator[tuple[str, Store]]:
        """Every shard, and the place of its file in a checkpoint."""
        return self._shards.files()

    def close(self) -> None:
        """Gives the memory back; the half cannot be used after it."""
        self._shards.close()

    def _read(self, batch: Batch, *, train: bool) -> LocalPulled:
        reads = [group.read(batch, self.last_step + 1, train=train) for group in self.groups]
        return LocalPulled(self, batch, reads, train=train)
