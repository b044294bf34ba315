"""A session: the live objects that a strategy built from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from girih.checkpoint.state import RunState
from girih.cluster.cluster import Cluster
from girih.comm.group import TrainerGroup
from girih.dense.half import DenseHalf, DenseSpec
from girih.sparse.half import SparseHalf
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Stats
from girih.training.feeds import ExampleFeed
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
    feed: ExampleFeed
    optimizer: torch.optim.Optimizer | None = None
    detach_from_round: Callable[[], None] = lambda: None
    stateful: Stateful | None = None

    def sync(self) -> None:
        """Returns when what this trainer sent is applied; called by all trainers together."""
        self.sparse.sync()
        self.dense.sync()


class StepHook(Protocol):
    """Work between two steps: evaluate, save, publish, rescale, log. All trainers ask it after each step.

    Attributes:
        pauses: whether all trainers do it together, after the outcome of all steps is known, and before later ones begin.
    """

    pauses: ClassVar[bool] = True

    def due(self, state: RunState) -> bool:
        """Returns whether it is due after a step; asked about later steps too."""
        ...

    def run(self, state: RunState) -> None:
        """Does it."""
        ...

    def skip(self) -> None:
        """Called in place of :meth:`run` if some trainers make no more steps."""
        return

    def settle(self, *, wait: bool = False) -> None:
        """Takes note of its work in other threads, called after each step; with ``wait`` of all of it."""
        return


def is_multiple(step: int, steps: int | None) -> bool:
    """Returns whether a period of ``steps`` ends with a step; None never ends."""
    return steps is not None and step > 0 and step % steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Live objects of one trainer that are there before its halves.

    Attributes:
        ranks: this trainer among all.
        sparse, dense: what the halves are made of.
        processes: starts and ends roles beside the trainers; its methods are called by all trainers together.
        stats: statistics of this process.
        directory: where rank 0 writes the run; None writes nothing.
    """

    ranks: TrainerGroup
    sparse: SparseSpec
    dense: DenseSpec
    processes: Cluster
    stats: Stats
    directory: Path | None = None
