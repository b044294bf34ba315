"""Where features go, decided once, before the first of them is read."""

from __future__ import annotations

from typing import Any

from girih.company import Company
from girih.data import Dataset
from girih.dense.substituted import SubstitutedReplica
from girih.sparse.spec import SparseSpec
from girih.sparse.substituted import SubstitutedSparse
from girih.sparse.touching import Touched
from girih.strategies.substitution import Substitution
from girih.tiles import DenseHalf, SparseHalf


def place(
    strategy: object,
    sparse: SparseHalf,
    dense: DenseHalf,
    spec: SparseSpec,
    company: Company,
    *,
    train: Dataset | None = None,
    touched: dict[str, Any] | None = None,
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Places features where a strategy needs it; all trainers call it together.

    Args:
        train: the data to measure, which rank 0 does. touched: what was measured before, of a run that goes on.

    Returns:
        What was measured, and the plan: both nothing with strategies that do not place features.
    """
    if not (
        isinstance(strategy, Substitution)
        and isinstance(sparse, SubstitutedSparse)
        and isinstance(dense, SubstitutedReplica)
    ):
        return None, {}
    ranks = company.ranks
    if touched is None and train is not None and ranks.size > 1:
        touched = ranks.broadcast(Touched.measure(train, spec, ranks.size).to_dict() if ranks.first else None)
    known = None if touched is None else Touched(**touched)
    batch_size = None if train is None else train.batch_size
    return touched, strategy.place(sparse, dense, spec, known, batch_size)
