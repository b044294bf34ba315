"""Scales roles by their busy share. Adds a process to the bottleneck, or removes a process of a role with little work.

It makes the same requests as ``girih scale``, observes their effect, and undoes changes without benefit (decision 67).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from girih.errors import RunDirectoryError
from girih.runs import scale_requests
from girih.runs.scale_requests import ScaleRequest
from girih.telemetry.peer_status import BOTTLENECK, busy_of, cores_used, is_full
from girih.telemetry.status_file import read_all

_LOG = logging.getLogger(__name__)
LOOKS: Final = 3
"""The number of consecutive windows that must ask for the same change."""
IDLE: Final = 0.5
"""A process is removed if the others would then have a busy share below this.

The value is below ``BOTTLENECK``, so that girih does not remove a new process at once.
"""
GAIN: Final = 0.05
"""An added process stays if training becomes faster by at least this fraction."""
LOSS: Final = 0.1
"""A removed process returns if training becomes slower by this fraction. It exceeds the noise of a busy host."""
HOLD: Final = 20
"""A change that was undone is blocked for this multiple of the time of a decision."""
LOOK_S: Final = 0.5

Bounds = Mapping[str, tuple[int, int]]
"""Role → the fewest and the most processes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the number of a role's processes."""

    role: str
    before: int
    after: int

    @property
    def grows(self) -> bool:
        """True if the number grows."""
        return self.after > self.before

    @property
    def undone(self) -> Change:
        """The opposite change."""
        return Change(self.role, self.after, self.before)

    def __str__(self) -> str:
        return f"{self.role} {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class UsageWindow:
    """Some seconds of training.

    Attributes:
        change: the change that its busy shares ask for; None if all is well, or nothing is known.
        examples, train_s: examples trained on, and seconds in steps.
    """

    change: Change | None
    examples: int
    train_s: float


