"""A session: the live objects that a strategy built from a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from girih.dense.half import DenseHalf
from girih.sparse.half import SparseHalf
from girih.training.feeds import Feed
from girih.training.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One trainer's halves, and how they are joined and fed.

    Attributes:
        optimizer: the one whose learning rate a schedule moves; None where the dense half has none.
        leave: called by a trainer before it waits for others, when it makes no step before the next ``sync``.
    """

    sparse: SparseHalf
    dense: DenseHalf
    schedule: Schedule
    feed: Feed
    optimizer: torch.optim.Optimizer | None = None
    leave: Callable[[], None] = lambda: None

    def sync(self) -> None:
        """Returns when what this trainer sent is applied; called by all trainers together."""
        self.sparse.sync()
        self.dense.sync()
