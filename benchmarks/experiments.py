"""What experiments share: runs of ``girih train`` whose results are kept, one file each, and are made again for other code.

A run is known by its name, its config and the code that trained it: one that is kept under all three is not trained
again, so that an experiment goes on where it was stopped, and tables are redrawn in a second.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

KEPT = (
    "auc", "logloss", "steps", "num_examples", "staleness_max", "staleness_mean", "updates_since_read_max",
    "updates_since_read_mean", "dense_staleness_max", "duration_s",
)  # fmt: skip


@cache
def code() -> str:
    """A fingerprint of the code that decides what a run learns; comments, docstrings and layout do not change it."""
    digest = hashlib.sha256()
    source = ROOT / "src" / "girih"
    for part in LEARNING_PARTS:
        folder = source / part
        for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            digest.update(f"{file.relative_to(source)}\0{ast.dump(_undocumented(file))}".encode())
    return digest.hexdigest()[:16]


def _undocumented(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return tree


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a config, and how it is spread over processes.

    Attributes:
        name: parts joined by slashes; the file of its result is called so.
        config: the config file's content, without ``[strategy]``.
        strategy: ``name`` and options of ``[strategy]``.
    """

    name: str
    config: Mapping[str, Any]
    strategy: Mapping[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        """The config as a whole."""
        return {**self.config, "strategy": dict(self.strategy)}


class Results:
    """Results of one experiment, a file per run below a folder.

    Args:
        other_code: also takes what other code has trained; tables then say so.
    """

    def __init__(self, folder: Path, *, other_code: bool = False) -> None:
        self.folder, self.other_code = folder, other_code
        self.used: list[dict[str, Any]] = []

    def file(self, run: Run) -> Path:
        """Where a run's result is kept."""
        return self.folder / (re.sub(r"[^\w./=+-]+", "_", run.name) + ".json")

    def kept(self, run: Run) -> dict[str, Any] | None:
        """What is kept of a run, by this code unless ``other_code``."""
        file = self.file(run)
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if found.get("asked") != run.asked or not (self.other_code or found["code"] == code()):
            return None
        return found

    def train(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Trains what is not kept yet; returns what is kept of all, in their order."""
        found = [self.kept(run) or self._trained(run) for run in runs]
        self.used += found
        return found

    def told(self) -> str:
        """A line about where the results that were used come from: machine hours, processor, code."""
        hours = sum(run["wall_s"] for run in self.used) / 3600
        cores = sorted(
            {f"{run['machine']['cores']} cores of {run['machine']['processor']}" for run in self.used}
        )
        others = sum(run["code"] != code() for run in self.used)
        by = "all by the present code" if not others else f"{others} of them by other code than the present"
        return f"{len(self.used)} runs, {hours:.2f} machine hours on {', '.join(cores)}; {by}."

    def _trained(self, run: Run) -> dict[str, Any]:
        start = time.perf_counter()
        found, machine = _train(run), harness.machine()
        kept = {
            "name": run.name,
            "asked": run.asked,
            "code": code(),
            "machine": {key: machine[key] for key in ("processor", "cores", "memory_bytes", "system")},
            "wall_s": round(time.perf_counter() - start, 1),
            **found,
        }
        file = self.file(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        draft.replace(file)
        print(
            f"{run.name:60} auc {kept['auc']:.5f}  staleness {kept['staleness_mean']:.2f}, at most"
            f" {kept['staleness_max']}  {kept['wall_s']:.1f} s",
            flush=True,
        )
        return kept


def _train(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="girih-experiment-") as directory:
        config, path = Path(directory, "config.toml"), Path(directory, "run")
        config.write_text(tomli_w.dumps(run.asked))
        words = [sys.executable, "-m", "girih", "train", str(config), "--run", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{run.name}: girih train failed:\n{done.stderr[-2000:]}")
        summary = json.loads((path / "summary.json").read_text())
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    curve = [[r["step"], round(r["auc"], 6)] for r in records if r.get("split") == "valid"]
    return {key: summary[key] for key in KEPT if key in summary} | {"curve": curve}


def best_valid(run: Mapping[str, Any]) -> float:
    """The best AUC on validation data."""
    return float(max(auc for _, auc in run["curve"]))


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that every experiment takes."""
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: shows that it runs")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where results are kept, a file per run"
    )
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="where pictures go")
    parser.add_argument(
        "--other-code",
        action="store_true",
        help="takes results of other code too, and trains only what has none",
    )


def results(arguments: argparse.Namespace, name: str) -> Results:
    """The results of an experiment; those of ``--quick`` are nobody's."""
    default = Path("runs", "experiments", name) if arguments.quick else RESULTS / name
    return Results(arguments.results or default, other_code=arguments.other_code)


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
