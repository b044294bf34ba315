"""``girih predict``."""

from __future__ import annotations

import os
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from girih.cli import cli
from girih.cli.out import CSV, PARQUET, check_out, write_rows
from girih.cli.show import show_skipped
from girih.cli.words import FORMAT, MODEL, PATH
from girih.data import Batch
from girih.errors import ConfigError
from girih.serving.loaded import load
from girih.serving.opening import open_config


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, required=True, help="Files or globs; repeatable."
)
@FORMAT
@click.option("--out", metavar="FILE", type=PATH, required=True, help="A .parquet or a .csv file.")
@click.option(
    "--keep", "keep", metavar="COLUMN", multiple=True, help="Copy a column of the data; repeatable."
)
@MODEL
def predict(
    run: Path,
    paths: tuple[str, ...],
    form: str | None,
    out: Path,
    keep: tuple[str, ...],
    model_class: str | None,
) -> int:
    """Write a run's predictions for new data, in input order."""
    check_out(out, "predictions", (PARQUET, CSV))
    settings = open_config(run, model_class)
    labels = settings.schema.labels.names
    names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
    for name in keep:
        if name in names or keep.count(name) > 1:
            raise ConfigError(f"--keep {name}: the column would be in the output twice")
    data = settings.dataset("test", paths, format=form, shuffle=False, with_labels=False, keep=keep)
    if any(os.path.realpath(out) == os.path.realpath(address) for address in data.addresses):
        raise ConfigError(f"--out {out}: is one of the files to read; name another")
    with load(run, model=model_class) as model:
        tables = (_table(batch, probabilities, names) for batch, probabilities in model.predictions(data))
        kept = [(name, pa.string()) for name in keep]  # of no rows, whatever their type would be
        empty = pa.schema([*kept, *((name, pa.float32()) for name in names)])
        num_examples = write_rows(out, tables, empty)
    click.echo(f"{num_examples:,} predictions in {out}")
    show_skipped(data, "without a prediction")
    return 0


def _table(batch: Batch, probabilities: np.ndarray, names: list[str]) -> pa.Table:
    columns = (
        {} if batch.kept is None else dict(zip(batch.kept.column_names, batch.kept.columns, strict=True))
    )
    return pa.table(columns | {name: pa.array(probabilities[:, i]) for i, name in enumerate(names)})