class Autoscaler:
    """Watches the processes of a run between two steps.

    Requests other numbers if they have too much or too little work.

    Args:
        bounds: limits of the roles whose number follows their load.
        every_s: the seconds of training that a decision uses. After each change, girih also waits this long before it
            decides or judges again.
        beyond_cores: if True, adds processes even if no core is free.
    """

    def __init__(self, run: Path, bounds: Bounds, *, every_s: float, beyond_cores: bool = False) -> None:
        self._run, self._bounds, self._every_s, self._beyond_cores = run, bounds, every_s, beyond_cores
        self._windows: deque[UsageWindow] = deque(maxlen=LOOKS)
        # the current window: its start, and the examples and seconds by then
        self._mark: tuple[float, int, float] | None = None
        self._next_s = time.monotonic()
        self._counts: Mapping[str, int] = {}
        # the rate before the change, if it must be judged
        self._asked: tuple[ScaleRequest, Change, float | None] | None = None
        self._judged: tuple[Change, float] | None = None
        self._blocked_s: dict[tuple[str, bool], float] = {}  # by role and direction
        self._withheld: Change | None = None

    def look(self, counts: Mapping[str, int], examples: int, train_s: float) -> None:
        """Requests a change when it is time. Otherwise it returns at once.

        Args:
            counts: role → current number of processes.
            examples, train_s: examples trained on so far, and seconds in steps.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        if self._asked is not None:
            self._next_s = now + LOOK_S
            self._check_outcome(*self._asked)
        elif counts != self._counts:  # somebody changed the counts, so wait for the effect
            self._counts, self._mark, self._next_s = dict(counts), None, now + self._every_s
            self._windows.clear()
            if self._judged is not None and counts.get(self._judged[0].role) != self._judged[0].after:
                self._judged = None
        elif self._mark is None:
            self._mark, self._next_s = (now, examples, train_s), now + self._every_s / LOOKS
        else:
            began_s, examples_before, train_before_s = self._mark
            self._mark, self._next_s = (now, examples, train_s), now + self._every_s / LOOKS
            self._add_window(now - began_s, examples - examples_before, train_s - train_before_s)

    def _add_window(self, seconds: float, examples: int, train_s: float) -> None:
        """Adds a window, and decides when there are enough."""
        if examples <= 0 or train_s < seconds / 2:  # it evaluated, saved or stood still
            self._windows.clear()
            return
        if (change_and_reason := out_of_bounds(self._counts, self._bounds)) is not None:
            self._ask(*change_and_reason, None)
            return
        statuses = read_all(self._run)
        change, why = decided(busy_of(statuses, self._counts), self._counts, self._allowed())
        if change is not None and change.grows and not self._beyond_cores and is_full(cores_used(statuses)):
            self._log_withheld(change, why)
            change = None
        self._windows.append(UsageWindow(change, examples, train_s))
        if len(self._windows) < LOOKS:
            return
        rate = sum(w.examples for w in self._windows) / sum(w.train_s for w in self._windows)
        if self._judged is not None:
            self._judge(*self._judged, rate)
        elif change is not None and {w.change for w in self._windows} == {change}:
            self._ask(change, why, rate)

    def _judge(self, change: Change, before: float, rate: float) -> None:
        """Keeps a change if it helped, or undoes it."""
        self._judged = None
        rates = f"{before:.0f} → {rate:.0f} samples/s"
        if rate >= before * (1 + GAIN if change.grows else 1 - LOSS):
            _LOG.info("autoscale keeps %s: %s", change, rates)
            self._windows.clear()
            return
        self._block(change)
        effect = "brought nothing" if change.grows else "made training slower"
        self._ask(change.undone, f"{change} {effect}: {rates}", None)

    def _ask(self, change: Change, why: str, rate: float | None) -> None:
        """Requests a change.

        ``rate`` is the speed before the change, which is later used to judge it. None means that the change is not
        judged.
        """
        self._windows.clear()
        self._mark = None
        with suppress(RunDirectoryError):  # another request is in progress
            self._asked = scale_requests.ask(self._run, {change.role: change.after}, why), change, rate
            _LOG.warning("autoscale asks for %s: %s", change, why)

    def _check_outcome(self, request: ScaleRequest, change: Change, rate: float | None) -> None:
        """Checks whether the requested change is done."""
        with suppress(RunDirectoryError):  # a damaged request, which will be withdrawn
            if scale_requests.pending(self._run) is not None:
                return
        outcome, self._asked = scale_requests.outcome(self._run, request), None
        if outcome is None:
            _LOG.warning("autoscale: the request for %s was withdrawn", change)
        elif "refused" in outcome:
            self._block(change)
            _LOG.warning("autoscale: %s is refused: %s", change, outcome["refused"])
        elif rate is not None:
            self._judged = change, rate

    def _block(self, change: Change) -> None:
        self._blocked_s[change.role, change.grows] = time.monotonic() + HOLD * 2 * self._every_s

    def _allowed(self) -> Bounds:
        """Returns the bounds, narrowed by the changes that are blocked."""
        now, allowed = time.monotonic(), dict[str, tuple[int, int]]()
        for role, (fewest, most) in self._bounds.items():
            count = self._counts.get(role, fewest)
            may_shrink, may_grow = (self._blocked_s.get((role, grows), 0.0) <= now for grows in (False, True))
            allowed[role] = (
                fewest if may_shrink else max(fewest, count),
                most if may_grow else min(most, count),
            )
        return allowed

    def _log_withheld(self, change: Change, why: str) -> None:
        if change != self._withheld:
            self._withheld = change
            told = "all cores of this host are in use; set cluster.autoscale_beyond_cores = true to allow it"
            _LOG.warning("autoscale leaves out %s (%s): %s", change, why, told)


def out_of_bounds(counts: Mapping[str, int], bounds: Bounds) -> tuple[Change, str] | None:
    """Returns the change that bounds require, for any load, and its reason; None if all counts are within bounds."""
    for role, (fewest, most) in bounds.items():
        count = min(max(counts[role], fewest), most)
        if count != counts[role]:
            return Change(role, counts[role], count), f"cluster.autoscale allows {fewest} to {most} of it"
    return None


def decided(
    busy: Mapping[str, float], counts: Mapping[str, int], bounds: Bounds
) -> tuple[Change | None, str]:
    """Returns the change that busy shares ask for, and its reason; None if all is well, or nothing is known.

    Args:
        busy: role → the busy share of its busiest process.
        counts: role → processes.
    """
    busiest = max(busy, key=lambda role: busy[role], default="")
    if busiest in bounds and busy[busiest] >= BOTTLENECK and counts[busiest] < bounds[busiest][1]:
        told = f"{busiest} works {busy[busiest]:.0%} of the time, and is the bottleneck"
        return Change(busiest, counts[busiest], counts[busiest] + 1), told
    for role in sorted(bounds, key=lambda role: busy.get(role, 1.0)):
        count = counts[role]
        if role in busy and count > bounds[role][0] and busy[role] * count / (count - 1) < IDLE:
            told = f"{role} works {busy[role]:.0%} of the time; {count - 1} would work less than {IDLE:.0%}"
            return Change(role, count, count - 1), told
    return None, ""
