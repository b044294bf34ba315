"""Tables spread over the trainers whole: each trainer has those of its own features, and reads no other column (DES).

Rows never leave their trainer; what crosses the wire are partial results, in the dense half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.errors import GirihError, NonFiniteError
from girih.planner.placement import Placement
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.feature_counts import FeatureCounts
from girih.sparse.groups.group import ReadRows
from girih.sparse.half import SparseStats
from girih.sparse.halves.local import LocalSparse
from girih.sparse.spec import SparseSpec


class FeatureParallelSparse(LocalSparse):
    """The tables of this trainer's features.

    Args:
        placement: which trainer owns which features.
        micro_batches, ahead: see :class:`ShardedHalf`.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        placement: Placement,
        *,
        micro_batches: int = 1,
        ahead: bool = False,
    ) -> None:
        self._ranks = ranks
        self._all_tables = [table.name for table in spec.schema.tables]
        self._all_features = FeatureCounts(spec.groups()).read()
        schema = placement.schema_of(ranks.rank, spec.schema)
        own = spec.narrowed(placement.features_of(ranks.rank), schema)
        # as many shards on all ranks, whatever tables each has: files are numbered by them
        super().__init__(
            replace(own, store=spec.resolved_store()),
            process=ranks.rank,
            elsewhere=set(self._all_tables) - {table.name for table in schema.tables},
            micro_batches=micro_batches,
            ahead=ahead,
        )

    def update(
        self, batch: Batch, reads: list[ReadRows], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """See :class:`ShardedHalf`.

        Raises:
            GirihError: finite gradients whose sum is not: other trainers may have moved their rows already.
        """
        try:
            super().update(batch, reads, gradients, step, lr_scale)
        except NonFiniteError as error:
            if self._ranks.size == 1:
                raise
            raise GirihError(
                f"trainer {self._ranks.rank}: {error}, summed up; other trainers have applied theirs; resume from the last"
                " checkpoint, with a lower learning rate or train.clip_norm"
            ) from error

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        total, rows = self._ranks.sum_by_name, dict.fromkeys(self._all_tables, 0) | self._shards.rows()
        features = self._all_features | self.features.read()
        return SparseStats(total(self._shards.counters()), total(rows), features=total(features))
