"""``girih report``."""

from __future__ import annotations

from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.report import write_report


@cli.command()
@click.argument("run", type=PATH)
def report(run: Path) -> int:
    """Draw a run as one self-contained page, report.html."""
    click.echo(write_report(run))
    return 0
