"""AUC on validation data by time of training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from girih.data import Dataset
from girih.runs.callbacks import Callback
from girih.trainer import Trainer


class Curve(Callback):
    """Notes when a run reached each AUC; evaluations, and what comes before the first step, are left out of the time.

    Attributes:
        points: (steps, seconds, AUC) of each evaluation.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._start = self._evaluating_s = 0.0
        self._reached_s: dict[int, float] = {}

    def watch(self, trainer: Trainer) -> None:
        """Times the trainer's evaluations from here on."""
        scoring, state = trainer._run.scoring, trainer.state
        score = scoring.score

        def timed(data: Dataset) -> Any:
            start = time.perf_counter()
            self._reached_s[state.step] = start - self._start - self._evaluating_s
            try:
                return score(data)
            finally:
                self._evaluating_s += time.perf_counter() - start

        scoring.score = timed  # type: ignore[method-assign]

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Training begins."""
        self._start = time.perf_counter()

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Comes once metrics are computed, beside later steps."""
        self.points.append((record["step"], self._reached_s[record["step"]], record["auc"]))
