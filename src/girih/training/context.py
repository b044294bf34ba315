"""Context from which a strategy builds a session: this trainer, its specs, and the processes of the run."""

from __future__ import annotations

from dataclasses import dataclass

from girih.cluster.cluster import Cluster
from girih.comm.group import TrainerGroup
from girih.dense.spec import DenseSpec
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost
from girih.runs.stats import Stats
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Live objects of one trainer that are there before its halves.

    Attributes:
        ranks: this trainer among all.
        sparse, dense: what the halves are made of.
        processes: starts and ends roles beside the trainers; its methods are called by all trainers together.
        stats: statistics of this process.
        batch_size: examples per step over all trainers; None where a session opens without training data.
        calibration: of the machine; None where none was given. dense_cost: what the model and its optimizer then took.
    """

    ranks: TrainerGroup
    sparse: SparseSpec
    dense: DenseSpec
    processes: Cluster
    stats: Stats
    batch_size: int | None = None
    calibration: Calibration | None = None
    dense_cost: DenseCost | None = None
