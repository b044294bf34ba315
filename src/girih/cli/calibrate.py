"""``girih calibrate``: one of its trainers, or their launcher, which imports no torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.cluster.launch import launch, leave_signals_to_launcher
from girih.cluster.launchers.launcher import Launch
from girih.cluster.options import ClusterOptions
from girih.cluster.roles import RoleName
from girih.errors import ConfigError
from girih.version import __version__

PARTS, PROBES = "parts.json", "probes.json"
"""Files of an unfinished calibration: measurements of the parts of steps, and the short runs that follow."""


@cli.command()
@click.option(
    "--trainers", type=click.IntRange(2, 64), default=2, show_default=True, help="Trainers that take part."
)
@click.option(
    "--out", metavar="FILE", type=PATH, default=Path("calibration.json"), show_default=True,
    help="Where the calibration is written.",
)  # fmt: skip
@click.option("--probe", nargs=2, type=(str, PATH), hidden=True, help="Train one way for a moment.")
@click.pass_obj
def calibrate(typed: list[str], trainers: int, out: Path, probe: tuple[str, Path] | None) -> int:
    """Measure this machine's links, codecs and the work of steps, for --calibration FILE of girih plan and girih train."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file in a directory that exists")
    if "RANK" not in os.environ:
        return _launch(typed, trainers, out)
    leave_signals_to_launcher()
    if probe is not None:
        _observe(trainers, *probe)
    else:
        _measure(trainers, out)
    return 0


def _launch(typed: list[str], trainers: int, out: Path) -> int:
    """Starts trainers that measure the parts of steps, then short runs of each strategy.

    Writes and shows the calibration.
    """
    from girih.cli.show import calibration_tables
    from girih.files.whole import write_whole
    from girih.planner.calibration import Calibration, Overhead
    from girih.planner.steps.basis import Observed, fit_overhead

    with tempfile.TemporaryDirectory(prefix="girih-calibrate-") as directory:
        folder = Path(directory)
        parts = folder / PARTS
        words = ["calibrate", *typed, "--out", str(parts)]
        if status := _run(words, {RoleName.TRAINER: trainers}):
            return status
        counts: dict[str, dict[str, int]] = json.loads((folder / PROBES).read_text())
        overheads: dict[str, Overhead] = {}
        ways = counts if sys.platform == "linux" else ()  # only Linux reports the CPU time of other processes
        for way in ways:
            click.echo(f"a short run: {way}", err=True)
            seen = folder / "seen.json"
            words = ["calibrate", "--trainers", str(trainers), "--out", str(seen)]
            words += ["--probe", way, str(folder)]
            if status := _run(words, counts[way]):
                return status
            overheads[way] = fit_overhead(*(Observed(**each) for each in json.loads(seen.read_text())))
        calibration = replace(Calibration.read(parts), overheads=overheads)
    write_whole(out, json.dumps(calibration.to_dict(), indent=1) + "\n")
    calibration_tables(calibration)
    if trainers > calibration.cores:
        click.echo(
            f"{trainers} trainers shared {calibration.cores} cores: times include waiting for a core, which trainers with their own"
            " cores do not"
        )
    click.echo(f"{out}; next: girih plan CONFIG.toml --calibration {out}, or girih train with the same")
    return 0


def _run(words: Sequence[str], counts: Mapping[str, int]) -> int:
    """Runs processes to their end. A killed process is not restarted, because it has no checkpoint."""
    return launch(Launch(command=words, again=words, counts=counts, options=ClusterOptions(max_restarts=0)))


def _observe(trainers: int, way: str, folder: Path) -> None:
    """Does one trainer's part of a short run. The first trainer writes the observations."""
    from girih.app.machine import observe, ways
    from girih.cluster.cluster import Cluster
    from girih.files.whole import write_whole
    from girih.planner.calibration import Calibration

    strategy = ways(trainers)[way]
    cluster = Cluster() if strategy.capabilities.standalone else Cluster.join(strategy.trainers)
    with cluster.running():
        found = observe(strategy, Calibration.read(folder / PARTS), folder, cluster)
        if found is not None:
            write_whole(folder / "seen.json", json.dumps([asdict(each) for each in found]))


def _measure(trainers: int, out: Path) -> None:
    """Does one trainer's part of measuring links, codecs and work.

    The first trainer writes the measurements, and the short runs that follow.
    """
    from girih.app.machine import measure_codecs, measure_links, measure_work, ways, write_data
    from girih.cli.info import processor
    from girih.cluster.cluster import Cluster
    from girih.files.whole import write_whole
    from girih.planner.calibration import Calibration

    with Cluster.join(trainers).running() as cluster:
        ranks = cluster.ranks
        work = measure_work(ranks)
        codecs = measure_codecs(ranks)
        links = measure_links(ranks, host=cluster.host(RoleName.TRAINER, ranks.rank), secret=cluster.secret)
    if links is None:
        return
    machine = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "girih": __version__,
        "torch": version("torch"),
    }
    found = Calibration(trainers=trainers, machine=machine, links=links, codecs=codecs, work=work)
    write_whole(out, json.dumps(found.to_dict()))
    counts = {
        way: {"trainer": strategy.trainers, **strategy.roles} for way, strategy in ways(trainers).items()
    }
    write_data(out.parent, trainers)
    write_whole(out.parent / PROBES, json.dumps(counts))
