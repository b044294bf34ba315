"""The log of a run during training: writes records to ``metrics.jsonl``, and passes them to callbacks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint.state import RunState
from girih.config import build
from girih.errors import RunDirectoryError
from girih.files.sealed import open_file, parse
from girih.files.whole import append_line, write_whole
from girih.metrics import Metrics
from girih.runs.callbacks import Callback
from girih.runs.directory import TRAINED, TrainedMark
from girih.telemetry.peer_status import PeerStatus
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS
from girih.telemetry.status_file import resident_bytes
from girih.training.evaluation import ProgressiveValidation
from girih.training.schedules import Step, Token
from girih.training.session import StepHook

LIMIT_S, NEW_STEPS = 2.0, 2
"""The seconds of training to measure. The first steps are not measured, because rows and memory are new in them."""
MOST_OF_RUN = 0.1
"""The maximum fraction of training time in the first steps. Above it, the start dominates the run's speed."""


@dataclass
class FirstSteps:
    """Measures the speed of a run in its first steps.

    Attributes:
        since: the step after which steps are measured, if the run was continued with other processes.
        steps: the number of measured steps.
    """

    since: int = 0
    steps: int = 0
    _heard: int = 0
    _began_s: float = 0.0
    _before: tuple[int, float] = (0, 0.0)
    _until: tuple[int, float] = (0, 0.0)

    def begin(self, state: RunState) -> None:
        """Starts or continues the measurement at a state. Keeps the steps that were measured before."""
        if not self._heard:
            self._before = self._until = state.examples, state.train_s
            self._began_s = state.train_s

    def step(self, state: RunState) -> None:
        """Adds one step, unless there are enough steps."""
        if self._heard > NEW_STEPS and self._until[1] - self._before[1] >= LIMIT_S:
            return
        self._heard += 1
        if self._heard == NEW_STEPS + 1:  # the previous step was the last that is not measured
            self._before, self.steps = self._until, 0
        self._until, self.steps = (state.examples, state.train_s), self.steps + 1

    def predicted(self, state: RunState) -> tuple[float | None, str | None]:
        """Returns the measured examples per second, and a text with the measured steps.

        Returns None and a reason if the measured steps do not represent the run, and two Nones before the measurement.

        Args:
            state: the current state of the run.
        """
        if not self._heard:
            return None, None
        since = f" since it was scaled at step {self.since}" if self.since else ""
        seconds, own_s = self._until[1] - self._before[1], state.train_s - self._began_s
        if self._heard <= NEW_STEPS or seconds < LIMIT_S:
            return (
                None,
                f"nothing: {LIMIT_S:g} s of training are needed after the first {NEW_STEPS} steps{since}",
            )
        start_s = self._before[1] - self._began_s
        if start_s > MOST_OF_RUN * own_s:
            prediction = (
                f"nothing: its first {NEW_STEPS} steps{since} took {start_s:.1f} of {own_s:.1f} s of training"
            )
            return None, prediction
        steps = "step" if self.steps == 1 else f"{self.steps} steps"
        return (self._until[0] - self._before[0]) / seconds, f"its first {steps}{since}"


PROGRESSIVE = "progressive"
"""The split name in records of the metrics of training steps. A step is scored before its update."""


LATER_STEPS = 50
"""The number of steps per record after the first twenty records, if the user sets no number."""


