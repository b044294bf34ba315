"""``girih inspect``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from girih import checkpoint
from girih.cli import cli
from girih.report.text import count, size
from girih.rundir import read_summary
from girih.schema import Schema


@cli.command()
@click.argument("path", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
def inspect(path: Path) -> int:
    """Show what a run or a checkpoint holds."""
    newest = checkpoint.find(path)
    manifest = checkpoint.Manifest.read(newest)
    schema = Schema.from_dict(manifest.schema, str(newest))
    state = manifest.state["run"]
    summary = read_summary(path) if path.is_dir() else None
    console = Console(highlight=False, markup=False)
    written = f"complete, format {manifest.format}, written by girih {manifest.girih}"
    console.print(f"{newest}: {written}", soft_wrap=True)
    console.print(
        f"step {count(manifest.step)}, {count(state['examples'])} examples, {count(state['epoch'])} epochs done, "
        f"strategy {manifest.state['strategy']}, schema {manifest.fingerprint}"
    )
    others = [step for step, other in checkpoint.complete(newest.parent) if other != newest]
    if others:
        console.print(f"older checkpoints: {', '.join(map(count, others))}")
    tables = Table(title="tables", title_justify="left")
    for column in ("table", "features", "dim", "rows", "dtype", "eviction", "admission"):
        tables.add_column(column, justify="right" if column in ("dim", "rows") else "left")
    for table in schema.tables:
        features = ", ".join(f.name for f in schema.sparse if f.table_name == table.name)
        tables.add_row(
            table.name,
            features,
            str(table.dim),
            count(manifest.rows.get(table.name, 0)),
            table.dtype,
            "never" if table.eviction is None else str(table.eviction),
            "always" if table.admission is None else str(table.admission),
        )
    console.print(tables)
    files = Table(title="files", title_justify="left")
    files.add_column("file")
    files.add_column("bytes", justify="right")
    for name, facts in manifest.files.items():
        files.add_row(name, f"{count(facts['bytes'])} ({size(facts['bytes'])})")
    console.print(files)
    if summary is not None:
        console.print(f"finished: AUC {summary.get('auc')}, logloss {summary.get('logloss')}")
    return 0
