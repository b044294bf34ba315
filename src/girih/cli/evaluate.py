"""``girih evaluate``."""

from __future__ import annotations

from pathlib import Path

import click

from girih.cli import cli
from girih.cli.show import metrics_table, skipped
from girih.cli.words import FORMAT, MODEL, PATH
from girih.config.file import RunConfig
from girih.data.options import SplitName
from girih.errors import ConfigError
from girih.serving.opening import final_weights, open_config
from girih.trainer import Trainer


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, help="Files or globs; the run's test data if left out."
)
@FORMAT
@MODEL
def evaluate(run: Path, paths: tuple[str, ...], form: str | None, model_class: str | None) -> int:
    """Evaluate a run's final weights."""
    settings = open_config(run, model_class, own_metrics=True)
    split: SplitName = "test" if "test" in settings.data.splits else "valid"
    if not paths and split not in settings.data.splits:
        raise ConfigError(f"{run}: its configuration names no test or valid data; give --data PATH")
    if form is not None and not paths:
        raise ConfigError(f"--format {form}: is for the files of --data; give --data PATH too")
    data = settings.dataset(split, paths, format=form, shuffle=False)
    with load_trainer(run, settings) as trainer:
        metrics = trainer.evaluate(data)
    shown = ", ".join(paths) or split
    metrics_table(metrics.as_dict(), f"{run} on {shown}")
    skipped(data, shown)
    return 0


def load_trainer(run: Path, settings: RunConfig) -> Trainer:
    """A trainer with the run's final weights, else its best or latest ones, which is said."""
    place, final = final_weights(run)
    if not final:
        click.echo(f"{run}: not finished; using {place.name}", err=True)
    trainer = settings.trainer()
    trainer.load(place.url, resume=False)
    return trainer
