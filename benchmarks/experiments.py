"""What experiments share: runs whose results are kept, one file each, and are made again for other code.

A run is known by its name, its config and the code that trained it: one that is kept under all three is not trained
again, so that an experiment goes on where it was stopped, and tables are redrawn in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import harness
import tomli_w

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

LEARNING_PARTS = (
    "data", "kernels", "store", "models", "sparse", "dense", "strategies", "training", "metrics",
    "schema.py", "tables.py", "optim.py", "trainer.py",
)  # fmt: skip
"""Parts of ``src/girih`` that decide what a run learns."""
RUNNING_PARTS = (*LEARNING_PARTS, "cluster", "comm", "planner", "runs")
"""Parts that decide how long a run takes and what it sends."""

KEPT = (
    "auc", "logloss", "steps", "num_examples", "staleness_max", "staleness_mean", "updates_since_read_max",
    "updates_since_read_mean", "dense_staleness", "dense_staleness_max", "duration_s",
)  # fmt: skip


@cache
def code(parts: Sequence[str] = LEARNING_PARTS) -> str:
    """A fingerprint of the code that decides what a run finds."""
    source = ROOT / "src" / "girih"
    folders = [source / part for part in parts]
    files = [sorted(folder.rglob("*.py")) if folder.is_dir() else [folder] for folder in folders]
    return harness.fingerprint(source, (file for of_part in files for file in of_part))


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a config, and how it is spread over processes.

    Attributes:
        name: parts joined by slashes; the file of its result is called so.
        config: the config file's content, without ``[strategy]``.
        strategy: ``name`` and options of ``[strategy]``.
        conditions: what else its result depends on, such as the links between hosts.
    """

    name: str
    config: Mapping[str, Any]
    strategy: Mapping[str, Any]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The config as a whole."""
        return {**self.config, "strategy": dict(self.strategy)}

    @property
    def asked(self) -> dict[str, Any]:
        """The config and the conditions."""
        return self.settings | ({"conditions": dict(self.conditions)} if self.conditions else {})


class Results:
    """Results of one experiment, a file per run below a folder.

    Args:
        other_code: also takes what other code has trained; tables then say so.
        parts: the code that results depend on.
    """

    def __init__(
        self, folder: Path, *, other_code: bool = False, parts: Sequence[str] = LEARNING_PARTS
    ) -> None:
        self.folder, self.other_code, self.code = folder, other_code, code(tuple(parts))
        self.used: list[dict[str, Any]] = []

    def file(self, run: Run) -> Path:
        """Where a run's result is kept."""
        return self.folder / (re.sub(r"[^\w./=+-]+", "_", run.name) + ".json")

    def kept(self, run: Run) -> dict[str, Any] | None:
        """What is kept of a run, by this code unless ``other_code``."""
        file = self.file(run)
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if found.get("asked") != run.asked or not (self.other_code or found["code"] == self.code):
            return None
        return found

    def train(
        self, runs: Sequence[Run], how: Callable[[Run], Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Trains what is not kept yet; returns what is kept of all, in their order.

        Args:
            how: trains one run and returns what it found, an ``auc`` among it; :func:`trained` by default.
        """
        found = [self.kept(run) or self._trained(run, how or trained) for run in runs]
        self.used += found
        return found

    def told(self) -> str:
        """A line about where the results that were used come from: machine hours, processor, code."""
        hours = sum(run["wall_s"] for run in self.used) / 3600
        cores = sorted(
            {f"{run['machine']['cores']} cores of {run['machine']['processor']}" for run in self.used}
        )
        others = sum(run["code"] != self.code for run in self.used)
        by = "all by the present code" if not others else f"{others} of them by other code than the present"
        return f"{len(self.used)} runs, {hours:.2f} machine hours on {', '.join(cores)}; {by}."

    def keep(self, run: Run, found: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        """Writes the result of a run that took so long, with where it comes from; returns both."""
        machine = harness.machine()
        kept = {
            "name": run.name,
            "asked": run.asked,
            "code": self.code,
            "machine": {key: machine[key] for key in ("processor", "cores", "memory_bytes", "system")},
            "wall_s": round(wall_s, 1),
            **found,
        }
        file = self.file(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        draft.replace(file)
        return kept

    def measure(self, run: Run, how: Callable[[Run], Mapping[str, Any]]) -> dict[str, Any]:
        """What is kept of a run; if nothing is, measures it and keeps that.

        Args:
            how: measures one run and returns what it found, ``windows`` of its steps among it.
        """
        found = self.kept(run)
        if found is None:
            start = time.perf_counter()
            found = self.keep(run, how(run), time.perf_counter() - start)
            step_ms = 1e3 * statistics.median(window["step_s"] for window in found["windows"])
            print(f"{run.name:60} {step_ms:.1f} ms a step  {found['wall_s']:.1f} s", flush=True)
        self.used.append(found)
        return found

    def _trained(self, run: Run, how: Callable[[Run], Mapping[str, Any]]) -> dict[str, Any]:
        start = time.perf_counter()
        kept = self.keep(run, how(run), time.perf_counter() - start)
        print(
            f"{run.name:60} auc {kept['auc']:.5f}  staleness {kept['staleness_mean']:.2f}, at most"
            f" {kept['staleness_max']}  {kept['wall_s']:.1f} s",
            flush=True,
        )
        return kept


def trained(run: Run, metric: str = "auc") -> dict[str, Any]:
    """What ``girih train`` finds, with ``curve``: (step, metric on validation data) of each evaluation."""
    with tempfile.TemporaryDirectory(prefix="girih-experiment-") as directory:
        config, path = Path(directory, "config.toml"), Path(directory, "run")
        config.write_text(tomli_w.dumps(run.settings))
        girih_train(run, config, path)
        summary = json.loads((path / "summary.json").read_text())
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    curve = [[r["step"], round(r[metric], 6)] for r in records if r.get("split") == "valid"]
    entropy = next(iter(summary["by_label"].values()))["normalized_entropy"]
    found = {key: summary[key] for key in KEPT if key in summary}
    return found | {"normalized_entropy": entropy, "curve": curve}


def girih_train(run: Run, config: Path, directory: Path, *words: str) -> None:
    """``girih train``, with more words of the command line.

    Raises:
        SystemExit: it failed; what it said.
    """
    command = [sys.executable, "-m", "girih", "train", str(config), "--run", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run.name}: girih train failed:\n{done.stderr[-2000:]}")


def tuned(
    score: Callable[[float], float], factors: Sequence[float], most: int, *, grow: bool = True
) -> float:
    """The factor of learning rates with the best score; the grid grows beyond its ends while the best is at one.

    Args:
        factors: to begin with. most: to try in all.
    """
    tried: dict[float, float] = {}
    wanted = list(factors)
    while wanted:
        tried |= {factor: score(factor) for factor in wanted}
        best, lowest, highest = max(tried, key=lambda f: tried[f]), min(tried), max(tried)
        if not grow or len(tried) >= most:
            break
        step = sorted(factors)[1] / sorted(factors)[0]
        wanted = [lowest / step] * (best == lowest) + [highest * step] * (best == highest)
    return max(tried, key=lambda f: tried[f])


def best_valid(run: Mapping[str, Any]) -> float:
    """The best AUC on validation data."""
    return float(max(auc for _, auc in run["curve"]))


def tried(kept: Results, arm: str, seed: int, told: Callable[[Mapping[str, Any]], str]) -> str:
    """Each factor of an arm's rates that was tried with a seed, and what is told of its run; runs are named arm/xfactor/seed."""
    found = {}
    for run in kept.used:
        of, factor, by = run["name"].rsplit("/", 2)
        if of == arm and by == str(seed):
            found[float(factor[1:])] = f"{factor[1:]}: {told(run)}"
    return ", ".join(found[factor] for factor in sorted(found))


def last_valid(run: Mapping[str, Any]) -> float:
    """The AUC on validation data at the end."""
    return float(run["curve"][-1][1])


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation of seeds."""
    mean = statistics.mean(values)
    return f"{mean:.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"


def gap(values: Sequence[float], reference: Sequence[float]) -> str:
    """Mean of the differences, seed by seed, ± their standard error."""
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f}"
    return f"{mean:+.4f} ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"


def mean_curve(runs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, mean AUC on validation data) over seeds."""
    columns = zip(*(run["curve"] for run in runs), strict=True)
    return [(points[0][0], statistics.mean(auc for _, auc in points)) for points in columns]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(report: harness.Report, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table as Markdown, and puts it into the report."""
    print(f"\n{title}\n\n{markdown(header, rows)}\n")
    table = report.table(title, dict.fromkeys(header, "{}"))
    for row in rows:
        table.row(dict(zip(header, row, strict=True)))


def add_options(parser: argparse.ArgumentParser, *, pictures: bool = True) -> None:
    """Options that every experiment takes."""
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: shows that it runs")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where results are kept, a file per run"
    )
    if pictures:
        parser.add_argument("--docs", type=Path, metavar="FOLDER", help="where pictures go")
    parser.add_argument(
        "--other-code",
        action="store_true",
        help="takes results of other code too, and trains only what has none",
    )


def results(arguments: argparse.Namespace, name: str, *, parts: Sequence[str] = LEARNING_PARTS) -> Results:
    """The results of an experiment; those of ``--quick`` are nobody's."""
    default = Path("runs", "experiments", name) if arguments.quick else RESULTS / name
    return Results(arguments.results or default, other_code=arguments.other_code, parts=parts)


def pictures(arguments: argparse.Namespace) -> Path:
    """Where pictures go."""
    quick = Path("runs", "experiments")
    return arguments.docs or (quick if arguments.quick else ROOT / "docs")


def find_data(parser: argparse.ArgumentParser) -> None:
    """Sees that the public data are there, and that KuaiRand is joined."""
    if "GIRIH_DATA" not in os.environ:
        parser.error("set GIRIH_DATA to the directory of the public data sets")
    prepared = Path(os.environ.setdefault("KUAIRAND", str(Path("runs/kuairand").resolve())))
    if not (prepared / "test.parquet").exists():
        script = ROOT / "recipes" / "kuairand" / "prepare.py"
        subprocess.run([sys.executable, script, prepared], check=True)
