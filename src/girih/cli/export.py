"""``girih export``."""

from __future__ import annotations

from pathlib import Path

import click

from girih.cli import cli
from girih.cli.words import MODEL, PATH
from girih.serving.cached import model_name
from girih.serving.exporting import export
from girih.serving.opening import open_model


@cli.command("export")
@click.argument("run", metavar="RUN|CHECKPOINT", type=click.Path())
@click.option("--out", metavar="DIR", type=PATH, required=True, help="A directory that is missing or empty.")
@click.option("--name", metavar="NAME", help="The model's name for clients. Default: that of the run.")
@MODEL
def export_command(run: str, out: Path, name: str | None, model_class: str | None) -> int:
    """Write a run's final model to a directory that servers need alone."""
    opened = open_model(run, model_class)
    signature = export(opened, out, name or model_name(run), lambda line: click.echo(line, err=True))
    num_bytes = sum(facts["bytes"] for facts in signature.files.values())
    num_rows = sum(rows.num_rows for rows in signature.rows)
    click.echo(
        f"{signature.name}, step {signature.step}: {num_rows:,} rows, {num_bytes / 1e6:,.1f} MB, in {out}"
    )
    return 0
