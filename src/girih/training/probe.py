"""Short runs of a strategy on generated data, beside what the parts of its steps should take: what is missing is its overhead.

Processor time is that of all processes of the run, as the kernel counts it. Rows are made in the first epoch; the others are measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from girih.cluster.cluster import Cluster
from girih.comm.registry import find
from girih.config.train import TrainOptions
from girih.data import read_parquet
from girih.models.dnn import DNN
from girih.planner.calibration import Calibration
from girih.planner.speed.overhead import Observed
from girih.planner.speed.step import StepCost
from girih.runs.callbacks import Callback
from girih.schema import Categorical, Schema
from girih.strategies import BY_NAME, roles_of
from girih.strategies.strategy import Strategy, one_at_a_time, way_of
from girih.trainer import Trainer

FEATURES, IDS, DIM, HIDDEN = 8, 4000, 16, (64, 32)
LOGGED = 6
"""Steps of a record."""
WINDOW = {64: 4 * LOGGED, 4096: LOGGED}
"""Examples of a trainer's share of a step, in the two observations of each strategy → steps of a window. Steps of few take
milliseconds, so that a window has more of them; what an id takes is as good as the two are far apart."""
WINDOWS, EPOCHS = 5, 4
"""Windows of an epoch, and epochs: the first one makes rows, the others are measured."""


def ways(trainers: int) -> Mapping[str, Strategy]:
    """Way to train → girih's strategy for it, with one step of each trainer under way."""
    found = (each for kind in BY_NAME.values() for each in kind.with_trainers(trainers))  # type: ignore[attr-defined]
    return {way_of(each): one_at_a_time(each) for each in found}


def write_data(folder: Path, trainers: int) -> None:
    """Writes Parquet files for both runs, ids drawn evenly: one epoch each."""
    random = np.random.default_rng(0)
    for examples, window in WINDOW.items():
        rows = examples * trainers * window * WINDOWS
        columns = {f"f{number}": random.integers(0, IDS, rows) for number in range(FEATURES)}
        labels = {"click": (random.random(rows) < 0.5).astype(np.int8)}
        pq.write_table(pa.table({**columns, **labels}), _file(folder, examples))


def observe(
    strategy: Strategy, calibration: Calibration, folder: Path, cluster: Cluster
) -> tuple[Observed, Observed] | None:
    """Trains on few examples a step, then on more; called by all trainers. What was observed, on rank 0."""
    schema = Schema([Categorical(name=f"f{number}", dim=DIM) for number in range(FEATURES)], labels="click")
    meter = _Meter(cluster, {"trainer": strategy.trainers, **roles_of(strategy)})
    options, found = TrainOptions(log_every_steps=LOGGED), []
    with Trainer(
        DNN(schema, hidden=HIDDEN), strategy=strategy, options=options, callbacks=[meter], cluster=cluster
    ) as trainer:
        for examples, window in WINDOW.items():
            data = read_parquet(_file(folder, examples), schema, batch_size=examples * strategy.trainers)
            meter.begin(trainer.state.step, window)
            trainer.fit(data, epochs=EPOCHS)
            cost = trainer._run.step_cost(data, calibration)
            if cost is not None:
                found.append(_observed(strategy, examples, cost, list(meter.windows())))
    if len(found) < 2:
        return None
    few, many = found
    return few, many


def _observed(
    strategy: Strategy, examples: int, cost: StepCost, windows: Sequence[tuple[float, float]]
) -> Observed:
    return Observed(
        ids=float(FEATURES * examples),
        trainers=strategy.trainers,
        cpu_s=_undisturbed([cpu_s for cpu_s, _ in windows]),
        step_s=_undisturbed([step_s for _, step_s in windows]),
        work_s=sum(cost.work_s.values()),
        path_s=sum(cost.path_s.values()),
    )


def _undisturbed(seconds: Sequence[float]) -> float:
    """The first quartile: what others do to a window makes it longer, and the least may have had luck."""
    return sorted(seconds)[len(seconds) // 4]


def _file(folder: Path, examples: int) -> Path:
    return folder / f"{examples}.parquet"


@dataclass
class _Meter(Callback):
    """Hears records of a run, and notes time and processor time by then."""

    cluster: Cluster
    counts: Mapping[str, int]
    first_step: int = 0
    window: int = 1
    notes: list[tuple[int, float, float]] = field(default_factory=list)

    def begin(self, step: int, window: int) -> None:
        """Drops what was noted; training goes on from this step, in windows of so many."""
        self.first_step, self.window = step, window
        self.notes.clear()

    def on_metrics(self, record: Mapping[str, Any]) -> None:
        """Notes the end of a window behind the first epoch, while all processes are there."""
        windows, within = divmod(record["step"] - self.first_step, self.window)
        if within == 0 and WINDOWS <= windows < EPOCHS * WINDOWS:
            entries = [
                find(self.cluster.registry, role, index)
                for role, count in self.counts.items()
                for index in range(count)
            ]
            pids = [entry.pid for entry in entries if entry is not None] or [0]
            self.notes.append((record["step"], time.perf_counter(), sum(map(_cpu_s, pids))))

    def windows(self) -> Iterator[tuple[float, float]]:
        """Core-seconds and seconds of a step, in each window."""
        for (before, since_s, busy_s), (after, until_s, by_then_s) in pairwise(self.notes):
            yield (by_then_s - busy_s) / (after - before), (until_s - since_s) / (after - before)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, of all its threads; 0 is this one.

    The clock of another process is Linux's ``clock_getcpuclockid``: its complement, and the kind of clock in three bits.
    """
    return time.process_time() if pid == 0 else time.clock_gettime(~pid << 3 | 2)
