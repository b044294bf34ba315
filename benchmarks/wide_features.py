"""Whole steps of 100 to 10,000 features, Parquet to updated rows, with as many ids in each: what an id costs, and where.

    girih bench wide_features
    girih bench wide_features --features 26 1000 --batch 4096

The widest has ``--batch`` examples per step, the others as many more as make ids alike. All ids are spread evenly over
``--rows`` rows in all, so that unique keys are alike too. Below stand the same features with ``--batch`` examples: what a
step costs whatever it holds.

``read`` is what a step waits for its batch after the first one of an epoch, whose row group is read meanwhile; ``reading``
is what that takes alone, on all of Arrow's threads. The rest is what happens between the phases. ``config`` is from the
text of a config to checked features, ``begin`` from there to tables, model and plan.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import girih
from girih.app.run_config import RunConfig
from girih.config import write_toml
from girih.data import Dataset

PHASES = ("read", "pull", "forward", "backward", "push", "apply")
DIM, STEPS_OF_GROUP, MOST_TIMES, WARMUP = 8, 3, 20, 1


def main() -> None:
    parser = harness.parser("wide_features", __doc__)
    parser.add_argument("--features", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--batch", type=int, default=1024, help="examples of a step of the most features")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of all tables together")
    parser.add_argument("--model", default="deepfm", choices=["lr", "fm", "dnn", "deepfm"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=6, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=4, help="epochs that count")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = harness.Report("wide_features", options)
    most = max(options.features)
    alike = {
        "ids alike": [(features, options.batch * most // features) for features in options.features],
        "batch alike": [(features, options.batch) for features in options.features],
    }
    with tempfile.TemporaryDirectory() as folder:
        Run(Path(folder, "first"), 2, 8, 16, options).close()  # what a process does once
        runs = {
            shape: Run(Path(folder, f"{shape[0]}-{shape[1]}"), *shape, most * options.batch, options)
            for shape in dict.fromkeys(shape for shapes in alike.values() for shape in shapes)
        }
        trained = harness.alternate({run.name: run.train for run in runs.values()}, options.rounds, WARMUP)
        alone = harness.alternate({run.name: run.read for run in runs.values()}, 2, 0)
        for what, shapes in alike.items():
            tell(report, what, [runs[shape] for shape in shapes], trained, alone, options)
        for run in runs.values():
            run.close()
    report.finish()


def tell(
    report: harness.Report,
    what: str,
    runs: list[Run],
    trained: dict[str, list[tuple[float, ...]]],
    alone: dict[str, list[tuple[float, ...]]],
    options: argparse.Namespace,
) -> None:
    """Adds a table; the first run is what others are compared with."""
    title = f"{options.model}, D = {DIM}, {options.rows:,} rows in all, {options.threads} threads, {what}; phases in ns an id"
    table = report.table(
        title,
        {"features": "{:,}", "batch": "{:,}", "step ms": "{:,.1f}", "million ids/s": "{:.2f}", "of the first": "{:.2f}"}
        | dict.fromkeys((*PHASES, "rest", "reading"), "{:.1f}")
        | {"config s": "{:.2f}", "begin s": "{:.2f}"},
    )  # fmt: skip
    whole = {run: [(part[0] / run.num_ids / run.steps,) for part in trained[run.name]] for run in runs}
    for run in runs:
        step_s = run.num_ids * harness.median(whole[run])
        parts = {
            name: 1e9 * harness.median_part(trained[run.name], place) / run.steps / run.num_ids
            for place, name in enumerate(PHASES, 1)
        }
        table.row(
            {"features": run.features, "batch": run.batch, "step ms": 1e3 * step_s}
            | {"million ids/s": run.num_ids / step_s / 1e6}
            | {"of the first": harness.ratio(whole[run], whole[runs[0]])}
            | parts
            | {"rest": 1e9 * step_s / run.num_ids - sum(parts.values())}
            | {"reading": 1e9 * harness.median(alone[run.name]) / run.steps / run.num_ids}
            | {"config s": run.config_s, "begin s": run.begin_s}
        )


class Run:
    """A trainer of so many features, and its file.

    Attributes:
        num_ids: of a step. steps: of an epoch, more where they are small.
    """

    def __init__(
        self, folder: Path, features: int, batch: int, most_ids: int, options: argparse.Namespace
    ) -> None:
        self.name, self.features, self.batch = folder.name, features, batch
        self.num_ids = features * batch
        self.steps = options.steps * min(MOST_TIMES, max(1, most_ids // self.num_ids))
        folder.mkdir()
        rows_of_table = max(1, options.rows // features)
        write(folder / "train.parquet", features, batch, self.steps, rows_of_table)
        hidden = {} if options.model in ("lr", "fm") else {"hidden": options.hidden}
        write_toml(
            folder / "config.toml",
            {
                "data": {"train": "train.parquet", "batch_size": batch, "shuffle": False},
                "features": [{"name": f"f{f}", "kind": "categorical", "dim": DIM} for f in range(features)],
                "labels": {"names": ["click"]},
                "model": {"name": options.model, **hidden},
                "sparse_optimizer": {"name": "rowwise_adagrad", "lr": 0.01},
            },
        )
        start = time.perf_counter()
        config = RunConfig.load(folder / "config.toml")
        self.config_s = time.perf_counter() - start
        self.data: Dataset = config.dataset("train")
        self.trainer: girih.Trainer = config.trainer()
        self.trainer.fit(self.data, epochs=0)
        self.begin_s = time.perf_counter() - start - self.config_s

    def train(self, _: int) -> tuple[float, ...]:
        """An epoch: seconds of its steps but for the first wait, and of each phase in them."""
        before = self.trainer.state.train_s
        self.trainer.fit(self.data, epochs=1)
        spans = self.trainer.spans
        (first, *_) = (seconds for name, _, seconds in spans.events() if name == "read")
        whole = self.trainer.state.train_s - before - first
        read, *others = (spans.totals_s[name] for name in PHASES)
        return whole, read - first, *others

    def read(self, _: int) -> None:
        """All batches of an epoch."""
        for _ in self.data:
            pass

    def close(self) -> None:
        """Gives the tables back."""
        self.trainer.close()


def write(file: Path, features: int, batch: int, steps: int, rows_of_table: int) -> None:
    """Writes so many batches of one id a feature, in row groups of a few."""
    rng = np.random.default_rng(0)
    group = min(STEPS_OF_GROUP, steps) * batch
    names = [f"f{f}" for f in range(features)]
    schema = pa.schema([*((name, pa.int64()) for name in names), ("click", pa.int8())])
    with pq.ParquetWriter(file, schema) as writer:
        for rows in _groups(steps * batch, group):
            columns: list[Any] = [pa.array(rng.integers(0, rows_of_table, rows)) for _ in names]
            columns.append(pa.array((rng.random(rows) < 0.25).astype(np.int8)))
            writer.write_table(pa.table(columns, schema), row_group_size=group)


def _groups(rows: int, group: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, group)
        rows -= group


if __name__ == "__main__":
    main()
