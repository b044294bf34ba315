"""``girih calibrate``: as many trainers as are asked for, or the launcher of them, which imports no torch."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH
from girih.cluster.launch import launch, leave_signals_to_launcher
from girih.cluster.launchers.machines import Launch
from girih.cluster.options import ClusterOptions
from girih.cluster.roles import RoleName
from girih.errors import ConfigError


@cli.command()
@click.option(
    "--trainers", type=click.IntRange(2, 64), default=2, show_default=True, help="Trainers that take part."
)
@click.option(
    "--out", metavar="FILE", type=PATH, default=Path("calibration.json"), show_default=True,
    help="Where the calibration is written.",
)  # fmt: skip
@click.pass_obj
def calibrate(typed: list[str], trainers: int, out: Path) -> int:
    """Measure this machine's links, codecs and the work of steps, for --calibration FILE of girih plan and girih train."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file in a directory that exists")
    if "RANK" not in os.environ:
        command, counts = ["calibrate", *typed], {str(RoleName.TRAINER): trainers}
        never = ClusterOptions(max_restarts=0)  # it keeps nothing to go on from
        return launch(Launch(command=command, again=command, counts=counts, options=never))
    leave_signals_to_launcher()
    _measure(trainers, out)
    return 0


def _measure(trainers: int, out: Path) -> None:
    """One trainer's part; the first one's writes and shows what was found."""
    from girih.cli.info import processor
    from girih.cli.show import codecs_table, links_table, work_table
    from girih.cluster.cluster import Cluster
    from girih.planner.calibration import Calibration
    from girih.runs.calibration import measure_links
    from girih.runs.codec_speeds import measure_codecs
    from girih.runs.files import write_whole
    from girih.training.step_time import measure_work

    with Cluster.join(trainers).running() as cluster:
        ranks = cluster.ranks
        work = measure_work(ranks)
        codecs = measure_codecs(ranks)
        links = measure_links(ranks, host=cluster.host(RoleName.TRAINER, ranks.rank), secret=cluster.secret)
    if links is None:
        return
    cores = len(os.sched_getaffinity(0))
    machine = {
        "processor": processor(),
        "cores": cores,
        **{name: version(name) for name in ("girih", "torch")},
    }
    found = Calibration(trainers=trainers, machine=machine, links=links, codecs=codecs, work=work)
    write_whole(out, json.dumps(found.to_dict(), indent=1) + "\n")
    links_table(found)
    codecs_table(found)
    work_table(work)
    if trainers > cores:
        click.echo(
            f"{trainers} trainers shared {cores} cores: times include waiting for a core, which trainers with cores of"
            " their own do not"
        )
    click.echo(f"{out}; next: girih plan CONFIG.toml --calibration {out}, or girih train with the same")
