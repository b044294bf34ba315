"""``girih published``."""

from __future__ import annotations

import time

import click

from girih.cli import cli
from girih.cli.show import mixed_table, screen
from girih.errors import ConfigError, GirihError, MissingFileError
from girih.publishing.log import Log, describe_numbers, find_log
from girih.report.text import count, size


@cli.command()
@click.argument("address", metavar="RUN|ADDRESS", type=click.Path())
@click.option(
    "--back-to", "back_to", metavar="NUMBER", type=int, help="Have servers go to a version and stay there."
)
@click.option("--newest", is_flag=True, help="Have servers follow the newest version again.")
def published(address: str, back_to: int | None, newest: bool) -> int:
    """Show what a run published, and have servers go back to a version."""
    if back_to is not None and newest:
        raise ConfigError("--back-to and --newest: expected one of them")
    log = find_log(address)
    if back_to is not None:
        log.go_back_to(back_to)
        click.echo(
            f"{log.root}: servers go to version {back_to} and stay there until: girih published {address} --newest"
        )
    elif newest:
        log.go_on()
        click.echo(f"{log.root}: servers follow the newest version")
    else:
        _show(log)
    return 0


def _show(log: Log) -> None:
    head = log.head()
    if head is None:
        raise MissingFileError(f"{log.root}: nothing was published there")
    console, versions, pin = screen(), log.versions(), log.pin()
    ago = time.time() - head.newest.time
    console.print(
        f"{log.root}: newest version {head.newest.number}, of step {count(head.newest.step)}, {ago:,.0f} s old; newest snapshot"
        f" {head.snapshot.number}; run {head.run}, epoch {head.epoch}",
        soft_wrap=True,
    )
    if pin is not None:
        console.print(
            f"servers stay at version {pin}, until: girih published {log.root} --newest", soft_wrap=True
        )
    console.print(f"available versions: {describe_numbers(versions)}", soft_wrap=True)
    table = mixed_table("newest versions", "version", "kind", "step", "rows", "left", "bytes")
    for number in versions[-8:]:
        for whole in (False, True):
            try:
                manifest = log.read(number, whole=whole)
            except MissingFileError:
                continue
            except GirihError as error:
                console.print(str(error), soft_wrap=True)
                continue
            parts = manifest.shards.values()
            rows, left = sum(sum(p["tables"].values()) for p in parts), sum(p["left"] for p in parts)
            num_bytes = sum(part["bytes"] for part in manifest.parts.values())
            table.add_row(
                str(number), manifest.kind, count(manifest.step), count(rows), count(left), size(num_bytes)
            )
    console.print(table)
