"""The vote on a step: both halves of all trainers move by it, or none of them does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from girih.comm.group.trainers import TrainerGroup
from girih.errors import NonFiniteError

Numbers = Sequence[float]
NO_NUMBERS = torch.empty(0, dtype=torch.float64)
LOSS, REFUSES, STOPS = BALLOT = range(3)
"""Words of a trainer's ballot: its part of the step's loss, whether it refuses the step, whether it wants to stop behind it."""


def _nothing_from(numbers: Numbers) -> None:
    return None


@dataclass(eq=False)
class Vote:
    """The vote of both halves of all R trainers on one step, in one message.

    The dense half makes it, and the sparse half casts it. Then both move, or neither does.

    Attributes:
        refused: 0-d bool, on its device: the step moves nothing. Before the vote is cast, the dense half here refuses it.
        loss: float64[], on its device: this trainer's part of the step's loss.
        deferred: the host learns of the vote one step later. Kernels read ``refused``, so nothing waits for the device.
        ranks: the trainers that vote; None where this one votes alone.
        ballots: float64[R, 3], the loss of each trainer, whether it refuses the step, whether it wants to stop behind it.
        reported: float64[K], on its device: numbers of the sparse half that the host reads with the outcome.
        error_from: ``reported`` on the host → why the rows refuse the step; None if they do not.
        counters_from: ``reported`` on the host → counters after the update; None if the half must be asked. Called once per
            step, in order.
        rollback: undoes on the host what the step changed there, once the host learns that it was refused.
    """

    refused: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    deferred: bool = False
    ranks: TrainerGroup | None = None
    ballots: Tensor | None = None
    reported: Tensor = NO_NUMBERS
    error_from: Callable[[Numbers], NonFiniteError | None] = _nothing_from
    counters_from: Callable[[Numbers], Mapping[str, int] | None] = _nothing_from
    rollback: Callable[[], None] = lambda: None

    @property
    def stands(self) -> bool:
        """Whether the host knows that the step moves nothing."""
        return not self.deferred and bool(self.refused)

    def cast(self, refuses: Tensor, words: Tensor = NO_NUMBERS) -> Tensor:
        """Casts the vote; all trainers call it together, once per step.

        Args:
            refuses: 0-d bool: whether the rows here refuse the step.
            words: float64[S], other numbers for all trainers.

        Returns:
            float64[R, S], the numbers of all trainers.
        """
        device = self.loss.device
        refused, words = self.refused.to(device) | refuses.to(device), words.to(device)
        if self.ranks is None:
            self.refused, self.ballots = refused, self.loss.reshape(1, 1)
            return words.unsqueeze(0)
        stops = torch.full_like(self.loss, float(self.ranks.stop_requested))
        ballot = torch.stack([self.loss, refused.double(), stops])
        gathered = self.ranks.all_gather(torch.cat([ballot, words]))
        self.ballots = gathered[:, : len(ballot)]
        self.refused = (self.ballots[:, REFUSES] > 0).any()
        return gathered[:, len(ballot) :]


def largest_of(gradients: list[Tensor], device: torch.device) -> Tensor:
    """float32[P], on their device: the largest absolute value of each gradient, NaN where it has one; waits for nothing."""
    return (
        torch.stack(torch._foreach_norm(gradients, math.inf)) if gradients else torch.empty(0, device=device)
    )
