"""``girih predict``."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from girih.cli import cli
from girih.cli.evaluate import load_trainer, open_config
from girih.cli.show import skipped
from girih.cli.words import PATH
from girih.data import Batch
from girih.errors import ConfigError, GirihError
from girih.runs.files import disk_full


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, required=True, help="Files or globs; repeatable."
)
@click.option("--out", metavar="FILE.parquet", type=PATH, required=True)
@click.option(
    "--keep", "keep", metavar="COLUMN", multiple=True, help="Copy a column of the data; repeatable."
)
def predict(run: Path, paths: tuple[str, ...], out: Path, keep: tuple[str, ...]) -> int:
    """Write a run's predictions for new data, in input order."""
    settings = open_config(run)
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a directory; name a Parquet file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.parent} does not exist; create it first")
    if out.suffix in (".csv", ".tsv", ".txt", ".json", ".gz"):
        raise ConfigError(f"--out {out}: predictions are written as Parquet; name it {out.stem}.parquet")
    labels = settings.schema.labels.names
    names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
    for name in keep:
        if name in names or keep.count(name) > 1:
            raise ConfigError(f"--keep {name}: the column would be in the output twice")
    data = settings.dataset("test", paths, shuffle=False, with_labels=False, keep=keep)
    if any(os.path.realpath(out) == os.path.realpath(address) for address in data.addresses):
        raise ConfigError(f"--out {out}: is one of the files to read; name another")
    unfinished = out.with_name(f".{out.name}.unfinished")
    with load_trainer(run, settings) as trainer:
        tables = (_table(batch, probabilities, names) for batch, probabilities in trainer.predictions(data))
        try:
            num_examples = _write(tables, unfinished)
            unfinished.replace(out)
        except OSError as error:
            if isinstance(error, GirihError):
                raise
            told = os.strerror(error.errno) if error.errno else error
            refused = ConfigError(f"--out {out}: cannot be written ({told}); name another file")
            raise disk_full(error, f"--out {out}") or refused from None
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    click.echo(f"{num_examples:,} predictions in {out}")
    skipped(data, "without a prediction")
    return 0


def _write(tables: Iterator[pa.Table], path: Path) -> int:
    """Writes the tables to one file and returns the number of their rows."""
    first, num_rows = next(tables), 0
    with pq.ParquetWriter(path, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)
            num_rows += table.num_rows
    return num_rows


def _table(batch: Batch, probabilities: np.ndarray, names: list[str]) -> pa.Table:
    columns = (
        {} if batch.kept is None else dict(zip(batch.kept.column_names, batch.kept.columns, strict=True))
    )
    return pa.table(columns | {name: pa.array(probabilities[:, i]) for i, name in enumerate(names)})
