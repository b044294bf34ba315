"""``girih report``."""

from __future__ import annotations

from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.report import write_report


@cli.command()
@click.argument("runs", metavar="RUN...", type=PATH, nargs=-1, required=True)
def report(runs: tuple[Path, ...]) -> int:
    """Draw each run as one self-contained page, report.html."""
    for run in runs:
        click.echo(write_report(run))
    return 0
