"""Whole runs of two versions, in turns: samples/s of training steps, and seconds outside them.

    python benchmarks/two_versions.py BEFORE AFTER                        # trees whose src/ is put in front of the path
    python benchmarks/two_versions.py BEFORE AFTER --strategies hybrid --rounds 6

Every strategy trains DeepFM (256-128, D = 16, three features) on a generated click log of 400,000 examples in batches of
2,048, with two trainers where it has several. ``outside`` is what a run takes besides its training steps: start, first
batches, the last checkpoint, end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from girih.data.click_log import click_log

STRATEGIES = ("local", "synchronous", "substitution", "hybrid", "asynchronous")
FEATURE = '[[features]]\nname = "{}"\nkind = "categorical"\ndim = 16\n'
CONFIG = (
    '[data]\ntrain = "train.parquet"\nbatch_size = 2048\n'
    + "".join(FEATURE.format(name) for name in ("user", "item", "tags"))
    + """
[[features]]
name = "x0"
kind = "numeric"
[labels]
names = ["click"]
[model]
name = "deepfm"
hidden = [256, 128]
[sparse_optimizer]
name = "rowwise_adagrad"
[train]
seed = 1
"""
)


def main() -> None:
    """Prints a line for each strategy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    trees = (options.before.resolve(), options.after.resolve())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        table, _ = click_log(400_000, start=0, cardinality=200_000)
        pq.write_table(table, place / "train.parquet", row_group_size=100_000)
        (place / "config.toml").write_text(CONFIG)
        for strategy in options.strategies:
            for tree in trees:
                run(tree, strategy, place, "warm")  # compiles kernels
            found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for number in range(options.rounds):
                for tree in trees if number % 2 else trees[::-1]:
                    found[tree].append(run(tree, strategy, place, f"{strategy}-{number}"))
            (rate, outside), (new_rate, new_outside) = (
                (median(r for r, _ in found[tree]), median(s for _, s in found[tree])) for tree in trees
            )
            print(
                f"{strategy:13} samples/s {rate:9,.0f} → {new_rate:9,.0f} ({new_rate / rate:.3f})"
                f"   outside {outside:.2f} → {new_outside:.2f} s"
            )


def run(tree: Path, strategy: str, place: Path, name: str) -> tuple[float, float]:
    """Trains once; returns samples/s, and seconds outside training steps."""
    several = [] if strategy == "local" else ["--set", "strategy.trainers=2"]
    directory = place / f"{name}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "girih", "train", "config.toml", "--strategy", strategy, *several]
    start = time.monotonic()
    subprocess.run(
        [*command, "--run", str(directory)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        check=True,
        capture_output=True,
    )
    whole = time.monotonic() - start
    summary = json.loads((directory / "summary.json").read_text())
    return summary["samples_per_s"], whole - summary["num_examples"] / summary["samples_per_s"]


if __name__ == "__main__":
    main()