def _early() -> Iterator[int]:
    step = 1
    while step < 5 * LATER_STEPS:
        yield step
        step += max(1, step // 5)


_EARLY = frozenset(_early())


def is_logged(step: int, every_steps: int | None) -> bool:
    """Returns whether a record ends with a step: each ``every_steps``-th, or with None often at first, later rarely."""
    if every_steps is not None:
        return step % every_steps == 0
    return step in _EARLY or (step >= 5 * LATER_STEPS and step % LATER_STEPS == 0)


class RunLog(StepHook):
    """Combines steps to records. As a hook, it writes metrics of the training steps so far, and saves the progress.

    Args:
        path: ``metrics.jsonl``, to which records are appended. None writes no file.
        callbacks: functions that also receive each record.
        every_steps: the number of steps per record, see :func:`is_logged`.
        others: the run's other processes, or None if there are none. Records have their memory, batches and speed.
        progressive: the scores of training steps before their updates, if the options ask for them.

    Attributes:
        first_steps: the speed of the run's first steps.
        evaluations: the metrics on validation data, by step.
    """

    pauses = False

    def __init__(
        self,
        path: Path | None,
        callbacks: Sequence[Callback],
        every_steps: int | None,
        others: PeerStatus | None = None,
        progressive: ProgressiveValidation | None = None,
    ) -> None:
        self._others, self._progressive, self._noted_step = others, progressive, -1
        self._path = path
        self._mark = None if path is None else TrainedMark(path.with_name(TRAINED))
        self._callbacks = tuple(callbacks)
        self._every_steps = every_steps
        self._start = time.perf_counter()
        self.first_steps = FirstSteps()
        self.evaluations: dict[int, Metrics] = {}
        self._window_loss, self._window_examples, self._window_train_s = 0.0, 0, 0.0
        self._window_staleness: Counter[int] = Counter()
        self._last_counters: Mapping[str, int] = {}

    def close(self) -> None:
        """Closes the file."""
        if self._mark is not None:
            self._mark.close()

    def begin(self, state: RunState, counters: Mapping[str, int]) -> None:
        """Starts training at a state. The examples before this state are not counted again after a later crash."""
        self.first_steps.begin(state)
        self._note(state)
        self._begin_window(state, counters)

    def due(self, state: RunState) -> bool:
        """True once after each step."""
        return state.step != self._noted_step

    def run(self, state: RunState) -> None:
        """Writes the metrics of the training steps so far, and saves the number of examples."""
        if self._progressive is not None and is_logged(state.step, self._every_steps):
            self._evaluated(PROGRESSIVE, self._progressive.record(), state)
        self._note(state)

    def _note(self, state: RunState) -> None:
        """Saves the number of trained examples, for a run that continues after a crash."""
        self._noted_step = state.step
        if self._mark is not None:
            self._mark.write(state.examples, state.repeated_examples)

    def _begin_window(self, state: RunState, counters: Mapping[str, int]) -> None:
        """Starts a new record, which does not include steps of earlier records."""
        self._last_counters = counters
        self._window_loss, self._window_examples, self._window_train_s = 0.0, 0, state.train_s

    def step(
        self, step: Step[Token], state: RunState, lr_scale: float, counters: Callable[[], Mapping[str, int]]
    ) -> None:
        """Adds one step, and writes a record if one is due."""
        self.first_steps.step(state)
        self._window_staleness[step.staleness] += 1
        facts = step.outcome.facts()
        if facts.refused is None:
            self._window_loss += facts.loss * step.num_examples
            self._window_examples += step.num_examples
        if is_logged(state.step, self._every_steps):
            self.flush(state, lr_scale, counters)

    def flush(
        self, state: RunState, lr_scale: float, counters: Callable[[], Mapping[str, int]] | None
    ) -> None:
        """Writes a record of the steps since the last record, if any. By default, uses the last known counters."""
        if self._window_examples == 0:
            return
        now = self._last_counters if counters is None else counters()
        names = ("hits", "lookups", "gpu_reads", "dram_reads", "ssd_reads", ASKED_KEYS, PACED_KEYS)
        seen = {key: now.get(key, 0) - self._last_counters.get(key, 0) for key in names}
        seconds, others = state.train_s - self._window_train_s, self._others
        rate, rss_bytes = self._window_examples / seconds if seconds > 0 else None, resident_bytes()
        staleness = self._window_staleness.copy()
        if others is not None:
            rate, rss_bytes = others.samples_per_s(rate), rss_bytes + others.resident_bytes()
            staleness += others.staleness()
        record = {
            "step": state.step,
            "examples": state.examples,
            "epoch": state.epoch,
            "loss": self._window_loss / self._window_examples,
            "samples_per_s": rate,
            "rows": now.get("rows", 0),
            "hit_rate": seen["hits"] / seen["lookups"] if seen["lookups"] else None,
            "rss_bytes": rss_bytes,
            "elapsed_s": round(time.perf_counter() - self._start, 3),
            "lr_scale": lr_scale,
            "staleness": {str(value): count for value, count in sorted(staleness.items())},
            **_tier_shares(now, seen),
            **({"imbalance": seen[PACED_KEYS] / seen[ASKED_KEYS]} if seen[ASKED_KEYS] else {}),
            **({"refused": state.refused} if state.refused else {}),
        }
        self._write(record)
        for callback in self._callbacks:
            callback.on_metrics(record)
        self._window_staleness.clear()
        self._begin_window(state, now)

    def evaluation(self, metrics: Metrics, state: RunState) -> None:
        """Writes the metrics of validation data."""
        self.evaluations[state.step] = metrics
        self._evaluated("valid", metrics.record(), state)

    def _evaluated(self, split: str, metrics: Mapping[str, object], state: RunState) -> None:
        record = {"step": state.step, "examples": state.examples, "epoch": state.epoch, "split": split}
        record |= metrics
        self._write(record)
        for callback in self._callbacks:
            callback.on_evaluation(record)

    def _write(self, record: Mapping[str, object]) -> None:
        if self._path is not None:
            append_line(self._path, json.dumps(record, allow_nan=False))


def _tier_shares(counters: Mapping[str, int], seen: Mapping[str, int]) -> dict[str, float]:
    """Returns the fraction of reads served from GPU memory, and the fraction served without an SSD.

    A fraction is left out if its tier does not exist.
    """
    reads = seen["gpu_reads"] + seen["dram_reads"] + seen["ssd_reads"]
    if not reads:
        return {}
    shares = {"gpu_share": seen["gpu_reads"] / reads} if "gpu_reads" in counters else {}
    return shares | ({"dram_share": 1 - seen["ssd_reads"] / reads} if "ssd_reads" in counters else {})


def rewind(path: Path, state: RunState) -> None:
    """Drops the records that a run that is resumed at ``state`` will write again, for example of an evaluation."""
    if not path.exists():
        return
    kept = []
    with open_file(path, kind=RunDirectoryError) as file:
        for line in file:
            try:
                record = build(dict[str, Any], parse(line), "")
                step = build(int, record.get("step", 0), "step")
            except ValueError:
                continue
            is_progress = record.get("split", PROGRESSIVE) == PROGRESSIVE  # written with its step
            if step < state.step or (
                step == state.step and (is_progress or state.evaluated_step == state.step)
            ):
                kept.append(line.decode().rstrip("\n") + "\n")
    write_whole(path, "".join(kept))
