"""Numbers of processes that follow how busy these are: one more of the role that is the bottleneck, one fewer where the others have little to do.

It asks for what ``girih scale`` asks for, looks at what came of it, and takes back what brought nothing (decision 67).
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
"""Windows in a row that must ask for the same."""
IDLE: Final = 0.5
"""One of a role goes where the others would work less than this share of the time. Below ``BOTTLENECK``: else the one that came would go."""
GAIN: Final = 0.05
"""A process more is kept where training is faster by this share."""
LOSS: Final = 0.1
"""One fewer is kept unless training is slower by this share: more than what a busy host changes by itself, so that it stays small in doubt."""
HOLD: Final = 20
"""A change that was taken back is not tried again for so many times as long as it takes to decide one."""
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
        """Whether there are more afterwards."""
        return self.after > self.before

    @property
    def undone(self) -> Change:
        """The opposite."""
        return Change(self.role, self.after, self.before)

    def __str__(self) -> str:
        return f"{self.role} {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class UsageWindow:
    """Some seconds of training.

    Attributes:
        change: what its busy shares ask for; None where all is well, or nothing is known.
        examples, train_s: trained on, and seconds in steps.
    """

    change: Change | None
    examples: int
    train_s: float


class Autoscaler:
    """Looks at the processes of a run between two steps, and asks for others where those have too much to do, or too little.

    Args:
        bounds: of the roles whose number follows.
        every_s: the time that a decision is based on, and that passes after each change before the next one, or its judgement, begins.
        beyond_cores: whether it adds processes where no core is left.
    """

    def __init__(self, run: Path, bounds: Bounds, *, every_s: float, beyond_cores: bool = False) -> None:
        self._run, self._bounds, self._every_s, self._beyond_cores = run, bounds, every_s, beyond_cores
        self._windows: deque[UsageWindow] = deque(maxlen=LOOKS)
        # when the window under way began, and the examples and seconds by then
        self._mark: tuple[float, int, float] | None = None
        self._next_s = time.monotonic()
        self._counts: Mapping[str, int] = {}
        # with the rate before, where it is to be judged
        self._asked: tuple[ScaleRequest, Change, float | None] | None = None
        self._judged: tuple[Change, float] | None = None
        self._blocked_s: dict[tuple[str, bool], float] = {}  # by role and direction
        self._withheld: Change | None = None

    def look(self, counts: Mapping[str, int], examples: int, train_s: float) -> None:
        """Asks for a change where it is time to; quick where it is not.

        Args:
            counts: role → processes that there are.
            examples, train_s: trained on so far, and seconds in steps.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        if self._asked is not None:
            self._next_s = now + LOOK_S
            self._check_outcome(*self._asked)
        elif counts != self._counts:  # they changed, whoever asked: what follows is to be seen first
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
        """Takes note of a window, and decides once there are enough."""
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
        """Keeps a change, or takes it back."""
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
        """Asks for a change; ``rate`` is that before it, by which it is judged, or None."""
        self._windows.clear()
        self._mark = None
        with suppress(RunDirectoryError):  # somebody else asks at this moment
            self._asked = scale_requests.ask(self._run, {change.role: change.after}, why), change, rate
            _LOG.warning("autoscale asks for %s: %s", change, why)

    def _check_outcome(self, request: ScaleRequest, change: Change, rate: float | None) -> None:
        """Looks whether what was asked for is done."""
        with suppress(RunDirectoryError):  # a damaged one, which is withdrawn
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
        """The bounds, less what is held."""
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
            told = "all cores of this host are in use; set cluster.autoscale_beyond_cores = true to have it all the same"
            _LOG.warning("autoscale leaves out %s (%s): %s", change, why, told)


def out_of_bounds(counts: Mapping[str, int], bounds: Bounds) -> tuple[Change, str] | None:
    """The change that bounds ask for, whatever processes do, and why; None where all are within."""
    for role, (fewest, most) in bounds.items():
        count = min(max(counts[role], fewest), most)
        if count != counts[role]:
            return Change(role, counts[role], count), f"cluster.autoscale has {fewest} to {most} of it"
    return None


def decided(
    busy: Mapping[str, float], counts: Mapping[str, int], bounds: Bounds
) -> tuple[Change | None, str]:
    """The change that busy shares ask for, and why; None where all is well, or nothing is known.

    Args:
        busy: role → the share of the time in which its busiest process works.
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
