"""``girih status``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.live import Live

from girih.cli import cli
from girih.cli.show import screen
from girih.cli.words import PATH
from girih.report.status import RunStatus, status_of, status_screen

EVERY_S = 1.0
UNDER_WAY = ("running", "silent")


@cli.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option("--watch", is_flag=True, help="Show it anew each second, until the run is over.")
@click.option("--json", "as_json", is_flag=True, help="One object of JSON on a line, for scripts.")
def status(run: Path, watch: bool, as_json: bool) -> int:
    """Show a run's processes: alive or not, load, bottleneck."""
    console = screen()

    def show(report: RunStatus) -> None:
        if as_json:
            click.echo(json.dumps(report))
        else:
            console.print(status_screen(report, console.width), crop=False)

    report = status_of(run)
    if not watch or report["state"] not in UNDER_WAY:
        show(report)
    elif as_json or not console.is_terminal:
        for report in _until_over(run):
            show(report)
    else:
        with Live(status_screen(report, console.width), console=console, auto_refresh=False) as live:
            for report in _until_over(run):
                live.update(status_screen(report, console.width), refresh=True)
    return 0


def _until_over(run: Path) -> Iterator[RunStatus]:
    """The state of a run each second, until the run is over."""
    while True:
        report = status_of(run)
        yield report
        if report["state"] not in UNDER_WAY:
            return
        time.sleep(EVERY_S)
