"""Agreement of trainers: on a step's loss, on who refuses it, and on when all of them stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from girih.comm.group.collectives import Collectives

_LOOK_S: Final = 0.02  # between two looks for a note: each is a call


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
