"""Agreement of trainers: on a step's loss, on whether the step is refused, and on when all trainers stop."""

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

_LOOK_S: Final = 0.02  # the time between two searches for a note, because each search is a call
Numbers = Sequence[float]
NO_NUMBERS = torch.empty(0, dtype=torch.float64)
LOSS, REFUSES, STOPS = BALLOT = range(3)
"""A trainer's ballot: its part of the step's loss, 1 if it refuses the step, 1 if it wants to stop after the step."""


class StopVotes:
    """The stops and pauses that one trainer knows of. Trainers agree by the sums of their ballots.

    Attributes:
        num_stops: the number of stops that have ended.
        agreed_stop: True if all trainers stop, according to the last sum of ballots.
    """

    _stop = _pause = agreed_stop = False
    num_stops = 0

    def request_stop(self) -> None:
        """Makes all ranks stop together. Callable from a signal handler."""
        self._stop = True

    def request_pause(self) -> None:
        """Makes all ranks stop together and continue after :meth:`end_pause`, unless a rank must stop permanently."""
        self._pause = True

    @property
    def stop_requested(self) -> bool:
        """True if this trainer was asked to stop or pause, even if other trainers do not know of it yet."""
        return self._stop or self._pause

    @property
    def wants_stop(self) -> bool:
        """True if this trainer was asked to stop, or knows that all trainers stop."""
        return self.stop_requested or self.agreed_stop

    @property
    def pause_ballot(self) -> list[float]:
        """Returns two numbers: 1 if this trainer must pause, and 1 if it must stop permanently."""
        return [float(self._pause), float(self._stop)]

    def note_stops(self, num_stopping: float) -> None:
        """Records the number of trainers that want to stop. All trainers learn this number in the same step."""
        self.agreed_stop = num_stopping > 0

    def end_pause(self) -> None:
        """Ends the pause of :meth:`request_pause`. A stop that was requested in the meantime remains."""
        self._pause, self.agreed_stop = False, False
        self.num_stops += 1

    def forget_stop(self) -> None:
        """Ends the stop of :meth:`request_stop` or the pause of :meth:`request_pause`."""
        self._stop = False
        self.end_pause()


class TrainerGroup(StopVotes, Collectives):
    """The trainers of a run. All trainers call each method except ``request_stop``, in the same order.

    If trainers run in step, all learn of a stop in the same vote. After :meth:`set_unsynchronized`, a stop is a note in
    the registry. Each trainer looks for the note after a step.
    """

    unsynchronized = False
    """True if each trainer runs at its own pace."""
    _looked_s = 0.0

    def set_unsynchronized(self, unsynchronized: bool = True) -> None:
        """Lets each trainer run at its own pace between two saves. With False, all trainers make each step together."""
        self.unsynchronized = unsynchronized

    def vote(self, loss: float, *, refusing: bool = False) -> tuple[float, int]:
        """Exchanges the trainers' ballots for one step: loss, refusal, and the wish to stop.

        Returns:
            The sum of the losses, and the number of trainers that refuse the step.
        """
        total, num_refusing, num_stopping = self.sum([loss, float(refusing), float(self.stop_requested)])
        self.note_stops(num_stopping)
        return total, int(num_refusing)

    def agree_on_pause(self) -> bool:
        """Returns whether all ranks stopped only for a pause. Call it when :attr:`stopping` is True."""
        num_pausing, num_stopping = self.sum(self.pause_ballot)
        return num_pausing > 0 and num_stopping == 0

    @property
    def stopping(self) -> bool:
        """True if all ranks stop now. The value is the same on all ranks since they last agreed."""
        return self.stop_requested if self.size == 1 else self.agreed_stop

    def poll_stop(self) -> None:
        """Reports that this trainer stops, or learns that another trainer stops. For use after unsynchronized steps."""
        if not self.unsynchronized or self.size == 1 or self.agreed_stop:
            return  # if trainers run in step, the next vote has the wish to stop
        note, now = f"stop/{self.num_stops}", time.monotonic()
        if self.stop_requested:
            self.put(note, "1")
            self.agreed_stop = True
        elif now - self._looked_s > _LOOK_S:
            self._looked_s = now
            self.agreed_stop = self.has(note)

    def rendezvous(self) -> bool:
        """Waits for a meeting of all trainers. Returns False if a trainer stops or has made its last step."""
        if not self.unsynchronized or self.size == 1:
            return True
        return self._count_leaving(False) == 0 and not self.agreed_stop

    def finish(self) -> None:
        """Waits until all trainers have made their last step."""
        while self.unsynchronized and self.size > 1 and self._count_leaving(True) < self.size:
            pass  # other trainers wait for a meeting, which is cancelled now

    def stop_together(self) -> bool:
        """Asks all trainers whether they want to stop. If a trainer wants to stop, all trainers stop."""
        self.note_stops(self.sum([float(self.wants_stop)])[0])
        return self.agreed_stop

    def _count_leaving(self, leaving: bool) -> int:
        num_leaving, num_stopping = self.sum([float(leaving), float(self.wants_stop)])
        self.agreed_stop = self.agreed_stop or num_stopping > 0
        return int(num_leaving)


def gathered_rows(rows: Tensor, ranks: TrainerGroup, sizes: Sequence[int]) -> Tensor:
    """Returns the rows of all trainers, T[N, ...], in the order of ranks. Each trainer passes T[sizes[rank], ...].

    All trainers call this function together, and also its backward pass. In the backward pass, each trainer gets the
    sum of all trainers' gradients for its rows.
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
        for part in found[1:]:  # every rank adds in the order of ranks, so results are equal on all ranks
            total += part
        return total, None, None


def _nothing_from(numbers: Numbers) -> None:
    return None


@dataclass(eq=False)
class Vote:
    """The vote of both halves of all R trainers on one step, in one message.

    The dense half creates the vote, and the sparse half casts it. Then either both halves are updated, or none.

    Attributes:
        refused: 0-d bool, on its device: True if the step is refused and changes nothing. Before the vote is cast, True
            if this trainer's dense half refuses the step.
        loss: float64[], on its device: this trainer's part of the step's loss.
        deferred: True if the host learns the outcome one step later. Kernels read ``refused``, so the host does not
            wait for the device.
        ranks: the trainers that vote, or None if this trainer votes alone.
        known_refused: True if the vote was cast, and the host knows that the step was refused.
        ballots: float64[R, 3], for each trainer its loss, 1 if it refuses the step, and 1 if it wants to stop after the
            step.
        reported: float64[K], on its device: numbers of the sparse half that the host reads with the outcome.
        error_from: a function of ``reported`` on the host. Returns why the rows refuse the step, or None.
        counters_from: a function of ``reported`` on the host. Returns the counters after the update. It is called once
            per step, in order. None if the sparse half must be asked.
        rollback: undoes the changes of the step on the host, when the host learns that the step was refused.
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
        """Casts the vote. All trainers call it together, once per step.

        Args:
            refuses: 0-d bool: True if the rows of this trainer refuse the step.
            words: float64[S], additional numbers for all trainers.

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
    """Returns the largest absolute value of each gradient, float32[P], on the gradients' device. Never waits.

    If a gradient has NaN, its value is NaN.
    """
    return (
        torch.stack(torch._foreach_norm(gradients, math.inf)) if gradients else torch.empty(0, device=device)
    )
