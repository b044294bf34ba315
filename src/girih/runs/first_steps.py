"""The speed of a run's first steps: what is predicted for the rest of it where nothing was calibrated."""

from __future__ import annotations

from dataclasses import dataclass

from girih.runs.state import RunState

LIMIT_S, NEW_STEPS = 2.0, 2
"""Seconds of training that are taken, behind so many steps in which rows and memory are new."""


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
    _before: tuple[int, float] = (0, 0.0)
    _until: tuple[int, float] = (0, 0.0)

    def begin(self, state: RunState) -> None:
        """Training begins at this state, or goes on; what was taken before stays."""
        if not self._heard:
            self._before = self._until = state.examples, state.train_s

    def step(self, state: RunState) -> None:
        """Adds one step, unless there are enough."""
        if self._heard > NEW_STEPS and self._until[1] - self._before[1] >= LIMIT_S:
            return
        self._heard += 1
        if self._heard == NEW_STEPS + 1:  # the one before was the last new one
            self._before, self.steps = self._until, 0
        self._until, self.steps = (state.examples, state.train_s), self.steps + 1

    @property
    def samples_per_s(self) -> float | None:
        """Examples per second; None before the first step."""
        seconds = self._until[1] - self._before[1]
        return (self._until[0] - self._before[0]) / seconds if seconds > 0 else None
