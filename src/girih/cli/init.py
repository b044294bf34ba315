"""``girih init``."""

from __future__ import annotations

import click

from girih.cli import cli
from girih.data.guessing.config import config_text
from girih.data.guessing.sample import take_sample
from girih.errors import ConfigError


@cli.command()
@click.argument("data", metavar="DATA", nargs=-1, required=True)
@click.option("--label", metavar="COLUMN", help="The column to predict; guessed by default.")
def init(data: tuple[str, ...], label: str | None) -> int:
    """Print a config for some data, guessed from a sample: girih init DATA > config.toml."""
    for path in data:
        if path.endswith(".toml"):
            raise ConfigError(
                f"{path}: received a config file; girih init reads data and prints a config, as in girih init 'train/*.parquet' > config.toml;"
                f" girih check {path} tries this one"
            )
    click.echo(config_text(take_sample(data, label), label), nl=False)
    return 0
