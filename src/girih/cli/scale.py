"""``girih scale``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.cluster.roles import RoleName
from girih.errors import ConfigError, RunDirectoryError, nearest
from girih.processes.lease import Lease
from girih.report.status import status_of
from girih.runs import scale_requests
from girih.runs.directory import LOCK, read_summary
from girih.runs.scale_requests import ScaleRequest

LOOK_S = 0.1
BEGINS_S = 120.0
"""Processes that begin anew may take so long to show themselves, where nothing else tells that their run is on."""


@cli.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.argument("wanted", metavar="ROLE=COUNT...", nargs=-1, required=True)
def scale(run: Path, wanted: tuple[str, ...]) -> int:
    """Add processes to a run that is on, or remove some."""
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
    """A role and its processes, of ``ROLE=COUNT``; ``there`` are roles to name where it is none."""
    name, _, count = word.partition("=")
    if name not in list(RoleName):
        raise ConfigError(f"{word}: unknown role {name!r}{nearest(name, map(str, there))}")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"{word}: expected ROLE=COUNT with at least one process, as {name}=4")
    return RoleName(name), int(count)


def _outcome(run: Path, request: ScaleRequest) -> dict[str, object]:
    """Waits for what becomes of a request.

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
    """Whether a process has the run, as far as this machine can tell."""
    lease = Lease.of_run(run / LOCK)
    request = scale_requests.pending(run)
    keeper = None if request is None else request.keeper
    if lease is None or lease.is_of_this_machine:
        return any(each is not None and each.lives for each in (lease, keeper))
    return status_of(run)["state"] in ("running", "silent")


def _is_told_over(run: Path) -> bool:
    """Whether this machine knows that no process has the run, nor will have."""
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
        f" {outcome['seconds']:.1f} s after it was asked for"
    )
