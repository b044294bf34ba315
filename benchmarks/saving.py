"""What a save costs training: steps of a real DeepFM, alone and while a checkpoint is written, by turns.

Both halves and the saving are ``Trainer``'s, D = 16, float32. What a step of its loop does for a save counts as a
part of the step: to begin it, and, when it is on disk, to delete the one before.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import harness
import numpy as np
import train
import train_sides
from ids import Shape

from girih.checkpoint import CheckpointOptions, name_of
from girih.checkpoint.description import ModelDescription
from girih.checkpoint.save import Content
from girih.checkpoint.state import RunState
from girih.comm.group import TrainerGroup
from girih.telemetry.stats import Stats
from girih.training.checkpoints import RunCheckpoints

DIM, BATCHES, WARMUP, FEATURES = 16, 32, 10, 26


def beside_training(report: harness.Report, options: argparse.Namespace, root: Path) -> None:
    """Adds the table."""
    shape = Shape(FEATURES, train.BATCH, max(1, options.rows // FEATURES))
    task = train_sides.Task("deepfm", DIM, shape)
    side = train_sides.Girih(task, shards=None)
    batches = itertools.cycle(train.make_batches(shape, BATCHES, zipf=1.2))

    def step() -> None:
        side.step(side.prepare(next(batches)))

    schema = task.schema()

    def content() -> Content:
        return Content(
            step=side.sparse.last_step,
            model=ModelDescription(
                schema=schema.to_dict(),
                fingerprint=schema.fingerprint(),
                needs={},
                recipe={},
                normalization=None,
            ),
            state={},
            sparse=side.sparse,
            dense=side._dense["float32"],
        )

    for _ in range(WARMUP):
        step()
    context = SimpleNamespace(directory=root, ranks=TrainerGroup(), stats=Stats())
    saver, saves = RunCheckpoints(CheckpointOptions(keep=1), context, content), []
    alone = [steps_alone(step, options.steps)]
    for _ in range(options.saves):
        saves.append(steps_beside(step, saver, content))
        alone.append(steps_alone(step, options.steps))
    saver.close()
    rows = sum(side.sparse.stats().rows.values())
    side.close()
    table = report.table(
        f"DeepFM, D = {DIM}, float32, {rows:,} rows, {train.BATCH:,} examples a step,"
        f" {options.saves} saves between phases of {options.steps} steps alone",
        {
            "what": "{}", "steps": "{}", "samples/s": "{:,.0f}", "median ms": "{:.1f}", "p99 ms": "{:.1f}",
            "longest ms": "{:.1f}", "to begin ms": "{:.1f}", "save s": "{:.2f}", "GB/s": "{:.2f}", "lost": "{:.0%}",
            "lost s": "{:.2f}",
        },
    )  # fmt: skip
    during = [times for times, *_ in saves]
    for what, phases in (("alone", alone), ("while saving", during)):
        ms = 1e3 * np.concatenate(phases)
        table.row(
            {"what": what, "steps": len(ms), "samples/s": train.BATCH * len(ms) / (ms.sum() / 1e3),
             "median ms": float(np.median(ms)), "p99 ms": float(np.quantile(ms, 0.99)), "longest ms": ms.max()}
        )  # fmt: skip
    usual = [statistics.fmean([*before, *after]) for before, after in itertools.pairwise(alone)]
    lost_s = [sum(times) - len(times) * mean for times, mean in zip(during, usual, strict=True)]
    table.rows[-1] |= {
        "to begin ms": 1e3 * statistics.median(begin_s for _, begin_s, _, _ in saves),
        "save s": statistics.median(save_s for _, _, save_s, _ in saves),
        "GB/s": statistics.median(size / save_s for _, _, save_s, size in saves) / 1e9,
        "lost": statistics.median(lost / sum(times) for lost, times in zip(lost_s, during, strict=True)),
        "lost s": statistics.median(lost_s),
    }


def steps_alone(step: Callable[[], None], num_steps: int) -> list[float]:
    """Seconds of each step."""
    return [harness.seconds(step) for _ in range(num_steps)]


def steps_beside(
    step: Callable[[], None], saver: RunCheckpoints, content: Callable[[], Content]
) -> tuple[Sequence[float], float, float, int]:
    """Seconds of each step until a save is on disk, seconds that it took to begin and in all, and its bytes."""

    def step_of_loop() -> None:
        step()
        saver.settle()

    start = time.perf_counter()
    path = Path(saver.root.url, name_of(content().step))
    saver.begin(RunState())
    begin_s = time.perf_counter() - start
    times = []
    while not path.is_dir():  # it has its name when it is complete
        times.append(harness.seconds(step_of_loop))
    save_s = time.perf_counter() - start
    times.append(harness.seconds(step_of_loop))
    times[0] += begin_s
    saver.settle(wait=True)
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    os.sync()
    return times, begin_s, save_s, num_bytes
