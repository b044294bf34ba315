"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from girih.data import Dataset
from girih.report.text import count, fraction, short

TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "logloss": "logloss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "num_examples": "num examples",
}


def results(summary: dict[str, Any], run: Path) -> None:
    """Prints how a run ended and where its files lie."""
    console = Console(highlight=False)
    if summary["by_label"]:
        title = f"{summary['model']} · {summary['strategy']} · {run} · on {summary['evaluated_on']} data"
        metrics_table(summary["by_label"], title, ("auc", "logloss", "calibration"))
    else:
        console.print("no valid or test data was configured: nothing was evaluated")
    compiling = f", {summary['compile_s']:.1f} s of them compiling kernels" if summary["compile_s"] else ""
    console.print(
        f"{count(summary['num_examples'])} examples in {count(summary['steps'])} steps, "
        f"{short(summary['samples_per_s'])} samples/s, {count(summary['num_rows'])} rows, "
        f"{summary['duration_s']:.1f} s in all{compiling}"
    )
    console.print(f"next: girih report {run}", soft_wrap=True)


def skipped(data: Dataset, what: str) -> None:
    """Prints the number of bad rows that the last pass over the data dropped, if any."""
    rows = data.skipped
    if rows.count:
        number = f"{count(rows.count)} bad {'row was' if rows.count == 1 else 'rows were'}"
        click.echo(f"{what}: {number} skipped, the first: {rows.first}", err=True)


def metrics_table(metrics: dict[str, dict[str, Any]], title: str, names: Iterable[str] = TITLES) -> None:
    """Prints some metrics of each label, those that at least one label has."""
    shown = [name for name in names if any(values.get(name) is not None for values in metrics.values())]
    table = Table("label")
    for name in shown:
        table.add_column(TITLES[name], justify="right")
    for label, values in metrics.items():
        table.add_row(
            label, *((count if name == "num_examples" else fraction)(values[name]) for name in shown)
        )
    console = Console()
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
