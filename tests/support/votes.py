"""Steps of one half alone: its vote, and what comes of it."""

from __future__ import annotations

import torch

from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.dense.half import Computed, Outcome
from girih.errors import NonFiniteError
from girih.sparse.half import Pending, Pulled


def push(pulled: Pulled, step: int, lr_scale: float = 1.0) -> Pending:
    """Pushes as a dense half does that refuses nothing; trainers of a collective half vote together.

    Raises:
        NonFiniteError: the rows refuse the step.
    """
    vote = Vote(ranks=ranks_of(pulled))
    pending = pulled.push(step, lr_scale, vote)
    error = rows_error(vote)
    if error is not None:
        raise error
    return pending


def ranks_of(pulled: Pulled) -> TrainerGroup | None:
    """The trainers that vote together on a step of this batch."""
    ranks: TrainerGroup | None = getattr(getattr(pulled, "_half", None), "ranks", None)
    return ranks if ranks is not None and ranks.size > 1 else None


def deferred_vote(device: torch.device, *, refuses: bool = False, ranks: TrainerGroup | None = None) -> Vote:
    """The vote of a dense half on this device, which the host learns one step later."""
    refused = torch.tensor(refuses, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    return Vote(refused, loss, deferred=True, ranks=ranks)


def rows_error(vote: Vote) -> NonFiniteError | None:
    """Why the rows refuse a step that was pushed, read as a dense half does."""
    numbers = vote.reported.tolist()
    vote.counters_from(numbers)
    if not vote.refused:
        return None
    vote.rollback()
    return vote.error_from(numbers)


def refuse(pulled: Pulled, step: int = 1) -> Pending:
    """Pushes a step that the dense half refuses."""
    vote = Vote(torch.tensor(True), ranks=ranks_of(pulled))
    pending = pulled.push(step, 1.0, vote)
    vote.rollback()
    return pending


def apply(computed: Computed, *, rows_refuse: bool = False) -> Outcome:
    """Applies a step without rows."""
    vote = computed.vote
    vote.cast(torch.tensor(rows_refuse))
    return computed.apply(vote)


def drop(computed: Computed) -> Outcome:
    """Ends a step that the rows refuse."""
    return apply(computed, rows_refuse=True)
