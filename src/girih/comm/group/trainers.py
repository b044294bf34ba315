"""Agreement of trainers: on a step's loss, on who refuses it, and on when all of them stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from girih.comm.group.collectives import Collectives
from girih.errors import NonFiniteError

_LOOK_S: Final = 0.02  # between two looks for a note: each is a call
Numbers = Sequence[float]
NO_NUMBERS = torch.empty(0, dtype=torch.float64)
LOSS, REFUSES, STOPS = BALLOT = range(3)
"""Words of a trainer's ballot: its part of the step's loss, whether it refuses the step, whether it wants to stop after it."""


class StopVotes:
    """Stops and pauses as one trainer knows them; all agree on them by the sums of their ballots. It knows no other trainer.

    Attributes:
        num_stops: how many stops have ended.
        agreed_stop: whether all stop, as far as the last sum says.
    """

    _stop = _pause = agreed_stop = False
    num_stops = 0

    def request_stop(self) -> None:
        """Has all ranks stop together. Callable from a signal handler."""
        self._stop = True

    def request_pause(self) -> None:
        """Has all ranks stop together, to go on after :meth:`end_pause`, unless one of them is to stop for good."""
        self._pause = True

    @property
    def stop_requested(self) -> bool:
        """Whether this one was asked to stop, if for a pause, whatever the others know."""
        return self._stop or self._pause

    @property
    def wants_stop(self) -> bool:
        """Whether this one was asked to stop, or knows that all do."""
        return self.stop_requested or self.agreed_stop

    @property
    def pause_ballot(self) -> list[float]:
        """Whether this one is to pause, and to stop for good."""
        return [float(self._pause), float(self._stop)]

    def note_stops(self, num_stopping: float) -> None:
        """Notes how many want to stop, where all have learned it in the same step."""
        self.agreed_stop = num_stopping > 0

    def end_pause(self) -> None:
        """Ends what :meth:`request_pause` began; a stop that was requested meanwhile is not forgotten."""
        self._pause, self.agreed_stop = False, False
        self.num_stops += 1

    def forget_stop(self) -> None:
        """Ends what :meth:`request_stop` or :meth:`request_pause` began."""
        self._stop = False
        self.end_pause()


class TrainerGroup(StopVotes, Collectives):
    """The trainers of a run. Each method but ``request_stop`` is called by all of them, in the same order.

    In step, all learn of a stop in the same vote. Where they :meth:`set_unsynchronized`, a stop is a note, looked for after
    a step.
    """

    unsynchronized = False
    """Whether each trainer runs at its own pace."""
    _looked_s = 0.0

    def set_unsynchronized(self, unsynchronized: bool = True) -> None:
        """Lets each trainer run at its own pace between two saves; with False, all do every step together."""
        self.unsynchronized = unsynchronized

    def vote(self, loss: float, *, refusing: bool = False) -> tuple[float, int]:
        """Once per step: all learn the sum of their losses, how many refuse the step, and whether one wants to stop.

        Returns:
            The sum of the losses, and how many refuse.
        """
        total, num_refusing, num_stopping = self.sum([loss, float(refusing), float(self.stop_requested)])
        self.note_stops(num_stopping)
        return total, int(num_refusing)

    def agree_on_pause(self) -> bool:
        """Whether a pause alone has stopped all ranks; asked once they are :attr:`stopping`."""
        num_pausing, num_stopping = self.sum(self.pause_ballot)
        return num_pausing > 0 and num_stopping == 0

    @property
    def stopping(self) -> bool:
        """Whether all ranks stop now: the same on all of them since they last agreed."""
        return self.stop_requested if self.size == 1 else self.agreed_stop

    def poll_stop(self) -> None:
        """Between two steps apart: tells the others that this one stops, or learns that one of them does."""
        if not self.unsynchronized or self.size == 1 or self.agreed_stop:
            return  # in step the next vote says it
        note, now = f"stop/{self.num_stops}", time.monotonic()
        if self.stop_requested:
            self.put(note, "1")
            self.agreed_stop = True
        elif now - self._looked_s > _LOOK_S:
            self._looked_s = now
            self.agreed_stop = self.has(note)

    def rendezvous(self) -> bool:
        """Before all do something together: whether all are there; none leaves to stop, or has done its last step."""
        if not self.unsynchronized or self.size == 1:
            return True
        return self._count_leaving(False) == 0 and not self.agreed_stop

    def finish(self) -> None:
        """Returns when all have done their last step."""
        while self.unsynchronized and self.size > 1 and self._count_leaving(True) < self.size:
            pass  # others came to a meeting, which is off now

    def stop_together(self) -> bool:
        """Asks all whether one wants to stop; if so, each does."""
        self.note_stops(self.sum([float(self.wants_stop)])[0])
        return self.agreed_stop

    def _count_leaving(self, leaving: bool) -> int:
        num_leaving, num_stopping = self.sum([float(leaving), float(self.wants_stop)])
        self.agreed_stop = self.agreed_stop or num_stopping > 0
        return int(num_leaving)


def gathered_rows(rows: Tensor, ranks: TrainerGroup, sizes: Sequence[int]) -> Tensor:
    """T[N, ...]: the rows of all trainers, T[sizes[rank], ...] each, in the order of ranks.

    Called by all together, and so is its backward pass, in which each trainer gets the sum of what all have found for its rows.
    """
    if ranks.size == 1:
        return rows
    found: Tensor = _Gathered.apply(rows, ranks, tuple(sizes))  # type: ignore[no-untyped-call]
    return found


class _GatheredContext(Protocol):
    ranks: TrainerGroup
    sizes: tuple[int, ...]
    counts: list[int]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatheredContext, rows: Tensor, ranks: TrainerGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        width = rows.shape[1:].numel()
        ctx.counts = [size * width for size in sizes]
        own = [rows.numel()] * ranks.size
        flat = ranks.exchange(rows.detach().reshape(-1).repeat(ranks.size), own, ctx.counts)
        return flat.view(sum(sizes), *rows.shape[1:])

    @staticmethod
    def backward(ctx: _GatheredContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks, sizes = ctx.ranks, ctx.sizes
        own = [ctx.counts[ranks.rank]] * ranks.size
        parts = ranks.exchange(gradient.contiguous().reshape(-1), ctx.counts, own)
        found = parts.view(ranks.size, sizes[ranks.rank], *gradient.shape[1:])
        total = found[0].clone()
        for part in found[1:]:  # in the order of ranks, on all of them
            total += part
        return total, None, None


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
        known_refused: the vote was cast, and the host knows that the step moves nothing.
        ballots: float64[R, 3], the loss of each trainer, whether it refuses the step, whether it wants to stop after it.
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
    known_refused: bool = False
    ballots: Tensor | None = None
    reported: Tensor = NO_NUMBERS
    error_from: Callable[[Numbers], NonFiniteError | None] = _nothing_from
    counters_from: Callable[[Numbers], Mapping[str, int] | None] = _nothing_from
    rollback: Callable[[], None] = lambda: None

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
            self._count(refused, self.loss.reshape(1, 1))
            return words.unsqueeze(0)
        stops = torch.full_like(self.loss, float(self.ranks.stop_requested))
        ballot = torch.stack([self.loss, refused.double(), stops])
        gathered = self.ranks.all_gather(torch.cat([ballot, words]))
        self._count((gathered[:, REFUSES] > 0).any(), gathered[:, : len(ballot)])
        return gathered[:, len(ballot) :]

    def _count(self, refused: Tensor, ballots: Tensor) -> None:
        self.refused, self.ballots = refused, ballots
        self.known_refused = not self.deferred and bool(refused)


def largest_of(gradients: list[Tensor], device: torch.device) -> Tensor:
    """float32[P], on their device: the largest absolute value of each gradient, NaN where it has one; waits for nothing."""
    return (
        torch.stack(torch._foreach_norm(gradients, math.inf)) if gradients else torch.empty(0, device=device)
    )
