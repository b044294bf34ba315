"""``girih prune``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from girih import config
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.prune import PruneRule
from girih.checkpoint.prune import prune as write_pruned
from girih.cli import cli
from girih.cli.words import PATH
from girih.config.user_code import RECORD
from girih.errors import ConfigError, RunDirectoryError, nearest
from girih.serving.opening import final_weights

_WHOLE = click.IntRange(0)


@cli.command()
@click.argument("run", metavar="RUN|CHECKPOINT", type=click.Path())
@click.option("--out", metavar="DIR", type=PATH, required=True, help="A directory for the smaller run.")
@click.option("--min-count", type=click.IntRange(1), help="Keep rows that training has seen so often.")
@click.option(
    "--max-age", type=_WHOLE,
    help="Keep rows used so many steps ago at most; seconds, in tables whose TTL is in seconds.",
)  # fmt: skip
@click.option(
    "--table",
    "tables",
    metavar="NAME",
    multiple=True,
    help="Prune this table alone; repeatable. Default: all.",
)
def prune(run: str, out: Path, min_count: int | None, max_age: int | None, tables: tuple[str, ...]) -> int:
    """Write a run without the rows seen seldom, or long ago: its final checkpoint and its configuration."""
    if min_count is None and max_age is None:
        raise ConfigError("prune: say which rows stay, by --min-count N, --max-age STEPS, or both")
    place, final = final_weights(run)
    if not final:
        click.echo(f"{run}: not finished; using {place.name}", err=True)
    before = Manifest.read(place)
    for name in tables:
        if name not in before.rows:
            raise ConfigError(f"--table {name}: the run has none of that name{nearest(name, before.rows)}")
    _check_out(out)
    rule = PruneRule(tables=tables or tuple(before.rows), min_count=min_count, max_age=max_age)
    written, after = write_pruned(place, Storage.at(out / "checkpoints"), rule)
    source = Path(run) / "config.toml"
    if source.is_file():
        config.write_toml(out / "config.toml", _without_dir(config.read_toml(source, expanded=False)))
        if (record := source.with_name(RECORD)).is_file():
            shutil.copyfile(record, out / RECORD)
    for name, count in after.rows.items():
        click.echo(f"{name}: {count:,} of {before.rows[name]:,} rows remain")
    click.echo(f"{sum(after.rows.values()):,} of {sum(before.rows.values()):,} rows in {written}")
    return 0


def _check_out(out: Path) -> None:
    """Refuses a directory that holds something."""
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"--out {out}: is a file; name a directory")
    if out.is_dir() and (taken := sorted(os.listdir(out))):
        raise RunDirectoryError(f"--out {out}: not empty (it holds {taken[0]}); name another directory")


def _without_dir(mapping: dict[str, object]) -> dict[str, object]:
    """A configuration whose checkpoints lie in the run directory."""
    if isinstance(options := mapping.get("checkpoint"), dict):
        options.pop("dir", None)
    return mapping
