"""What the experiments on Persia's claims share: runs of ``girih train`` in several processes, kept as JSON.

A run is known by its name and its config: one that is kept under both is not trained again, so that tables and
pictures are redrawn in a second, and an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

KEPT = (
    "auc", "logloss", "steps", "num_examples", "staleness_max", "staleness_mean", "dense_staleness_max",
    "duration_s",
)  # fmt: skip

EXTRA = ("curve", "wall_s")


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a config, and how it is spread over processes.

    Attributes:
        config: the config file's content, without ``[strategy]``.
        strategy: ``name`` and options of ``[strategy]``.
    """

    name: str
    config: Mapping[str, Any]
    strategy: Mapping[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        """What it is known by, beside its name."""
        return {"config": self.config, "strategy": dict(self.strategy)}

    def command(self, config: Path, run: Path) -> list[str]:
        """``girih train`` with this strategy."""
        words = ["train", str(config), "--run", str(run), "--strategy", self.strategy["name"]]
        for key, value in self.strategy.items():
            if key != "name":
                words += ["--set", f"strategy.{key}={value}"]
        return [sys.executable, "-m", "girih", *words]


class Results:
    """Runs by name, in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def train(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Trains those that are not kept yet; returns what is kept of all, in their order."""
        return [self._train(run) for run in runs]

    def has(self, run: Run) -> bool:
        """Whether this run is kept."""
        kept = self.runs.get(run.name)
        return kept is not None and kept["asked"] == run.asked

    def keep(self, run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps what a run found: a summary, and more."""
        kept = {"asked": run.asked, **{key: found[key] for key in (*KEPT, *EXTRA) if key in found}}
        self.runs[run.name] = kept
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.runs, indent=None, separators=(",", ":")) + "\n")
        print(
            f"{run.name:44} auc {kept['auc']:.5f}  staleness {kept['staleness_mean']:.2f}, at most"
            f" {kept['staleness_max']}  {kept.get('wall_s', kept['duration_s']):.1f} s",
            flush=True,
        )
        return kept

    def _train(self, run: Run) -> dict[str, Any]:
        if self.has(run):
            return self.runs[run.name]
        start = time.perf_counter()
        found = _trained(run)
        return self.keep(run, {**found, "wall_s": round(time.perf_counter() - start, 1)})


def _trained(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="girih-persia-") as directory:
        config, path = Path(directory, "config.toml"), Path(directory, "run")
        config.write_text(tomli_w.dumps(run.config))
        done = subprocess.run(run.command(config, path), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{run.name}: girih train failed:\n{done.stderr[-2000:]}")
        summary = json.loads((path / "summary.json").read_text())
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    curve = [[r["step"], round(r["auc"], 6)] for r in records if r.get("split") == "valid"]
    return {key: summary[key] for key in KEPT} | {"curve": curve}


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
