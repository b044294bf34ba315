"""``girih plan``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import PATH, config_options
from girih.config.file import RunConfig
from girih.report.text import size
from girih.runs.files import write_whole
from girih.strategies import measures_of


@cli.command()
@config_options
@click.option("--out", metavar="FILE", type=PATH, help="Write the plan there instead.")
def plan(config_file: Path, overrides: tuple[str, ...], strategy: str | None, out: Path | None) -> int:
    """Print the plan of a run as JSON, for girih train --plan FILE; a summary goes to standard error."""
    settings = RunConfig.load(config_file, overrides=overrides, strategy=strategy)
    decided = settings.planned()
    text = json.dumps(decided.to_dict(), indent=1)
    if out is None:
        click.echo(text)
    else:
        write_whole(out, text + "\n")
    roles = ", ".join(f"{count} × {role}" for role, count in decided.roles.items())
    click.echo(f"{decided.strategy}: {roles}", err=True)
    sent = decided.predicted.get("bytes", {})
    if total := decided.predicted.get("bytes_per_step"):
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in sent.items() if count)
        click.echo(f"a trainer and its servers send {size(total)} per step: {kinds}", err=True)
    if "speeds" in measures_of(settings.strategy) and "speeds" not in decided.measured:
        click.echo(
            "link and processor speeds are measured when a run starts, and may change what is automatic here;"
            " girih train --plan holds this plan as it is",
            err=True,
        )
    return 0
