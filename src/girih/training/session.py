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


class Stateful(Protocol):
    """A half with state besides rows, parameters and random state. A run resumes without it, with other numbers."""

    def extra_state(self) -> dict[str, Tensor]:
        """Returns the state, by names with a slash. Called between two steps."""

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state, where the net is spread as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One trainer's halves, and how they are joined and fed.

    Attributes:
        optimizer: the one whose learning rate a schedule moves; None where the dense half has none.
        detach_from_round: called by a trainer that waits for others and makes no step before the next ``sync``.
        stateful: the half that has extra state, if any.
    """

    sparse: SparseHalf
    dense: DenseHalf
    schedule: Schedule
    feed: Feed
    optimizer: torch.optim.Optimizer | None = None
    detach_from_round: Callable[[], None] = lambda: None
    stateful: Stateful | None = None

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
