"""``girih evaluate``, and opening a finished run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from girih import checkpoint
from girih.cli import cli
from girih.cli.show import metrics_table, skipped
from girih.cli.words import PATH
from girih.config.file import RunConfig
from girih.config.schedule import ScheduleOptions
from girih.data.options import SplitName
from girih.errors import ConfigError, MissingFileError, RunDirectoryError
from girih.runs.directory import read_summary
from girih.strategies.local import Local
from girih.trainer import Trainer


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, help="Files or globs; the run's test data if left out."
)
def evaluate(run: Path, paths: tuple[str, ...]) -> int:
    """Evaluate a run's final weights."""
    settings = open_config(run)
    split: SplitName = "test" if "test" in settings.data.splits else "valid"
    if not paths and split not in settings.data.splits:
        raise ConfigError(f"{run}: its configuration names no test or valid data; give --data PATH")
    data = settings.dataset(split, paths, shuffle=False)
    with load_trainer(run, settings) as trainer:
        metrics = trainer.evaluate(data)
    shown = ", ".join(paths) or split
    metrics_table(metrics.as_dict(), f"{run} on {shown}")
    skipped(data, shown)
    return 0


def open_config(run: Path) -> RunConfig:
    """Loads the configuration in a run directory.

    Raises:
        MissingFileError: no such directory.
        RunDirectoryError: the directory holds no run.
    """
    if not run.exists():
        raise MissingFileError(f"{run}: no such run directory")
    if not (run / "config.toml").is_file():
        raise RunDirectoryError(f"{run}: not a run directory (it has no config.toml)")
    settings = RunConfig.load(run / "config.toml", strategy=Local.name)  # one process is enough to read
    settings = replace(settings, schedule=ScheduleOptions())  # and has nothing to lay out
    if settings.store.arena == "shared":  # as embedding servers had it
        settings = replace(settings, store=replace(settings.store, arena="heap"))
    return replace(settings, store=settings.store.within(run))


def load_trainer(run: Path, settings: RunConfig) -> Trainer:
    """A trainer with the run's final weights: the best ones, under early stopping; else the latest saved."""
    summary = read_summary(run)
    final = str(run) if summary is None else checkpoint.find(run, step=summary["checkpoint_step"]).url
    if summary is None:
        click.echo(
            f"{run}: not finished; using {checkpoint.find(run).name}, or the best checkpoint", err=True
        )
    trainer = settings.trainer()
    trainer.load(final, resume=False)
    return trainer
