"""One shard's rows of a segment: a safetensors file, without what training alone needs of a row.

| tensor | dtype | shape |
|---|---|---|
| ``ids``, ``tables`` | int64, int32 | [n], the keys of the rows |
| ``rows`` | float32, or the bits of 16-bit floats | [n, W] |
| ``left_ids``, ``left_tables`` | int64, int32 | [g], keys that have no row any more |

The header's ``girih`` is JSON: ``version``, ``group``, ``tables`` (names by number), ``segments`` (``[[name, dim], …]``, whose dims sum to W),
``dtype``, ``shard``, ``num_shards``.

Shapes: n rows, g keys that left, W columns of a row that training sees, K rows of a chunk.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError
from girih.store import LiveSnapshot, Sink, Store
from girih.store.arrays import Floats, Ints, Longs
from girih.store.changes import Changes
from girih.store.snapshot.tensorfile import DTYPES, HEADER, Tensor, TensorHeader, TensorWriter, damaged

_KIND, _VERSION = "girih segment", 1
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ROWS_AT_ONCE = 1 << 16


class Rows(NamedTuple):
    """Rows of some keys: int64[K], int32[K], and float32[K, W] or uint16[K, W]."""

    ids: Longs
    tables: Ints
    rows: NDArray[Any]


def write_changes(store: Store, changes: Changes, sink: Sink, where: str) -> dict[str, Any]:
    """Writes what changed to an empty file, whose name is ``where`` in errors; returns the part's facts, for a manifest."""
    rows = Rows(changes.ids, changes.tables, changes.rows)
    return _write(store, iter([rows]), len(changes.ids), (changes.left_ids, changes.left_tables), sink, where)


def write_snapshot(store: Store, snapshot: LiveSnapshot, sink: Sink, where: str) -> dict[str, Any]:
    """Writes all rows as they were at a snapshot; see :func:`write_changes`."""
    names = [segment.name for segment in store.spec.segments]

    def chunks() -> Iterator[Rows]:
        for chunk in snapshot.chunks():
            rows = np.concatenate([chunk[name] for name in names], axis=1)
            yield Rows(chunk["ids"], chunk["tables"], rows)

    none = np.empty(0, np.int64), np.empty(0, np.int32)
    return _write(store, chunks(), snapshot.num_rows, none, sink, where)


def _write(
    store: Store, chunks: Iterator[Rows], num_rows: int, left: tuple[Longs, Ints], sink: Sink, where: str
) -> dict[str, Any]:
    spec = store.spec
    names = [table.name for table in spec.tables]
    described = {
        "version": _VERSION,
        "group": spec.name,
        "tables": names,
        "segments": [[segment.name, segment.dim] for segment in spec.segments],
        "dtype": spec.dtype,
        "shard": store.shard,
        "num_shards": store.num_shards,
    }
    tensors = [
        Tensor("ids", "I64", (num_rows,)),
        Tensor("tables", "I32", (num_rows,)),
        Tensor("rows", _TAGS[spec.dtype], (num_rows, spec.dim)),
        Tensor("left_ids", "I64", (len(left[0]),)),
        Tensor("left_tables", "I32", (len(left[0]),)),
    ]
    writer = TensorWriter(sink, where, tensors, {"kind": _KIND, "girih": json.dumps(described)})
    counts = np.zeros(len(names), np.int64)
    for chunk in chunks:
        for name, array in chunk._asdict().items():
            writer.write(name, array)
        counts += np.bincount(chunk.tables, minlength=len(names))
    writer.write("left_ids", left[0])
    writer.write("left_tables", left[1])
    crc32 = writer.finish()
    return {
        "bytes": writer.num_bytes,
        "crc32": crc32,
        "group": spec.name,
        "tables": dict(zip(names, counts.tolist(), strict=True)),
        "shard": store.shard,
        "num_shards": store.num_shards,
        "left": len(left[0]),
    }


class Part:
    """A part that was written, its form and all of its checksums compared.

    Args:
        file: may be closed afterwards.
        facts: as the manifest has them.

    Attributes:
        tables: names by number. segments: (name, dim) of each. num_rows: n. left: the keys that have no row any more.

    Raises:
        CheckpointError: damaged, or another one than the manifest says.
    """

    def __init__(self, file: IO[bytes], where: str, facts: Mapping[str, Any]) -> None:
        size = os.fstat(file.fileno()).st_size
        if size != facts["bytes"]:
            raise damaged(where, f"{size:,} bytes, expected {facts['bytes']:,}")
        start = file.read(8)
        text = file.read(TensorHeader.length(start, size, where))
        header = TensorHeader(text, where)
        crcs: Mapping[str, int] = facts["crc32"]
        if header.size != size or zlib.crc32(start + text) != crcs.get(HEADER):
            raise damaged(where, "its header differs from what the manifest says")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays: dict[str, NDArray[Any]] = {}
        position = header.num_bytes
        for name, dtype, shape in header.tensors:
            arrays[name] = np.ndarray(shape, DTYPES[dtype], memory, position)
            position += arrays[name].nbytes
            if zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data) != crcs.get(name):
                raise damaged(where, f"the checksum of {name!r} differs")
        self._describe(header, where, facts)
        self._ids, self._tables, self._rows = (self._array(arrays, name, where) for name in Rows._fields)
        self.left = self._array(arrays, "left_ids", where), self._array(arrays, "left_tables", where)
        self.num_rows = len(self._ids)
        width = sum(dim for _, dim in self.segments)
        fits = self._rows.shape == (self.num_rows, width) and self._tables.shape == self._ids.shape
        numbers = np.concatenate([self._tables, self.left[1]])
        if not fits or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.tables)):
            raise damaged(where, "its columns do not fit together, or name a table that is not there")

    def chunks(self) -> Iterator[tuple[Longs, Ints, Floats]]:
        """The keys of some rows at a time, and the rows, float32[K, W]."""
        for start in range(0, self.num_rows, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            yield self._ids[part], self._tables[part], widened(self._rows[part], self._dtype)

    def _describe(self, header: TensorHeader, where: str, facts: Mapping[str, Any]) -> None:
        try:
            if header.metadata.get("kind") != _KIND:
                raise ValueError(f"it is no {_KIND}")
            described = json.loads(header.metadata["girih"])
            if described["version"] != _VERSION:
                raise CheckpointError(
                    f"{where}: format {described['version']}, expected {_VERSION}; update girih"
                )
            self.tables: list[str] = list(described["tables"])
            self.segments = [(str(name), int(dim)) for name, dim in described["segments"]]
            self._dtype: str = described["dtype"]
            if self._dtype not in _TAGS or sorted(self.tables) != sorted(facts["tables"]):
                raise ValueError("its tables are not those that the manifest says")
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(where, f"its description cannot be used: {error}") from None

    def _array(self, arrays: Mapping[str, NDArray[Any]], name: str, where: str) -> NDArray[Any]:
        kinds = {"ids": np.int64, "tables": np.int32, "left_ids": np.int64, "left_tables": np.int32}
        expected = kinds.get(name, np.float32 if self._dtype == "float32" else np.uint16)
        found = arrays.get(name)
        if found is None or found.dtype != expected or found.ndim != (2 if name == "rows" else 1):
            raise damaged(where, f"it has no tensor {name!r} of {np.dtype(expected)}")
        return found


def widened(values: NDArray[Any], dtype: str) -> Floats:
    """Bits of 16-bit floats as float32; float32 as they are."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.view(np.float16).astype(np.float32) if dtype == "float16" else values
