"""``girih export-embeddings``."""

from __future__ import annotations

from pathlib import Path

import click
import pyarrow as pa

from girih.checkpoint import Manifest
from girih.cli import cli
from girih.cli.out import PARQUET, check_out, write_rows
from girih.cli.words import PATH
from girih.errors import ConfigError, nearest
from girih.serving.loaded import TableRows, has_embeddings, table_chunks
from girih.serving.opening import final_weights


@cli.command("export-embeddings")
@click.argument("run", metavar="RUN|CHECKPOINT", type=click.Path())
@click.option("--table", metavar="NAME", required=True, help="The table whose rows are written.")
@click.option("--out", metavar="FILE.parquet", type=PATH, required=True)
def export_embeddings(run: str, table: str, out: Path) -> int:
    """Write the rows of a table to Parquet: id, embedding, count."""
    check_out(out, "embeddings", (PARQUET,))
    place, final = final_weights(run)
    if not final:
        click.echo(f"{run}: not finished; using {place.name}", err=True)
    manifest = Manifest.read(place)
    dims = {each["name"]: int(each["dim"]) for each in manifest.schema["tables"]}
    if table not in dims:
        raise ConfigError(f"--table {table}: the run has none of that name{nearest(table, dims)}")
    if not has_embeddings(place, manifest, table):
        raise ConfigError(f"--table {table}: the run's model reads no embedding of it; name another table")
    vectors = pa.list_(pa.float32(), dims[table])
    schema = pa.schema([("id", pa.int64()), ("embedding", vectors), ("count", pa.int64())])
    tables = (_table(rows, schema) for rows in table_chunks(place, manifest, table))
    num_rows = write_rows(out, tables, schema)
    click.echo(f"{num_rows:,} embeddings of {table} in {out}")
    return 0


def _table(rows: TableRows, schema: pa.Schema) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.rows.reshape(-1)), rows.rows.shape[1])
    return pa.table([pa.array(rows.ids), vectors, pa.array(rows.counts)], schema=schema)
