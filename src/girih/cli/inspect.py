"""``girih inspect``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import click
from rich.table import Table

from girih import checkpoint
from girih.checkpoint.parts import PartReader
from girih.cli import cli
from girih.cli.show import mixed_table, screen
from girih.report.text import DASH, count, fraction, size
from girih.runs.directory import read_summary
from girih.schema import Schema
from girih.store.accounting import disk_bytes, loaded_bytes, row_bytes
from girih.store.snapshot.file import describe_header
from girih.store.spec import Description


@cli.command()
@click.argument("path", metavar="RUN|CHECKPOINT", type=click.Path())
def inspect(path: str) -> int:
    """Show what a run or a checkpoint holds."""
    newest = checkpoint.find(path)
    manifest = checkpoint.Manifest.read(newest)
    schema = Schema.from_dict(manifest.schema, str(newest))
    state = manifest.run
    summary = read_summary(Path(path)) if Path(path).is_dir() else None
    reader = PartReader(newest, manifest.shards)
    groups: dict[str, list[Description]] = {}  # descriptions of the shards of each group
    bloom_bytes: Counter[str] = Counter()
    for name in reader.parts:
        header = reader.header(name)
        description = describe_header(header, f"{newest}/{name}")
        groups.setdefault(description["group"], []).append(description)
        blooms = (tensor for tensor in header.tensors if tensor.name.startswith("bloom."))
        bloom_bytes[description["group"]] += sum(tensor.num_bytes for tensor in blooms)
    console = screen()
    complete = "complete, the final weights of its run" if manifest.final else "complete"
    written = f"{complete}, format {manifest.format}, written by girih {manifest.girih}"
    console.print(f"{newest}: {written}", soft_wrap=True)
    console.print(
        f"step {count(manifest.step)}, {count(state.examples)} examples, {count(state.epoch)} epochs done, "
        f"strategy {(manifest.plan or {}).get('strategy', 'unknown')}, schema {manifest.fingerprint}"
    )
    others = [step for step, other in checkpoint.complete(newest.parent) if other != newest]
    if others:
        console.print(f"older checkpoints: of step {', '.join(map(count, others))}")
    console.print(_tables(schema, manifest.rows))
    for name, shards in groups.items():
        console.print(_bytes(name, shards, bloom_bytes[name]))
    files = mixed_table("files", "file", "bytes")
    for name, facts in manifest.parts.items():
        files.add_row(name, f"{count(facts['bytes'])} ({size(facts['bytes'])})")
    console.print(files)
    if summary is not None:
        console.print(
            f"finished: AUC {fraction(summary.get('auc'))}, logloss {fraction(summary.get('logloss'))}"
        )
    return 0


def _tables(schema: Schema, rows: Mapping[str, int]) -> Table:
    features: defaultdict[str, list[str]] = defaultdict(list)
    for feature in schema.sparse:
        features[feature.table_name].append(feature.name)
    shown = mixed_table("tables", "table", "features", "dim", "rows", "dtype", "eviction", "admission")
    for table in schema.tables:
        shown.add_row(
            table.name,
            ", ".join(features[table.name]),
            str(table.dim),
            count(rows.get(table.name, 0)),
            table.dtype,
            "never" if table.eviction is None else str(table.eviction),
            "always" if table.admission is None else str(table.admission),
        )
    return shown


def _bytes(name: str, shards: list[Description], bloom_bytes: int) -> Table:
    """Returns a table of the bytes of a group by part: per row, in the files, and in memory after loading."""
    num_rows = sum(shard["num_rows"] for shard in shards)
    row_on_disk, row_in_memory = disk_bytes(shards[0]), row_bytes(shards[0])
    on_disk = Counter({part: taken * num_rows for part, taken in row_on_disk.items()})
    in_memory: Counter[str] = Counter()
    for shard in shards:
        in_memory.update(loaded_bytes(shard, shard["num_rows"]))
    if bloom_bytes:
        on_disk["bloom"] = in_memory["bloom"] = bloom_bytes
    each_in_memory = {part: count(taken) for part, taken in row_in_memory.items()}
    each_row = DASH
    if num_rows:
        each_in_memory["index"] = f"{in_memory['index'] / num_rows:.1f}"
        each_row = f"{in_memory.total() / num_rows:.1f}"
    number = f" in {len(shards)} shards" if len(shards) > 1 else ""
    title = f"bytes of {name}: {count(num_rows)} rows of {shards[0]['dtype']}{number}"
    shown = Table(title=title, title_justify="left", show_footer=True)
    shown.add_column("part", "all")
    shown.add_column("a row on disk", count(sum(row_on_disk.values())), justify="right")
    shown.add_column("on disk", count(on_disk.total()), justify="right")
    shown.add_column("a row in memory", each_row, justify="right")
    shown.add_column("in memory", count(in_memory.total()), justify="right")
    for part in {**on_disk, **in_memory}:
        each_on_disk, each = count(row_on_disk.get(part)), each_in_memory.get(part, DASH)
        shown.add_row(part, each_on_disk, count(on_disk.get(part)), each, count(in_memory.get(part)))
    return shown
