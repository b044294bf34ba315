"""Tables spread over the trainers whole: each trainer has those of its own features, and reads no other column (DES).

Rows never leave their trainer; what crosses the wire are partial results, in the dense half.
"""

from __future__ import annotations

from dataclasses import replace

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.errors import GirihError, NonFiniteError
from girih.models.embeddings import Embeddings
from girih.planner.placement import Placement
from girih.sparse.groups.local_shards import ShardsSave
from girih.sparse.half import SparseStats
from girih.sparse.halves.done import Done
from girih.sparse.halves.local import LocalPulled, LocalSparse
from girih.sparse.spec import SparseSpec


class FeatureParallelPulled:
    """A batch whose embeddings, those of this trainer's features, are here."""

    def __init__(self, pulled: LocalPulled, ranks: TrainerGroup) -> None:
        self.staleness = 0
        self._pulled, self._ranks = pulled, ranks

    def wait(self, examples: slice | None = None) -> Embeddings:
        """The embeddings."""
        return self._pulled.wait(examples)

    def push(self, step: int, lr_scale: float = 1.0) -> Done:
        """Applies the gradients: one optimizer step, on each trainer.

        Raises:
            GirihError: finite gradients whose sum is not: other trainers may have moved their rows already.
        """
        try:
            return self._pulled.push(step, lr_scale)
        except NonFiniteError as error:
            if self._ranks.size == 1:
                raise
            raise GirihError(
                f"trainer {self._ranks.rank}: {error}, summed up; other trainers have applied theirs; resume from the last"
                " checkpoint, with a lower learning rate or train.clip_norm"
            ) from error

    def discard(self, *, refused: bool = True) -> Done:
        """No-op: nothing is kept for a batch elsewhere."""
        return Done()


class FeatureParallelSparse:
    """The tables of this trainer's features.

    Args:
        placement: which trainer owns which features.
    """

    def __init__(self, spec: SparseSpec, ranks: TrainerGroup, placement: Placement) -> None:
        self._ranks = ranks
        self._all_tables = [table.name for table in spec.schema.tables]
        schema = placement.schema_of(ranks.rank, spec.schema)
        here = {table.name for table in schema.tables}
        # as many shards on all ranks, whatever tables each has: files are numbered by them
        own = placement.features_of(ranks.rank)
        self._tables = LocalSparse(
            replace(
                spec,
                schema=schema,
                needs={name: kinds for name, kinds in spec.needs.items() if name in own},
                store=spec.resolved_store(),
            ),
            process=ranks.rank,
            elsewhere=set(self._all_tables) - here,
        )

    def pull(self, batch: Batch) -> FeatureParallelPulled:
        """Reads a batch's rows for training."""
        return FeatureParallelPulled(self._tables.pull(batch), self._ranks)

    def peek(self, batch: Batch) -> FeatureParallelPulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return FeatureParallelPulled(self._tables.peek(batch), self._ranks)

    def sync(self) -> None:
        """No-op: nothing is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        own = self._tables.stats()
        rows = dict.fromkeys(self._all_tables, 0) | dict(own.rows)
        return SparseStats(self._ranks.sum_by_name(own.store), self._ranks.sum_by_name(rows))

    def begin_save(self, writer: Storage) -> ShardsSave:
        """All ranks take live snapshots of their tables, to be written as parts of one checkpoint."""
        return self._tables.begin_save(writer)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows by those of any number of shards; each rank takes its tables."""
        self._tables.load(reader, step=step)

    def close(self) -> None:
        """Gives the memory back."""
        self._tables.close()
