"""Compares the speed of two versions in turns: whole runs, or the tables of a benchmark.

    python benchmarks/two_versions.py BEFORE AFTER                        # trees whose src/ is put in front of the path
    python benchmarks/two_versions.py BEFORE AFTER --strategies hybrid --rounds 6
    python benchmarks/two_versions.py BEFORE AFTER --bench "kernels --quick"

Every strategy trains DeepFM (256-128, D = 16, three features) on a generated click log of 400,000 examples in batches of
2,048, with two trainers where it has several. ``outside`` is what a run takes besides its training steps: start, first
batches, the last checkpoint, end.

``--bench`` runs ``girih bench`` of both trees with the given options instead. It compares each row that is about girih,
by the column of seconds or of a rate. A figure is the median of the rounds. Ratios above 1 mean that AFTER is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import pyarrow.parquet as pq

from girih.data.click_log import click_log

STRATEGIES = ("local", "synchronous", "substitution", "hybrid", "asynchronous")
FEATURE = '[[features]]\nname = "{}"\nkind = "categorical"\ndim = 16\n'
MEASURES = {"step ms": False, "samples/s": True, "requests/s": True, "p50 ms": False}
"""Columns that are compared, the first that a row has; whether more is better."""
FIGURES = ("ms", "/s", "x ", "of ", "girih is", "unique", "new ids", "rows", "asked", "versions")
"""Ends or beginnings of columns that hold a figure. The other columns name the row."""
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
    parser.add_argument(
        "--bench", metavar="OPTIONS", help="a benchmark of girih bench and its options, in quotes"
    )
    options = parser.parse_args()
    trees = (options.before.resolve(), options.after.resolve())
    if options.bench:
        compare_tables(trees, options.bench.split(), options.rounds)
    else:
        compare_runs(trees, options.strategies, options.rounds)


def in_turns(trees: tuple[Path, Path], rounds: int) -> Iterator[Path]:
    """Both trees in each round; the one that begins changes."""
    for number in range(rounds):
        yield from trees if number % 2 else trees[::-1]


def compare_runs(trees: tuple[Path, Path], strategies: Sequence[str], rounds: int) -> None:
    """Trains with each strategy and prints a line for it, then the geometric means of the ratios."""
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        table, _ = click_log(400_000, start=0, cardinality=200_000)
        pq.write_table(table, place / "train.parquet", row_group_size=100_000)
        (place / "config.toml").write_text(CONFIG)
        for strategy in strategies:
            for tree in trees:
                run(tree, strategy, place, "warm")  # compiles kernels
            runs: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for tree in in_turns(trees, rounds):
                runs[tree].append(run(tree, strategy, place, strategy))
            (rate, outside), (new_rate, new_outside) = (
                (median(r for r, _ in runs[tree]), median(s for _, s in runs[tree])) for tree in trees
            )
            ratios.append((new_rate / rate, outside / new_outside))
            print(
                f"{strategy:13} samples/s {rate:9,.0f} → {new_rate:9,.0f} ({new_rate / rate:.3f})"
                f"   outside {outside:.2f} → {new_outside:.2f} s ({outside / new_outside:.3f})",
                flush=True,
            )
    rates, starts = (geometric_mean(column) for column in zip(*ratios, strict=True))
    print(f"geometric means: samples/s {rates:.3f}, outside {starts:.3f}")


def compare_tables(trees: tuple[Path, Path], command: Sequence[str], rounds: int) -> None:
    """Runs a benchmark and prints a line for each row about girih, then the geometric mean of the ratios."""
    figures: dict[str, dict[Path, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tree in in_turns(trees, rounds):
            for name, figure in bench(tree, command, Path(folder) / "result.json"):
                figures.setdefault(name, {}).setdefault(tree, []).append(figure)
    ratios = []
    for name, of_tree in figures.items():
        before, after = (median(of_tree[tree]) for tree in trees)
        ratios.append(after / before)
        print(f"{ratios[-1]:.3f}  {name}", flush=True)
    print(f"geometric mean of {len(ratios)} rows: {geometric_mean(ratios):.3f}")


def bench(tree: Path, command: Sequence[str], file: Path) -> Iterator[tuple[str, float]]:
    """Runs a benchmark of a tree. Gives (name, speed) of each row about girih; speed grows where a row gets faster."""
    subprocess.run(
        [sys.executable, "-m", "girih", "bench", *command, "--json", str(file)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        check=True,
        capture_output=True,
    )
    for table in json.loads(file.read_text())["tables"]:
        for row in table["rows"]:
            measure = next((column for column in MEASURES if row.get(column)), None)
            if measure is None or not str(row.get("what", "girih")).startswith("girih"):
                continue
            name = ", ".join(
                str(value)
                for column, value in row.items()
                if not column.startswith(FIGURES) and not column.endswith(FIGURES)
            )
            yield f"{name}: {measure}", row[measure] if MEASURES[measure] else 1 / row[measure]


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
