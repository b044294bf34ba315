"""A snapshot in a file: named columns (see ``columns``), written and read chunk by chunk.

The content of a file is not trusted. This module checks row and table numbers before any kernel uses them as indices.

Shapes: n rows of the snapshot, K rows of a chunk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from girih.config import options
from girih.errors import CheckpointError
from girih.files.sealed import parse, refusing
from girih.kernels.cpu import layout
from girih.store.rows.record import FORMAT_VERSION
from girih.store.snapshot.columns import Chunk, columns_of, counts_seconds, wrong_rows, wrong_tables
from girih.store.snapshot.tensorfile import (
    HEADER,
    Sink,
    StoredTensor,
    TensorFile,
    TensorHeader,
    TensorWriter,
    any_nan,
    damaged,
)
from girih.store.spec import Description

_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK = 1 << 10
_KIND = "girih shard"
_FIX = "use another checkpoint"
_MOST_ROWS = (1 << 31) - 1
_FEW_ROWS = 1 << 22  # row numbers below which lists are kept in any file


class SnapshotFile:
    """A snapshot in a file. For attributes see :class:`girih.store.Snapshot`.

    If a file has more row numbers (``rows_ever``) than bytes, its lists are ignored.

    Args:
        file: the file that :func:`write_rows` wrote. The caller may close it afterwards.
        where: the file's name in errors.
        checksums: the checksums that :func:`write_rows` returned. Without them, only the format is checked.

    Raises:
        CheckpointError: the file is damaged, or is not a shard of girih.
    """

    def __init__(self, file: IO[bytes], where: str, checksums: Mapping[str, int] | None = None) -> None:
        self.where = where
        self._checksums, self._is_verified = checksums, False
        tensors = TensorFile(file, where)
        header, self._arrays = tensors.header, tensors.arrays
        if checksums is not None and checksums.get(HEADER) != tensors.header_crc32:
            raise damaged(where, "its header differs, or it is of another checkpoint")
        self.description = describe_header(header, where)
        self.num_rows = int(self.description["num_rows"])
        self._columns = columns_of(self.description)
        declared = {tensor.name: tensor for tensor in header.tensors}
        for expected in (column.tensor(self.num_rows) for column in self._columns):
            tensor = declared.get(expected.name)
            if tensor != expected:
                actual = "missing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                raise damaged(
                    where,
                    f"column {expected.name!r} is {actual}, expected {expected.dtype}{list(expected.shape)}",
                )
        if self.description[
            "linked"
        ]:  # memory for lists grows with the largest row number, so the file's size limits it
            self.description["linked"] = self.description["rows_ever"] <= max(header.size, _FEW_ROWS)

    def verify(self, columns: Iterable[str] | None = None) -> None:
        """Reads the file, compares checksums and checks the rows. Later calls return immediately.

        Args:
            columns: reads only these columns, which must include ids and tables. In this case, lists are not checked.

        Raises:
            CheckpointError: the file is damaged, or has NaN, a duplicate key, or an invalid table number, row number
                or list neighbour.
        """
        if self._is_verified:
            return
        self.check_columns(self._arrays if columns is None else columns)
        with refusing(self.where, _FIX):  # memory may run out
            wrong = wrong_rows(self._arrays, self.description, lists=columns is None)
        if wrong:
            raise damaged(self.where, wrong)
        self._is_verified = columns is None

    def check_columns(self, names: Iterable[str]) -> None:
        """Reads some columns, compares their checksums, and checks each value by itself.

        Raises:
            CheckpointError: the file is damaged, or has NaN or an invalid table number.
            KeyError: a column is unknown.
        """
        tags = {column.name: column.tag for column in self._columns}
        for name in names:
            column = self._arrays[name]
            if self._checksums is not None:
                crc, expected = zlib.crc32(column.data), self._checksums.get(name, "none")
                if crc != expected:
                    raise damaged(self.where, f"tensor {name!r} has checksum {crc}, expected {expected}")
            if any_nan(column, tags.get(name, "")):
                raise damaged(self.where, f"column {name!r} holds NaN")
            if name == "tables" and (wrong := wrong_tables(column, len(self.description["tables"]))):
                raise damaged(self.where, wrong)

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """Returns a table's Bloom cells of this shard, or None if it has none."""
        cells = self._arrays.get(f"bloom.{table}")
        return None if cells is None or cells.dtype != np.uint8 else cells.reshape(-1)

    def bloom_tensors(self) -> list[StoredTensor]:
        """Returns the Bloom filters of all tables that have one."""
        return [
            StoredTensor(name, "U8", cells.shape)
            for name, cells in self._arrays.items()
            if name.startswith("bloom.") and cells.dtype == np.uint8
        ]

    def column(self, name: str) -> NDArray[Any]:
        """Returns a whole column, mapped without a copy.

        Raises:
            KeyError: a column is unknown.
        """
        return self._arrays[name]

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of some rows at a time, mapped without a copy."""
        row_bytes = sum(column.num_bytes for column in self._columns)
        size = max(_LEAST_CHUNK, _CHUNK_BYTES // row_bytes)
        for start in range(0, self.num_rows, size):
            yield {c.name: self._arrays[c.name][start : start + size] for c in self._columns}


def add_newest_uses(newest: dict[str, int], file: SnapshotFile) -> None:
    """Updates ``newest`` with the last use, in seconds, of each table that counts the age of rows in seconds."""
    used, numbers = file.column("last_used"), file.column("tables")
    for number, table in enumerate(file.description["tables"]):
        if counts_seconds(table) and len(table_uses := used[numbers == number]):
            newest[table["name"]] = max(newest.get(table["name"], 0), int(table_uses.max()))


def describe_header(header: TensorHeader, where: str) -> Description:
    """Returns the description at the start of a shard's file; see :class:`girih.store.Snapshot`.

    Raises:
        CheckpointError: the file is damaged, or is not a shard of girih.
    """
    if header.metadata.get("kind") != _KIND:
        raise CheckpointError(f"{where}: not a shard of girih; expected a file of a checkpoint's tables")
    with refusing(where, _FIX, fault="damaged: its description is not that of a shard"):
        description: Description = parse(header.metadata["girih"])
        if description["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{where}: format {description['version']}, expected {FORMAT_VERSION}; update girih"
            )
        _check(description)
        columns_of(description)
    return description


def _check(description: Description) -> None:
    """Refuses descriptions with impossible numbers or missing names."""
    names = [table["name"] for table in description["tables"]]
    num_tables = len(names)
    if (
        not all(isinstance(name, str) for name in (description["group"], *names))
        or len(set(names)) < num_tables
    ):
        raise ValueError("expected names of a group and its tables")
    options.integer("num_rows", description["num_rows"], 0, _MOST_ROWS)
    options.integer("num_shards", description["num_shards"], 1, _MOST_ROWS)
    options.integer("last_step", description["last_step"], 0, _MOST_ROWS)
    options.integer("shard", description["shard"], 0, description["num_shards"] - 1)
    for segment in description["segments"]:
        if not isinstance(segment["name"], str) or not isinstance(segment["optimizer"]["name"], str):
            raise ValueError("expected names of segments and optimizers")
        options.integer("dim", segment["dim"], 1, _MOST_ROWS)
        for name, width in segment["state"]:
            options.integer(name, width, 1, _MOST_ROWS)
    if len(description["counters"]) != num_tables:
        raise ValueError("expected counters of each table")
    for counters in description["counters"]:
        for name in layout.COUNTERS:
            options.integer(name, counters[name], 0, 1 << 62)
    if description["linked"]:
        options.integer("rows_ever", description["rows_ever"], 0, _MOST_ROWS)
        if len(description["oldest"]) != num_tables:
            raise ValueError("expected the oldest row of each table")
        for row in description["oldest"]:
            options.integer("oldest", row, -1, description["rows_ever"] - 1)


class WritableRows(Protocol):
    """Rows that can be written: a snapshot, or the remaining rows of a file.

    Attributes:
        description: see :class:`girih.store.Snapshot`. num_rows: the number of rows, n.
    """

    @property
    def description(self) -> Description: ...

    @property
    def num_rows(self) -> int: ...

    def tensors(self) -> list[StoredTensor]:
        """Returns the names and shapes of all columns and Bloom filters."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of some rows at a time."""

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yields (table's name, its next Bloom cells) for all cells of all tables."""


class FileFacts(TypedDict):
    """The size of a file, its rows, and the checksum of each column."""

    bytes: int
    rows: int
    crc32: dict[str, int]


def write_rows(source: WritableRows, sink: Sink, where: str) -> FileFacts:
    """Writes a snapshot to an empty file. Errors name the file ``where``.

    Returns:
        ``{"bytes": size of the file, "rows": n, "crc32": {column: checksum}}``. The key
            :data:`~girih.store.snapshot.tensorfile.HEADER` of ``crc32`` has the header's checksum.

    Raises:
        StorageFullError: the disk is full.
    """
    metadata = {"kind": _KIND, "girih": json.dumps(source.description)}
    try:
        writer = TensorWriter(sink, where, source.tensors(), metadata)
        for chunk in source.chunks():
            for name, rows in chunk.items():
                writer.write(name, rows)
        for table, cells in source.blooms():
            writer.write(f"bloom.{table}", cells)
        return {"bytes": writer.num_bytes, "rows": source.num_rows, "crc32": writer.finish()}
    except BaseException:
        sink.abandon()
        raise
