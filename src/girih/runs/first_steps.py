"""The speed of a run's first steps: what is predicted for the rest of it where nothing was calibrated.

A run that hardly goes on behind them is predicted nothing: what it begins with takes most of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

from girih.runs.state import RunState

LIMIT_S, NEW_STEPS = 2.0, 2
"""Seconds of training that are taken, behind so many steps in which rows and memory are new."""
MOST_OF_RUN = 0.1
"""The new steps' share of all seconds of training, above which a run's own speed is that of its beginning."""


@dataclass
class FirstSteps:
    """Hears of every step of a run, and takes the first ones.

    Attributes:
        since: the step behind which they are the first, where a run goes on with other processes.
        steps: that were taken.
    """

    since: int = 0
    steps: int = 0
    _heard: int = 0
    _began_s: float = 0.0
    _before: tuple[int, float] = (0, 0.0)
    _until: tuple[int, float] = (0, 0.0)

    def begin(self, state: RunState) -> None:
        """Training begins at this state, or goes on; what was taken before stays."""
        if not self._heard:
            self._before = self._until = state.examples, state.train_s
            self._began_s = state.train_s

    def step(self, state: RunState) -> None:
        """Adds one step, unless there are enough."""
        if self._heard > NEW_STEPS and self._until[1] - self._before[1] >= LIMIT_S:
            return
        self._heard += 1
        if self._heard == NEW_STEPS + 1:  # the one before was the last new one
            self._before, self.steps = self._until, 0
        self._until, self.steps = (state.examples, state.train_s), self.steps + 1

    def predicted(self, state: RunState) -> tuple[float | None, str | None]:
        """Examples per second, and which steps they are from; None, and why, where these say nothing of the run; both None before it.

        Args:
            state: that of the run by now.
        """
        if not self._heard:
            return None, None
        since = f" since it was scaled at step {self.since}" if self.since else ""
        seconds, own_s = self._until[1] - self._before[1], state.train_s - self._began_s
        if self._heard <= NEW_STEPS or seconds < LIMIT_S:
            return (
                None,
                f"nothing: {LIMIT_S:g} s of training are needed behind the first {NEW_STEPS} steps{since}",
            )
        start_s = self._before[1] - self._began_s
        if start_s > MOST_OF_RUN * own_s:
            told = (
                f"nothing: its first {NEW_STEPS} steps{since} took {start_s:.1f} of {own_s:.1f} s of training"
            )
            return None, told
        steps = "step" if self.steps == 1 else f"{self.steps} steps"
        return (self._until[0] - self._before[0]) / seconds, f"its first {steps}{since}"
