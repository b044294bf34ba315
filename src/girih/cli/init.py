"""``girih init``."""

from __future__ import annotations

import click

from girih.cli import cli
from girih.data.guessing.config import config_text
from girih.data.guessing.sample import take_sample


@cli.command()
@click.argument("data", metavar="DATA", nargs=-1, required=True)
@click.option("--label", metavar="COLUMN", help="What to predict; guessed where left out.")
def init(data: tuple[str, ...], label: str | None) -> int:
    """Print a config for some data, guessed from a sample: girih init DATA > config.toml."""
    click.echo(config_text(take_sample(data), label), nl=False)
    return 0
