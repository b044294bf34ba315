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
    """A half with state besides rows, parameters and random state.

    A run can resume without this state, but its numbers then differ.
    """

    def extra_state(self) -> dict[str, Tensor]:
        """Returns the state by names that contain a slash. Called between two steps."""

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state if the model is divided among processes in the same way as at the save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One trainer's halves, with their schedule and feed.

    Attributes:
        optimizer: the optimizer whose learning rate a schedule changes, or None if the dense half has none.
        detach_from_round: a trainer calls it if it waits for other trainers and makes no step before the next ``sync``.
        stateful: the half that has extra state, or None.
    """

    sparse: SparseHalf
    dense: DenseHalf
    schedule: Schedule
    feed: ExampleFeed
    optimizer: torch.optim.Optimizer | None = None
    detach_from_round: Callable[[], None] = lambda: None
    stateful: Stateful | None = None

    def sync(self) -> None:
        """Waits until everything that this trainer sent is applied. All trainers call it together."""
        self.sparse.sync()
        self.dense.sync()


class StepHook(Protocol):
    """Work between two steps: evaluate, save, publish, rescale, log. All trainers ask the hook after each step.

    Attributes:
        pauses: True if all trainers run the hook together, when the outcome of all steps is known and no later step has
            begun.
    """

    pauses: ClassVar[bool] = True

    def due(self, state: RunState) -> bool:
        """Returns whether the hook is due after a step. It is also called with the states of later steps."""
        ...

    def run(self, state: RunState) -> None:
        """Runs the hook."""
        ...

    def skip(self) -> None:
        """Moves the hook to a later step.

        The training loop calls this instead of :meth:`run` if some trainers have already made their last step.
        """
        return

    def settle(self, *, wait: bool = False) -> None:
        """Records the results of the hook's threads. With ``wait``, waits for all results. Called after each step."""
        return


def is_multiple(step: int, steps: int | None) -> bool:
    """Returns whether a period of ``steps`` steps ends with a step. With None, returns False."""
    return steps is not None and step > 0 and step % steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Live objects of one trainer that exist before its halves.

    Attributes:
        ranks: the group of trainers, with this trainer's rank.
        sparse, dense: specifications of the halves.
        processes: starts and ends the processes of other roles. All trainers call its methods together.
        stats: statistics of this process.
        directory: the run directory, to which rank 0 writes. None writes nothing.
    """

    ranks: TrainerGroup
    sparse: SparseSpec
    dense: DenseSpec
    processes: Cluster
    stats: Stats
    directory: Path | None = None
