"""Where features go, decided once, before the first of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.comm.context import RunContext
from girih.data import Dataset
from girih.dense.halves.substituted import SubstitutedReplica
from girih.sparse.access_profile import AccessProfile
from girih.sparse.halves.feature_parallel import FeatureParallelSparse
from girih.sparse.spec import SparseSpec
from girih.strategies.substitution import Substitution
from girih.training.halves import DenseHalf, SparseHalf


def place(
    strategy: object,
    sparse: SparseHalf,
    dense: DenseHalf,
    spec: SparseSpec,
    context: RunContext,
    *,
    train: Dataset | None = None,
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Places features where a strategy needs it; all trainers call it together, once.

    Args:
        train: the data to measure, which rank 0 does.
        kept: what this returned in the run that goes on, and :func:`plan` added.

    Returns:
        What was measured, for checkpoints; nothing with strategies that do not place features.
    """
    if not (
        isinstance(strategy, Substitution)
        and isinstance(sparse, FeatureParallelSparse)
        and isinstance(dense, SubstitutedReplica)
    ):
        return {}
    ranks = context.ranks
    known = dict(kept or {})
    if "touched" not in known and train is not None and ranks.size > 1:
        known["touched"] = ranks.broadcast(
            AccessProfile.measure(train, spec, ranks.size).to_dict() if ranks.first else None
        )
    strategy.place(sparse, dense, spec, AccessProfile(**known["touched"]) if "touched" in known else None)
    return known


def plan(strategy: object, dense: DenseHalf, kept: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Decides who computes what, and says what a step will send; all trainers call it together, before they train.

    Args:
        kept: what :func:`place` returned; what is decided is noted there.

    Returns:
        ``summary.json``'s ``plan``: nothing with strategies that do not plan, or where one trainer is alone.
    """
    if (
        not (isinstance(strategy, Substitution) and isinstance(dense, SubstitutedReplica))
        or dense.ranks.size == 1
    ):
        return {}
    decided = kept.get("split") if kept.get("trainers") == dense.ranks.size else None
    strategy.divide(dense, batch_size, decided)
    kept |= {"split": dense.split, "trainers": dense.ranks.size}
    return strategy.plan(dense, AccessProfile(**kept["touched"]) if "touched" in kept else None, batch_size)
