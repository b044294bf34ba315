"""Parquet files that commands write: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from girih.errors import ConfigError, GirihError
from girih.runs.files import disk_full

_OTHERS = (".csv", ".tsv", ".txt", ".json", ".gz")


def check_out(out: Path, what: str) -> None:
    """Refuses a path to which no Parquet file can be written.

    Args:
        what: the rows to be, as in ``predictions``.

    Raises:
        ConfigError: a directory, one that does not exist, or a name that says another format.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a directory; name a Parquet file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.parent} does not exist; create it first")
    if out.suffix in _OTHERS:
        raise ConfigError(f"--out {out}: {what} are written as Parquet; name it {out.stem}.parquet")


def write_parquet(out: Path, tables: Iterable[Any], schema: Any = None) -> int:
    """Writes Arrow tables one after the other; the file is there once it is whole.

    Args:
        schema: of all tables; that of the first where None.

    Returns:
        The number of rows.

    Raises:
        ConfigError: it cannot be written. StorageFullError: the disk is full.
    """
    unfinished, num_rows = out.with_name(f".{out.name}.unfinished"), 0
    with _told(out):
        try:
            with contextlib.ExitStack() as closing:
                writer = None
                for table in tables:
                    if writer is None:
                        writer = closing.enter_context(pq.ParquetWriter(unfinished, schema or table.schema))
                    writer.write_table(table)
                    num_rows += table.num_rows
                if writer is None:
                    closing.enter_context(pq.ParquetWriter(unfinished, schema))
            unfinished.replace(out)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    return num_rows


@contextlib.contextmanager
def _told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, GirihError):
            raise
        told = os.strerror(error.errno) if error.errno else error
        refused = ConfigError(f"--out {out}: cannot be written ({told}); name another file")
        raise disk_full(error, f"--out {out}") or refused from None
