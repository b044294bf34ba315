"""A session: the live objects that a strategy built from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from girih.cluster.cluster import Cluster
from girih.comm.group import TrainerGroup
from girih.dense.half import DenseHalf, DenseSpec
from girih.sparse.half import SparseHalf
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Stats
from girih.training.feeds import Feed
from girih.training.schedules import Schedule


class Rest(Protocol):
    """State beside rows, parameters and this process's random state: without it a run goes on, but otherwise."""

    def rest(self) -> dict[str, Tensor]:
        """By names with a slash; asked between two steps."""

    def put_rest(self, rest: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`rest`, where the net is spread as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One trainer's halves, and how they are joined and fed.

    Attributes:
        optimizer: the one whose learning rate a schedule moves; None where the dense half has none.
        leave: called by a trainer before it waits for others, when it makes no step before the next ``sync``.
        beside: None where there is nothing of that kind.
    """

    sparse: SparseHalf
    dense: DenseHalf
    schedule: Schedule
    feed: Feed
    optimizer: torch.optim.Optimizer | None = None
    leave: Callable[[], None] = lambda: None
    beside: Rest | None = None

    def sync(self) -> None:
        """Returns when what this trainer sent is applied; called by all trainers together."""
        self.sparse.sync()
        self.dense.sync()


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
