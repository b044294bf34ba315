"""``girih report``."""

from __future__ import annotations

from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.report import write_comparison, write_report


@cli.command()
@click.argument("runs", metavar="RUN...", type=PATH, nargs=-1, required=True)
@click.option(
    "--out", metavar="FILE.html", type=PATH, default=Path("comparison.html"), show_default=True,
    help="The page with the curves of several runs.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path) -> int:
    """Draw a self-contained page per run, and one of several: report.html in each, and their curves over each other."""
    runs = tuple(dict.fromkeys(runs))
    for run in runs:
        click.echo(write_report(run))
    if len(runs) > 1:
        click.echo(write_comparison(runs, out))
    return 0
