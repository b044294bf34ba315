"""Files of rows that commands write, as Parquet or CSV. They are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from girih.data.decode.columns import is_bytes
from girih.data.paths import one_line
from girih.errors import ConfigError, GirihError
from girih.files.whole import disk_full

PARQUET, CSV = ".parquet", ".csv"
_NAMES = {PARQUET: "Parquet", CSV: "CSV"}


def check_out(out: Path, content: str, endings: Sequence[str]) -> None:
    """Refuses a path to which no rows can be written.

    Args:
        content: the word for the rows, such as ``predictions``.
        endings: of the formats that these rows can have.

    Raises:
        ConfigError: an existing directory, a directory that does not exist, or a name with another ending.
    """
    names = " or ".join(f"{out.stem or content}{ending}" for ending in endings)
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a directory; name a file, as {out / f'{content}{endings[0]}'}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.parent} does not exist; create it first")
    if out.suffix not in endings:
        written = " or ".join(_NAMES[ending] for ending in endings)
        raise ConfigError(f"--out {out}: {content} are written as {written}; name it {names}")


def write_rows(out: Path, tables: Iterable[pa.Table], empty: pa.Table) -> int:
    """Writes Arrow tables one after the other, in the format of the file's ending. The file appears when it is whole.

    Args:
        empty: the Arrow schema of the file if there are no tables.

    Returns:
        The number of rows.

    Raises:
        ConfigError: the file cannot be written, or the format does not support a column. StorageFullError: the disk is
            full.
    """
    unfinished, num_rows = out.with_name(f".{out.name}.unfinished"), 0
    with _explain_write_errors(out):
        try:
            with contextlib.ExitStack() as closing:
                writer = None
                for table in tables:
                    with _told_of_columns(out):
                        if writer is None:
                            writer = closing.enter_context(_writer(unfinished, out, table.schema))
                        writer.write_table(table)
                    num_rows += table.num_rows
                if writer is None:
                    closing.enter_context(_writer(unfinished, out, empty))
            unfinished.replace(out)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    return num_rows


def _writer(unfinished: Path, out: Path, schema: pa.Schema) -> pq.ParquetWriter | pacsv.CSVWriter:
    """Returns the writer of the rows that become the file ``out``."""
    if out.suffix == PARQUET:
        return pq.ParquetWriter(unfinished, schema)
    for name, kind in zip(schema.names, schema.types, strict=True):
        if pa.types.is_nested(kind) or is_bytes(kind):
            raise ConfigError(
                f"--out {out}: column {name!r} ({kind}) has no text to write as CSV; leave it out, or name {out.stem}{PARQUET}"
            )
    return pacsv.CSVWriter(unfinished, schema)


@contextlib.contextmanager
def _told_of_columns(out: Path) -> Iterator[None]:
    """Explains Arrow's errors about columns that a format does not support."""
    try:
        yield
    except pa.ArrowException as error:
        if isinstance(error, OSError):
            raise
        raise ConfigError(
            f"--out {out}: a column cannot be written as {_NAMES[out.suffix]} ({one_line(error)}); leave it out, or name another format"
        ) from None


@contextlib.contextmanager
def _explain_write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, GirihError):
            raise
        reason = os.strerror(error.errno) if error.errno else error
        refused = ConfigError(f"--out {out}: cannot be written ({reason}); name another file")
        raise disk_full(error, f"--out {out}") or refused from None
