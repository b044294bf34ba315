"""``girih status``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from girih.cli import cli
from girih.cli.words import PATH
from girih.report.status import status_of
from girih.report.status_table import screen

EVERY_S = 1.0
WIDE = 200
"""Columns where no terminal says how many there are."""


@cli.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option("--watch", is_flag=True, help="Show it anew each second, until the run is over.")
@click.option("--json", "as_json", is_flag=True, help="One object of JSON on a line, for scripts.")
def status(run: Path, watch: bool, as_json: bool) -> int:
    """Show a run's processes: alive or not, load, bottleneck."""
    if as_json:
        while True:
            found = status_of(run)
            click.echo(json.dumps(found))
            if not watch or found["state"] not in ("running", "silent"):
                return 0
            time.sleep(EVERY_S)
    found, console = status_of(run), Console(highlight=False)
    width = console.width if console.is_terminal else WIDE
    if not watch:
        console.print(screen(found, width), width=max(width, console.width), crop=False)
        return 0
    with Live(screen(found, width), console=console, auto_refresh=False) as live:
        while found["state"] in ("running", "silent"):
            time.sleep(EVERY_S)
            found = status_of(run)
            live.update(screen(found, width), refresh=True)
    return 0
