"""Tables for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from girih.data import Dataset
from girih.report.text import count, fraction, short


def results(summary: dict[str, Any], run: Path) -> None:
    """Prints how a run ended and where its files lie."""
    title = f"{summary['model']} · {summary['strategy']} · {run} · on {summary['evaluated_on']} data"
    table = Table()
    for column in ("label", "AUC", "logloss", "calibration"):
        table.add_column(column, justify="left" if column == "label" else "right")
    for label, metrics in summary["by_label"].items():
        table.add_row(label, *(fraction(metrics[name]) for name in ("auc", "logloss", "calibration")))
    console = Console()
    if summary["by_label"]:
        console.print(title, highlight=False, soft_wrap=True)
        console.print(table)
    else:
        console.print("no valid or test data was configured: nothing was evaluated", highlight=False)
    console.print(
        f"{count(summary['num_examples'])} examples in {count(summary['steps'])} steps, "
        f"{short(summary['samples_per_s'])} samples/s, {count(summary['num_rows'])} rows, "
        f"{summary['duration_s']:.1f} s in all",
        highlight=False,
    )
    console.print(f"next: girih report {run}", highlight=False, soft_wrap=True)


def skipped(data: Dataset, what: str) -> None:
    """Prints how many bad rows the last pass over some data dropped, if any."""
    rows = data.skipped
    if rows.count:
        number = f"{count(rows.count)} bad {'row was' if rows.count == 1 else 'rows were'}"
        click.echo(f"{what}: {number} skipped, the first: {rows.first}", err=True)


def metrics_table(metrics: dict[str, dict[str, Any]], title: str) -> None:
    """Prints the metrics of each label."""
    names = ("auc", "gauc", "logloss", "normalized_entropy", "calibration", "num_examples")
    shown = [name for name in names if any(values.get(name) is not None for values in metrics.values())]
    table = Table()
    table.add_column("label")
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for label, values in metrics.items():
        table.add_row(label, *(_shown(name, values[name]) for name in shown))
    console = Console()
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)


def _shown(name: str, value: Any) -> str:
    return count(value) if name == "num_examples" else fraction(value)
