"""A shard's state as named columns, read chunk by chunk: from a store that stands still, or from a file.

``columns`` lists them. Only live rows; a store that stands still gives those of tables that keep a list from
the oldest to the newest, so that reading them back gives the same list, and no row numbers.

Shapes: n rows of the snapshot, K rows of a chunk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.cpu import recency
from girih.store.columns import META, Chunk, bloom_tensors, cells_of, is_listed, link_tensors, row_tensors
from girih.store.layout import FORMAT_VERSION, RowLayout
from girih.store.live import LiveSnapshot
from girih.store.space import Space
from girih.store.tensorfile import Tensor, TensorFile, TensorWriter

if TYPE_CHECKING:
    from girih.store.store import Store

_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK = 1 << 10
_KIND = "girih shard"


class Snapshot:
    """The state of a store that stands still; made by :meth:`Store.snapshot` and :meth:`Store.delta_since`.

    Attributes:
        where: for errors.
        description: the layout, tables, counters (one mapping a table) and last step, as plain values.
        num_rows: n.
    """

    def __init__(
        self,
        space: Space,
        layout: RowLayout,
        description: Mapping[str, Any],
        counters: Sequence[Mapping[str, int]],
        since: int | None,
    ) -> None:
        self._space = space
        self._layout = layout
        self._num_changes = space.num_changes
        self._order = _live_rows(space, layout, since)
        self.where = "snapshot of a store"
        self.num_rows = len(self._order)
        self.description = {
            **description,
            "num_rows": self.num_rows,
            "since": since,
            "last_step": int(space.arrays.state[at.LAST_STEP]),
            "counters": [dict(of_table) for of_table in counters],
            "linked": False,
        }

    def tensors(self) -> list[Tensor]:
        """All columns and Bloom filters."""
        return [
            *row_tensors(self.description, self.num_rows),
            *bloom_tensors(self.description, self._layout),
        ]

    def verify(self) -> None:
        """Checks that the store has not changed since.

        Raises:
            ConfigError: it has.
        """
        if self._space.num_changes != self._num_changes:
            raise ConfigError("snapshot: the store changed before it was read to the end; take another one")

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells of this shard, or None where it has none."""
        names = [t["name"] for t in self.description["tables"]]
        first, last = cells_of(self._layout, names.index(table))
        return self._space.arrays.cells[first:last] if first < last else None

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """(table's name, its Bloom cells), of those that have some."""
        for table in self.description["tables"]:
            cells = self.bloom(table["name"])
            if cells is not None:
                yield table["name"], cells

    def chunks(self) -> Iterator[Chunk]:
        """The columns of some rows at a time, as copies.

        Raises:
            ConfigError: the store changed since the snapshot was taken.
        """
        size = max(_LEAST_CHUNK, _CHUNK_BYTES // (4 * self._layout.num_words))
        for start in range(0, self.num_rows, size):
            self.verify()
            yield self._gather(self._order[start : start + size])

    def _gather(self, rows: NDArray[np.int32]) -> Chunk:
        arrays, segments = self._space.arrays, self._layout.kernel.segments
        values = arrays.values[rows]
        meta = values.view(np.int32)
        chunk: Chunk = {"ids": values.view(np.int64)[:, 0]}
        for name, column in META.items():
            chunk[name] = meta[:, column]
        weights, start = values, at.VALUES
        if self.description["dtype"] != "float32":
            weights, start = values.view(np.uint16), 2 * at.VALUES
        for number, segment in enumerate(self.description["segments"]):
            first = start + int(segments[number, at.FIRST_COLUMN])
            chunk[segment["name"]] = weights[:, first : first + segment["dim"]]
        for state in self._layout.state:
            chunk[f"{state.segment}.{state.name}"] = values[:, state.start : state.start + state.width]
        return chunk


class SnapshotFile:
    """A snapshot in a file; made by :func:`read_snapshot`. Attributes as of :class:`Snapshot`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = TensorFile(path)
        self.where = str(self._file.path)
        if self._file.metadata.get("kind") != _KIND:
            raise CheckpointError(
                f"{self.where}: not a shard of girih; expected a file of a checkpoint's tables"
            )
        try:
            self.description: dict[str, Any] = json.loads(self._file.metadata["girih"])
            version, self.num_rows = self.description["version"], int(self.description["num_rows"])
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"{self.where}: format {version}, expected {FORMAT_VERSION}; update girih"
                )
            expected = {t.name: t for t in self._row_tensors(self.num_rows)}
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.where}: damaged: its description lacks {error}") from None
        for name, tensor in expected.items():
            found = self._file.arrays.get(name)
            if found is None or (self._file.dtypes[name], found.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{self.where}: damaged: column {name!r} is"
                    f" {'missing' if found is None else f'{self._file.dtypes[name]}{list(found.shape)}'},"
                    f" expected {tensor.dtype}{list(tensor.shape)}"
                )
        self._columns = list(expected)
        self._verified = False

    def verify(self) -> None:
        """Reads the file once and compares checksums; later calls return at once.

        Raises:
            CheckpointError: damaged.
        """
        if not self._verified:
            self._file.verify()
            self._verified = True

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells of this shard, or None where it has none."""
        return self._file.arrays.get(f"bloom.{table}")

    def column(self, name: str) -> NDArray[Any]:
        """A whole column, mapped, not copied.

        Raises:
            KeyError: there is no such column.
        """
        return self._file.arrays[name]

    def chunks(self) -> Iterator[Chunk]:
        """The columns of some rows at a time, mapped, not copied."""
        row_bytes = sum(t.num_bytes for t in self._row_tensors(1))
        size = max(_LEAST_CHUNK, _CHUNK_BYTES // row_bytes)
        for start in range(0, self.num_rows, size):
            yield {name: self._file.arrays[name][start : start + size] for name in self._columns}

    def _row_tensors(self, num_rows: int) -> list[Tensor]:
        return row_tensors(self.description, num_rows) + link_tensors(self.description, num_rows)


def write_snapshot(source: Store | Snapshot | LiveSnapshot, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes a store, or a snapshot of one, to a file that the safetensors library can read too.

    Returns:
        ``{"bytes": size of the file, "rows": n, "crc32": {column: checksum}}``.

    Raises:
        StorageFullError: the disk is full; no file is left behind.
        ConfigError: the store changed meanwhile, and the snapshot is not a live one; no file is left behind.
    """
    if not isinstance(source, Snapshot | LiveSnapshot):
        with source.live_snapshot(Path(path).parent) as snapshot:
            return write_snapshot(snapshot, path)
    metadata = {"kind": _KIND, "girih": json.dumps(source.description)}
    with TensorWriter(path, source.tensors(), metadata) as writer:
        for chunk in source.chunks():
            for name, rows in chunk.items():
                writer.write(name, rows)
        for table, cells in source.blooms():
            writer.write(f"bloom.{table}", cells)
        return {"bytes": writer.num_bytes, "rows": source.num_rows, "crc32": writer.finish()}


def read_snapshot(path: str | os.PathLike[str]) -> SnapshotFile:
    """Opens a file of :func:`write_snapshot` and checks its form; ``verify()`` checks its content.

    Raises:
        MissingFileError: no such file.
        CheckpointError: damaged, or not a shard of girih.
    """
    return SnapshotFile(path)


def _live_rows(space: Space, layout: RowLayout, since: int | None) -> NDArray[np.int32]:
    """Row numbers: tables without a list in row order, then each list from the oldest."""
    arrays, listed = space.arrays, is_listed(layout)
    owner = arrays.meta[: arrays.state[at.ROWS_EVER], at.TABLE]
    parts = []
    if not listed.all():
        unlisted = np.append(~listed, False)  # the last entry answers for free rows, whose table is -1
        parts.append(np.flatnonzero(unlisted[owner]).astype(np.int32))
    for table in np.flatnonzero(listed):
        rows = np.empty(int(arrays.tables[table, at.TABLE_ROWS]), np.int32)
        recency.oldest_first(arrays.meta, arrays.tables, int(table), rows)
        parts.append(rows)
    order = np.concatenate(parts)
    return order if since is None else order[arrays.meta[order, at.VERSION] > since]
