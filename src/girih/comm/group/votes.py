"""Agreement of trainers: on a step's loss, on who refuses it, and on when all of them stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Voters(Protocol):
    """Interface of a group of trainers that votes need."""

    size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each value."""

    def put(self, key: str, text: str) -> None:
        """Leaves a note for the others."""

    def has(self, key: str) -> bool:
        """Whether a note is there."""


class SynchronousVotes:
    """Trainers that do every step together: all learn of a stop in the same vote.

    Each method but ``request_stop`` is called by all trainers, in the same order.
    """

    def __init__(self, voters: Voters) -> None:
        self._voters = voters
        self._stop, self._agreed_stop = False, False
        self._num_stops = 0

    def vote(self, loss: float, *, refusing: bool = False) -> tuple[float, int]:
        """Once per step: all learn the sum of their losses, how many refuse the step, and whether one wants to stop.

        Returns:
            The sum of the losses, and how many refuse.
        """
        total, num_refusing, num_stopping = self._voters.sum([loss, float(refusing), float(self._stop)])
        self._agreed_stop = num_stopping > 0
        return total, int(num_refusing)

    def request_stop(self) -> None:
        """Has all ranks stop together. Callable from a signal handler."""
        self._stop = True

    def forget_stop(self) -> None:
        """Ends what :meth:`request_stop` began."""
        self._stop, self._agreed_stop = False, False
        self._num_stops += 1

    @property
    def stopping(self) -> bool:
        """Whether all ranks stop now: the same on all of them since they last agreed."""
        return self._stop if self._voters.size == 1 else self._agreed_stop

    @property
    def stop_requested(self) -> bool:
        """Whether this one was asked to stop, whatever the others know."""
        return self._stop

    def poll_stop(self) -> None:
        """No-op: the next vote says it."""
        return

    def rendezvous(self) -> bool:
        """Before all do something together: whether none of them leaves, or has left, to stop. Always so here."""
        return True

    def finish(self) -> None:
        """No-op: all do their last step together."""
        return

    def stop_together(self) -> bool:
        """Asks all whether one wants to stop; if so, each does."""
        flag = self._stop or self._agreed_stop
        self._agreed_stop = self._voters.sum([float(flag)])[0] > 0
        return self._agreed_stop


class AsynchronousVotes(SynchronousVotes):
    """Trainers that go at their own pace between two meetings: a stop is a note, looked for after every step."""

    def poll_stop(self) -> None:
        """Tells the others that this one stops, or learns that one of them does."""
        if self._voters.size > 1 and not self._agreed_stop:
            note = f"stop/{self._num_stops}"
            if self._stop:
                self._voters.put(note, "1")
            self._agreed_stop = self._stop or self._voters.has(note)

    def rendezvous(self) -> bool:
        """Before all do something together: whether none of them leaves, or has left, to stop."""
        if self._voters.size == 1:
            return True
        self._count_leaving(False)
        return not self._agreed_stop

    def finish(self) -> None:
        """Returns when all have done their last step."""
        while self._voters.size > 1 and self._count_leaving(True) < self._voters.size:
            pass  # others came to a meeting, which is off now

    def _count_leaving(self, leaving: bool) -> int:
        stopping = self._stop or self._agreed_stop
        num_leaving, num_stopping = self._voters.sum([float(leaving), float(stopping)])
        self._agreed_stop = self._agreed_stop or num_stopping > 0
        return int(num_leaving)
