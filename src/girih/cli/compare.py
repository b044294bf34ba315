"""``girih compare``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from girih.cli import cli
from girih.cli.show import screen
from girih.cli.words import PATH
from girih.report.comparing import RunComparison
from girih.report.comparing import compare as compared


@cli.command()
@click.argument("runs", metavar="RUN...", type=PATH, nargs=-1, required=True)
@click.option("--csv", "as_csv", is_flag=True, help="Print a line per run, separated by commas.")
def compare(runs: tuple[Path, ...], as_csv: bool) -> int:
    """Show runs side by side: options that differ, and metrics."""
    found = compared(runs)
    if as_csv:
        click.echo(found.as_csv(), nl=False)
        return 0
    _print(found)
    return 0


def _print(comparison: RunComparison) -> None:
    table = Table()
    table.add_column("", overflow="fold")
    for name in comparison.names:
        table.add_column(name, justify="right", overflow="fold")
    for key, cells in comparison.shown_options() or [("no option differs", [""] * len(comparison.names))]:
        table.add_row(key, *cells)
    table.add_section()
    for key, cells in comparison.shown_metrics():
        table.add_row(key, *cells)
    screen().print(table)
