"""Commands on the final model of a run: ``girih evaluate``, ``export``, ``export-embeddings``, ``predict`` and ``prune``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from girih import config
from girih.app.run_config import RunConfig
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.prune import PruneRule
from girih.checkpoint.prune import prune as write_pruned
from girih.cli import cli, note
from girih.cli.out import CSV, PARQUET, check_out, write_rows
from girih.cli.show import metrics_table, show_skipped
from girih.cli.words import FORMAT, MODEL, PATH, RUN_OR_CHECKPOINT
from girih.config.user_code import RECORD
from girih.data import Batch
from girih.data.options import SplitName
from girih.errors import ConfigError, RunDirectoryError, nearest
from girih.serving.cached import model_name
from girih.serving.exporting import export
from girih.serving.loaded import TableRows, has_embeddings, load, table_chunks
from girih.serving.opening import final_weights, open_config, open_model
from girih.serving.signature import outputs_of
from girih.trainer import Trainer

RUN = click.argument("run", type=PATH)


def final_checkpoint(run: str | Path) -> Storage:
    """Returns the checkpoint with the final weights of a run, or its best or latest checkpoint with a message."""
    place, final = final_weights(run)
    if not final:
        note(f"{run}: not finished; using {place.name}")
    return place


@cli.command()
@RUN
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, help="Files or globs; the run's test data if left out."
)
@FORMAT
@MODEL
def evaluate(run: Path, paths: tuple[str, ...], form: str | None, model_class: str | None) -> int:
    """Evaluate a run's final weights."""
    settings = open_config(run, model_class, own_metrics=True)
    split: SplitName = "test" if "test" in settings.data.splits else "valid"
    if not paths and split not in settings.data.splits:
        raise ConfigError(f"{run}: its configuration names no test or valid data; give --data PATH")
    if form is not None and not paths:
        raise ConfigError(f"--format {form}: is for the files of --data; give --data PATH too")
    data = settings.dataset(split, paths, format=form, shuffle=False)
    with load_trainer(run, settings) as trainer:
        metrics = trainer.evaluate(data)
    shown = ", ".join(paths) or split
    metrics_table(metrics.as_dict(), f"{run} on {shown}")
    show_skipped(data, shown)
    return 0


def load_trainer(run: Path, settings: RunConfig) -> Trainer:
    """Makes a trainer with the final weights of a run."""
    place, trainer = final_checkpoint(run), settings.trainer()
    trainer.load(place.url, resume=False)
    return trainer


@cli.command()
@RUN
@click.option(
    "--data", "paths", metavar="PATH", multiple=True, required=True, help="Files or globs; repeatable."
)
@FORMAT
@click.option("--out", metavar="FILE", type=PATH, required=True, help="A .parquet or a .csv file.")
@click.option("--keep", metavar="COLUMN", multiple=True, help="Copy a column of the data; repeatable.")
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
    names = [output.name for output in outputs_of(settings.schema)]
    for name in keep:
        if name in names or keep.count(name) > 1:
            raise ConfigError(f"--keep {name}: the column would be in the output twice")
    data = settings.dataset("test", paths, format=form, shuffle=False, with_labels=False, keep=keep)
    if any(os.path.realpath(out) == os.path.realpath(address) for address in data.addresses):
        raise ConfigError(f"--out {out}: is one of the files to read; name another")
    with load(run, model=model_class) as model:
        tables = (_predicted(batch, probabilities, names) for batch, probabilities in model.predictions(data))
        kept = [(name, pa.string()) for name in keep]  # without rows, of any type
        empty = pa.schema([*kept, *((name, pa.float32()) for name in names)])
        num_examples = write_rows(out, tables, empty)
    click.echo(f"{num_examples:,} predictions in {out}")
    show_skipped(data, "without a prediction")
    return 0


def _predicted(batch: Batch, probabilities: np.ndarray, names: list[str]) -> pa.Table:
    kept = batch.kept
    columns = {} if kept is None else dict(zip(kept.column_names, kept.columns, strict=True))
    return pa.table(columns | {name: pa.array(probabilities[:, i]) for i, name in enumerate(names)})


