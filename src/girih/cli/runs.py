"""Commands on run directories: ``girih compare``, ``report``, ``scale`` and ``status``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.live import Live

from girih.cli import cli
from girih.cli.show import numbers_table, screen
from girih.cli.words import PATH
from girih.cluster.roles import RoleName
from girih.errors import ConfigError, RunDirectoryError, nearest
from girih.processes.lease import Lease
from girih.report import write_comparison, write_report
from girih.report.comparing import compare as compared
from girih.report.status import RunStatus, status_of, status_screen
from girih.runs import scale_requests
from girih.runs.directory import LOCK, read_summary
from girih.runs.scale_requests import ScaleRequest

EVERY_S = 1.0
UNDER_WAY = ("running", "silent")
LOOK_S = 0.1
BEGINS_S = 120.0
"""Time limit for restarting processes to report, if nothing else shows that their run is active."""
RUNS = click.argument("runs", metavar="RUN...", type=PATH, nargs=-1, required=True)
RUN = click.argument("run", metavar="RUN", type=PATH)


@cli.command()
@RUNS
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


@cli.command()
@RUNS
@click.option("--csv", "as_csv", is_flag=True, help="Print a line per run, separated by commas.")
def compare(runs: tuple[Path, ...], as_csv: bool) -> int:
    """Show runs side by side: options that differ, and metrics."""
    comparison = compared(runs)
    if as_csv:
        click.echo(comparison.as_csv(), nl=False)
        return 0
    differing = comparison.shown_options() or [("no option differs", [""] * len(comparison.names))]
    sections = [("", comparison.names), *differing], comparison.shown_metrics()
    screen().print(numbers_table(*(((key, *cells) for key, cells in section) for section in sections)))
    return 0


@cli.command()
@RUN
@click.option("--watch", is_flag=True, help="Update it each second, until the run is over.")
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
    """Yields the state of a run each second, until the run is over."""
    while True:
        report = status_of(run)
        yield report
        if report["state"] not in UNDER_WAY:
            return
        time.sleep(EVERY_S)


@cli.command()
@RUN
@click.argument("wanted", metavar="ROLE=COUNT...", nargs=-1, required=True)
def scale(run: Path, wanted: tuple[str, ...]) -> int:
    """Add processes to an active run, or remove some."""
    there = set(RoleName) & {process["role"] for process in status_of(run)["processes"]}
    counts = dict(_count(word, there or set(RoleName)) for word in wanted)
    if not _is_on(run):
        if read_summary(run) is not None:
            raise RunDirectoryError(
                f"{run}: this run has ended: there is nothing to scale; to train on, girih train {run}/config.toml"
                f" --run {run} --resume --set train.epochs=N, with more epochs than it had, and other counts by --set"
            )
        raise RunDirectoryError(
            f"{run}: this run is not on; train it with --resume, with other counts by --set"
        )
    request = scale_requests.ask(run, counts)
    click.echo(_summary_line(_outcome(run, request)))
    return 0


def _count(word: str, there: Iterable[str]) -> tuple[str, int]:
    """Parses ``ROLE=COUNT`` to a role and its number of processes. Errors suggest the roles in ``there``."""
    name, _, count = word.partition("=")
    if name not in list(RoleName):
        raise ConfigError(f"{word}: unknown role {name!r}{nearest(name, map(str, there))}")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"{word}: expected ROLE=COUNT with at least one process, as {name}=4")
    return RoleName(name), int(count)


def _outcome(run: Path, request: ScaleRequest) -> dict[str, object]:
    """Waits for the outcome of a request.

    Raises:
        ConfigError: it is refused.
        RunDirectoryError: the run has ended.
    """
    seen_s = time.monotonic()
    while (found := scale_requests.outcome(run, request)) is None:
        if _is_on(run):
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > BEGINS_S or _is_told_over(run):
            if (found := scale_requests.outcome(run, request)) is not None:
                break
            scale_requests.withdraw(run)
            raise RunDirectoryError(
                f"{run}: the run ended before it was scaled; its last checkpoint is whole"
            )
        time.sleep(LOOK_S)
    if "refused" in found:
        raise ConfigError(f"{run}: not scaled: {found['refused']}")
    return found


def _is_on(run: Path) -> bool:
    """Returns whether a process has the run, if this machine can know it."""
    lease = Lease.of_run(run / LOCK)
    request = scale_requests.pending(run)
    keeper = None if request is None else request.keeper
    if lease is None or lease.is_of_this_machine:
        return any(each is not None and each.lives for each in (lease, keeper))
    return status_of(run)["state"] in ("running", "silent")


def _is_told_over(run: Path) -> bool:
    """Returns whether this machine knows that no process has the run, and that none will have it."""
    lease, request = Lease.of_run(run / LOCK), scale_requests.pending(run)
    if lease is None and request is not None and request.begun:
        return request.keeper is not None and request.keeper.is_of_this_machine
    return lease is None or lease.is_of_this_machine


def _summary_line(outcome: Mapping[str, Any]) -> str:
    roles = [f"{name} {before} → {count}" for name, (before, count) in outcome["roles"].items()]
    if all(before == count for before, count in outcome["roles"].values()):
        return f"nothing to do: {', '.join(f'{name} is {count}' for name, (_, count) in outcome['roles'].items())}"
    return (
        f"scaled at step {outcome['step']}: {', '.join(roles)}; training paused for {outcome['paused_s']:.1f} s,"
        f" {outcome['seconds']:.1f} s after the request"
    )
