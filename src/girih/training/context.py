"""Context from which a strategy builds a session: this trainer, its specs, and the processes of the run."""

from __future__ import annotations

from dataclasses import dataclass

from girih.cluster.cluster import Cluster
from girih.comm.group import TrainerGroup
from girih.dense.spec import DenseSpec
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
    """

    ranks: TrainerGroup
    sparse: SparseSpec
    dense: DenseSpec
    processes: Cluster
    stats: Stats