@cli.command("export")
@RUN_OR_CHECKPOINT
@click.option("--out", metavar="DIR", type=PATH, required=True, help="A directory that is missing or empty.")
@click.option("--name", metavar="NAME", help="The model's name for clients. Default: that of the run.")
@MODEL
def export_command(run: str, out: Path, name: str | None, model_class: str | None) -> int:
    """Write a run's final model to a self-contained directory for servers."""
    opened = open_model(run, model_class)
    signature = export(opened, out, name or model_name(run), note)
    num_bytes = sum(file.bytes for file in signature.files)
    num_rows = sum(file.rows for files in signature.rows for file in files)
    click.echo(
        f"{signature.name}, step {signature.step}: {num_rows:,} rows, {num_bytes / 1e6:,.1f} MB, in {out}"
    )
    return 0


@cli.command("export-embeddings")
@RUN_OR_CHECKPOINT
@click.option("--table", metavar="NAME", required=True, help="The table whose rows are written.")
@click.option("--out", metavar="FILE.parquet", type=PATH, required=True)
def export_embeddings(run: str, table: str, out: Path) -> int:
    """Write the rows of a table to Parquet: id, embedding, count."""
    check_out(out, "embeddings", (PARQUET,))
    place = final_checkpoint(run)
    manifest = Manifest.read(place)
    dims = {each["name"]: int(each["dim"]) for each in manifest.schema["tables"]}
    _check_table(table, dims)
    if not has_embeddings(place, manifest, table):
        raise ConfigError(f"--table {table}: the run's model reads no embedding of it; name another table")
    vectors = pa.list_(pa.float32(), dims[table])
    schema = pa.schema([("id", pa.int64()), ("embedding", vectors), ("count", pa.int64())])
    tables = (_embeddings(rows, schema) for rows in table_chunks(place, manifest, table))
    num_rows = write_rows(out, tables, schema)
    click.echo(f"{num_rows:,} embeddings of {table} in {out}")
    return 0


def _embeddings(rows: TableRows, schema: pa.Schema) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.rows.reshape(-1)), rows.rows.shape[1])
    return pa.table([pa.array(rows.ids), vectors, pa.array(rows.counts)], schema=schema)


@cli.command()
@RUN_OR_CHECKPOINT
@click.option("--out", metavar="DIR", type=PATH, required=True, help="A directory for the smaller run.")
@click.option("--min-count", type=click.IntRange(1), help="Keep rows seen at least this often.")
@click.option(
    "--max-age", type=click.IntRange(0),
    help="Keep rows used at most this many steps ago; seconds, in tables whose TTL is in seconds.",
)  # fmt: skip
@click.option(
    "--table", "tables", metavar="NAME", multiple=True,
    help="Prune only this table; repeatable. Default: all.",
)  # fmt: skip
def prune(run: str, out: Path, min_count: int | None, max_age: int | None, tables: tuple[str, ...]) -> int:
    """Write a run without the rows seen seldom, or long ago: its final checkpoint and its configuration."""
    if min_count is None and max_age is None:
        raise ConfigError("prune: say which rows stay, by --min-count N, --max-age STEPS, or both")
    place = final_checkpoint(run)
    before = Manifest.read(place)
    for name in tables:
        _check_table(name, before.rows)
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"--out {out}: is a file; name a directory")
    if out.is_dir() and (taken := sorted(os.listdir(out))):
        raise RunDirectoryError(f"--out {out}: not empty (it holds {taken[0]}); name another directory")
    rule = PruneRule(tables=tables or tuple(before.rows), min_count=min_count, max_age=max_age)
    written, after = write_pruned(place, Storage.at(out / "checkpoints"), rule)
    source = Path(run) / "config.toml"
    if source.is_file():
        settings = config.read_toml(source, expanded=False)
        if isinstance(options := settings.get("checkpoint"), dict):
            options.pop("dir", None)  # checkpoints are in the new directory
        config.write_toml(out / "config.toml", settings)
        if (record := source.with_name(RECORD)).is_file():
            shutil.copyfile(record, out / RECORD)
    for name, count in after.rows.items():
        click.echo(f"{name}: {count:,} of {before.rows[name]:,} rows remain")
    click.echo(f"{sum(after.rows.values()):,} of {sum(before.rows.values()):,} rows in {written}")
    return 0


def _check_table(name: str, tables: Mapping[str, int]) -> None:
    """Refuses a table that the run does not have."""
    if name not in tables:
        raise ConfigError(f"--table {name}: the run has none of that name{nearest(name, tables)}")
