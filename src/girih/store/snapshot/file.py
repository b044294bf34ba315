"""A snapshot in a file: named columns (see ``columns``), written and read chunk by chunk.

Shapes: n rows of the snapshot, K rows of a chunk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError
from girih.store.rows.record import FORMAT_VERSION
from girih.store.snapshot.columns import Chunk, link_tensors, row_tensors
from girih.store.snapshot.snapshot import Snapshot
from girih.store.snapshot.tensorfile import Tensor, TensorFile, TensorWriter

_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK = 1 << 10
_KIND = "girih shard"


class Snapshottable(Protocol):
    """A store that a snapshot can be taken of."""

    def snapshot(self, directory: str | os.PathLike[str]) -> Snapshot:
        """The state as it is now; see :meth:`Store.snapshot`."""


class SnapshotFile:
    """A snapshot in a file; made by :func:`read_snapshot`. For attributes see :class:`Snapshot`."""

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


def write_snapshot(source: Snapshottable | Snapshot, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes a store, or a snapshot of one, to a file that the safetensors library can read too.

    Returns:
        ``{"bytes": size of the file, "rows": n, "crc32": {column: checksum}}``.

    Raises:
        StorageFullError: the disk is full; no file is left behind.
    """
    if not isinstance(source, Snapshot):
        with source.snapshot(Path(path).parent) as snapshot:
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
