"""``girih inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from girih import checkpoint
from girih.checkpoint.parts import PartReader
from girih.cli import cli
from girih.report.text import DASH, count, size
from girih.runs.directory import read_summary
from girih.schema import Schema
from girih.store.accounting import disk_bytes, loaded_bytes, row_bytes
from girih.store.snapshot.file import describe_header


@cli.command()
@click.argument("path", metavar="RUN|CHECKPOINT", type=click.Path())
def inspect(path: str) -> int:
    """Show what a run or a checkpoint holds."""
    newest = checkpoint.find(path)
    manifest = checkpoint.Manifest.read(newest)
    schema = Schema.from_dict(manifest.schema, str(newest))
    state = manifest.state["run"]
    summary = read_summary(Path(path)) if Path(path).is_dir() else None
    reader = PartReader(newest, manifest.shards)
    shards = [_shard(reader, name) for name in reader.parts]
    console = Console(highlight=False, markup=False)
    written = f"complete, format {manifest.format}, written by girih {manifest.girih}"
    console.print(f"{newest}: {written}", soft_wrap=True)
    console.print(
        f"step {count(manifest.step)}, {count(state['examples'])} examples, {count(state['epoch'])} epochs done, "
        f"strategy {(manifest.plan or {}).get('strategy', 'unknown')}, schema {manifest.fingerprint}"
    )
    others = [step for step, other in checkpoint.complete(newest.parent) if other != newest]
    if others:
        console.print(f"older checkpoints: {', '.join(map(count, others))}")
    console.print(_tables(schema, manifest.rows))
    groups: dict[str, list[_Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.description["group"], []).append(shard)
    for name, group in groups.items():
        console.print(_bytes(name, group))
    files = _table("files", "file", "bytes")
    for name, facts in manifest.parts.items():
        files.add_row(name, f"{count(facts['bytes'])} ({size(facts['bytes'])})")
    console.print(files)
    if summary is not None:
        console.print(f"finished: AUC {summary.get('auc')}, logloss {summary.get('logloss')}")
    return 0


def _table(title: str, *columns: str) -> Table:
    """An empty table; columns of numbers are aligned on the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in ("dim", "rows", "bytes") else "left")
    return table


class _Shard(NamedTuple):
    description: dict[str, Any]
    num_rows: int
    bloom_bytes: int


def _shard(reader: PartReader, name: str) -> _Shard:
    header = reader.header(name)
    description = describe_header(header, f"{reader.storage}/{name}")
    blooms = sum(tensor.num_bytes for tensor in header.tensors if tensor.name.startswith("bloom."))
    return _Shard(description, description["num_rows"], blooms)


def _tables(schema: Schema, rows: Mapping[str, int]) -> Table:
    shown = _table("tables", "table", "features", "dim", "rows", "dtype", "eviction", "admission")
    for table in schema.tables:
        features = ", ".join(f.name for f in schema.sparse if f.table_name == table.name)
        shown.add_row(
            table.name,
            features,
            str(table.dim),
            count(rows.get(table.name, 0)),
            table.dtype,
            "never" if table.eviction is None else str(table.eviction),
            "always" if table.admission is None else str(table.admission),
        )
    return shown


def _bytes(name: str, shards: list[_Shard]) -> Table:
    """Bytes of a group by part: per row, in the files, and in memory once the files are loaded."""
    description = shards[0].description
    num_rows = sum(shard.num_rows for shard in shards)
    row_on_disk, row_in_memory = disk_bytes(description), row_bytes(description)
    on_disk = {part: taken * num_rows for part, taken in row_on_disk.items()}
    in_memory = dict.fromkeys(("index", *row_in_memory), 0)
    for shard in shards:
        for part, taken in loaded_bytes(description, shard.num_rows).items():
            in_memory[part] += taken
    blooms = sum(shard.bloom_bytes for shard in shards)
    if blooms:
        on_disk["bloom"] = in_memory["bloom"] = blooms
    memory, number = sum(in_memory.values()), f" in {len(shards)} shards" if len(shards) > 1 else ""
    shown = Table(
        title=f"bytes of {name}: {count(num_rows)} rows of {description['dtype']}{number}",
        title_justify="left",
        show_footer=True,
    )
    shown.add_column("part", "all")
    for column, footer in {
        "a row on disk": count(sum(row_on_disk.values())),
        "on disk": count(sum(on_disk.values())),
        "a row in memory": f"{memory / num_rows:.1f}" if num_rows else DASH,
        "in memory": count(memory),
    }.items():
        shown.add_column(column, footer, justify="right")
    for part in {**on_disk, **in_memory}:
        shown.add_row(
            part,
            count(row_on_disk.get(part)),
            count(on_disk.get(part)),
            f"{in_memory[part] / num_rows:.1f}"
            if part == "index" and num_rows
            else count(row_in_memory.get(part)),
            count(in_memory.get(part)),
        )
    return shown
