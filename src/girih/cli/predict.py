"""``girih predict``."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from girih.cli import cli
from girih.cli.evaluate import load_trainer, open_config
from girih.data import Batch
from girih.errors import ConfigError


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, required=True, help="Files or globs; repeatable."
)
@click.option("--out", metavar="FILE.parquet", type=click.Path(path_type=Path), required=True)
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
    labels = settings.schema.labels.names
    names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
    for name in keep:
        if name in names or keep.count(name) > 1:
            raise ConfigError(f"--keep {name}: the column would be in the output twice")
    data = settings.dataset("test", paths, shuffle=False, with_labels=False, keep=keep)
    unfinished = out.with_name(f".{out.name}.unfinished")
    num_examples = 0
    try:
        writer = None
        with load_trainer(run, settings) as trainer:
            for batch, probabilities in trainer.predictions(data):
                table = _table(batch, probabilities, names)
                if writer is None:
                    writer = pq.ParquetWriter(unfinished, table.schema)
                writer.write_table(table)
                num_examples += batch.num_examples
        if writer is None:
            raise ConfigError(f"{', '.join(paths)}: no examples to predict")
        writer.close()
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    click.echo(f"{num_examples:,} predictions in {out}")
    if data.num_skipped:
        click.echo(f"{data.num_skipped} bad rows were skipped: they have no prediction", err=True)
    return 0


def _table(batch: Batch, probabilities: np.ndarray, names: list[str]) -> pa.Table:
    columns = (
        {} if batch.kept is None else dict(zip(batch.kept.column_names, batch.kept.columns, strict=True))
    )
    return pa.table(columns | {name: pa.array(probabilities[:, i]) for i, name in enumerate(names)})
