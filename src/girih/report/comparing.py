"""Compares runs: options that differ, and the results."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.config import parse_toml
from girih.config.train import RECORDED
from girih.errors import ConfigError
from girih.report.record import RunRecord, masked, read_run
from girih.report.text import DASH, count, duration, fraction, is_number, short

TITLES = {
    "auc": "AUC",
    "auprc": "AUPRC",
    "gauc": "GAUC",
    "uauc": "user AUC",
    "logloss": "logloss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "mae": "MAE",
    "rmse": "RMSE",
    "num_examples": "num examples",
}
"""Metrics of a label, with their titles."""
METRICS: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "AUC": ("auc", fraction),
    "GAUC": ("gauc", fraction),
    "logloss": ("logloss", fraction),
    "MAE": ("mae", fraction),
    "RMSE": ("rmse", fraction),
    "evaluated on": ("evaluated_on", str),
    "strategy": ("strategy", str),
    "samples/s": ("samples_per_s", short),
    "examples": ("num_examples", count),
    "steps": ("steps", count),
    "rows": ("num_rows", count),
    "duration": ("duration_s", duration),
    "finished": ("finished", str),
}
"""Title → the name of a value, and its format."""
NOT_OPTIONS = ("checkpoint.dir", "store.ssd_dir", "metrics.targets")
"""Paths, which differ in every run."""
ABSENT = "not set"
MOST_SHOWN = 60
"""The largest number of characters of a value on a line with several values."""


@dataclass(frozen=True)
class RunComparison:
    """A comparison of runs. Each row has one value per run.

    Attributes:
        names: the paths of the runs, as given.
        records: the content of each run.
        options: options that differ, by dotted name.
        metrics: values by their names in ``summary.json``; None if a run has no such value.
    """

    names: tuple[str, ...]
    records: tuple[RunRecord, ...]
    options: Mapping[str, tuple[object, ...]]
    metrics: Mapping[str, tuple[object, ...]]

    def shown_metrics(self) -> list[tuple[str, list[str]]]:
        """Rows of metrics as text. Leaves out metrics that no run has."""
        known = {name: (title, show) for title, (name, show) in METRICS.items()}
        rows = ((*known.get(name, (name, fraction)), values) for name, values in self.metrics.items())
        return [
            (title, [DASH if value is None else show(value) for value in values])
            for title, show, values in rows
            if any(value is not None for value in values)
        ]

    def shown_options(self) -> list[tuple[str, list[str]]]:
        """Rows of options as text."""
        return [(key, [_shown(value) for value in values]) for key, values in self.options.items()]

    def as_csv(self) -> str:
        """One CSV line per run: its name, its differing options, its metrics."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["run", *self.options, *self.metrics])
        for place, name in enumerate(self.names):
            options = (_shown(values[place]) for values in self.options.values())
            metrics = ("" if (value := each[place]) is None else value for each in self.metrics.values())
            writer.writerow([name, *options, *metrics])
        return out.getvalue()


def named_metrics(values: Mapping[str, object]) -> dict[str, object]:
    """``ranking`` and ``custom`` of a label in ``summary.json``. Only some runs have them."""
    parts = (values.get(key) for key in ("ranking", "custom"))
    return {name: value for part in parts if isinstance(part, Mapping) for name, value in part.items()}


def compare(runs: Sequence[Path]) -> RunComparison:
    """Reads runs, finished or not, and compares them.

    Raises:
        ConfigError: fewer than two different runs.
        RunDirectoryError: a directory is not a run directory.
    """
    runs = list(dict.fromkeys(runs))
    if len(runs) < 2:
        raise ConfigError(f"compare: received {len(runs)} run; expected at least two different ones")
    records = tuple(read_run(run) for run in runs)
    settings = [flat(_parsed(record)) for record in records]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = ((key, tuple(each.get(key) for each in settings)) for key in keys if key not in NOT_OPTIONS)
    options = {key: values for key, values in rows if len(set(map(repr, values))) > 1}
    ended = [_ended(record) for record in records]
    names = dict.fromkeys([*dict(METRICS.values()), *(name for values in ended for name in values)])
    metrics = {name: tuple(each.get(name) for each in ended) for name in names}
    return RunComparison(tuple(str(run) for run in runs), records, options, metrics)


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Lists the options that differ between two configurations, as ``data.batch_size 256 → 1024``. Masks secrets."""
    raw = [flat(dict(each)) for each in (before, now)]
    shown = [flat(masked(dict(each))) for each in (before, now)]
    keys = sorted({key for each in raw for key in each if raw[0].get(key) != raw[1].get(key)})
    return [f"{key} {' → '.join(_cut(_shown(each.get(key))) for each in shown)}" for key in keys]


def _ended(record: RunRecord) -> dict[str, object]:
    """The summary of a run. Without one, the latest records of the run."""
    if record.summary is not None:
        first: Mapping[str, Any] = next(iter((record.summary.get("by_label") or {}).values()), {})
        known = {name: record.summary.get(name, first.get(name)) for name, _ in METRICS.values()}
        return named_metrics(first) | known | {"finished": "yes"}
    evaluated = [lines[-1] for split, lines in record.evaluations.items() if split != "progressive"]
    newest: Mapping[str, Any] = max(evaluated, key=lambda line: line["step"], default={})
    last = record.training[-1] if record.training else {}
    return {
        **{name: newest.get(name) for name in ("auc", "gauc", "logloss", "mae", "rmse")},
        **{name: value for name, value in newest.items() if name not in RECORDED},
        "evaluated_on": newest.get("split"),
        "samples_per_s": last.get("samples_per_s"),
        "num_examples": last.get("examples"),
        "steps": last.get("step"),
        "num_rows": last.get("rows"),
        "duration_s": last.get("elapsed_s"),
        "finished": "no summary",
    }


def _parsed(record: RunRecord) -> dict[str, object]:
    """The configuration, with masked secrets. Empty if there is none."""
    try:
        return {} if record.config is None else parse_toml(record.config)
    except (RecursionError, ValueError):
        return {}


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Values by dotted name. Features and tables use their own names, so their order does not matter."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {str(each["name"]): {k: v for k, v in each.items() if k != "name"} or True for each in value}
    if not isinstance(value, dict):
        return {prefix: value}
    values: dict[str, object] = {}
    for key, item in value.items():
        values |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return values


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _shown(value: object) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if is_number(value) else str(value)
