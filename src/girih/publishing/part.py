"""One shard's rows of a segment: a safetensors file, without the parts of a row that only training needs.

| tensor | dtype | shape |
|---|---|---|
| ``ids``, ``tables`` | int64, int32 | [n], the keys of the rows |
| ``rows`` | float32, or the bits of 16-bit floats | [n, W] |
| ``left_ids``, ``left_tables`` | int64, int32 | [g], keys that have no row any more |

The header's ``girih`` is JSON: ``version``, ``group``, ``tables`` (names by number), ``segments`` (``[[name, dim],
…]``, whose dims sum to W), ``dtype``, ``shard``, ``num_shards``.

Shapes: n rows, g keys that left, W columns of a row that training sees, K rows of a chunk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import PartFacts
from girih.errors import CheckpointError
from girih.files.sealed import refusing
from girih.store import LiveSnapshot, Sink, Store
from girih.store.changes import Changes
from girih.store.snapshot.columns import wrong_keys
from girih.store.snapshot.tensorfile import (
    HEADER,
    Described,
    StoredTensor,
    TensorFile,
    TensorWriter,
    any_nan,
    damaged,
)
from girih.store.spec import Floats, GroupSpec, Ints, Longs

_KIND, _VERSION = "girih segment", 1
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ROWS_AT_ONCE = 1 << 16
_FIX = "publish again"


class KeyedRows(NamedTuple):
    """Rows of some keys: int64[K], int32[K], and float32[K, W] or uint16[K, W]."""

    ids: Longs
    tables: Ints
    rows: NDArray[Any]


def write_changes(store: Store, changes: Changes, sink: Sink, where: str) -> PartFacts:
    """Writes the changes to an empty file, named ``where`` in errors. Returns the part's facts for a manifest."""
    rows = KeyedRows(changes.ids, changes.tables, changes.rows)
    return _write(store, iter([rows]), len(changes.ids), (changes.left_ids, changes.left_tables), sink, where)


def write_snapshot(store: Store, snapshot: LiveSnapshot, sink: Sink, where: str) -> PartFacts:
    """Writes all rows of a snapshot; see :func:`write_changes`."""
    names = [segment.name for segment in store.spec.segments]

    def chunks() -> Iterator[KeyedRows]:
        for chunk in snapshot.chunks():
            rows = np.concatenate([chunk[name] for name in names], axis=1)
            yield KeyedRows(chunk["ids"], chunk["tables"], rows)

    none = np.empty(0, np.int64), np.empty(0, np.int32)
    return _write(store, chunks(), snapshot.num_rows, none, sink, where)


def _write(
    store: Store, chunks: Iterator[KeyedRows], num_rows: int, left: tuple[Longs, Ints], sink: Sink, where: str
) -> PartFacts:
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
    tensors = _tensors(spec.dtype, num_rows, spec.dim, len(left[0]))
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


class SegmentPart:
    """A part of a segment, read from its file. The constructor checks its form and all checksums.

    Args:
        file: the file of the part. The caller may close it afterwards.
        facts: from the manifest.

    Attributes:
        tables: number of rows of each table, in the order of the tables' numbers.
        segments: (name, dim) of each segment of a row.
        left: the keys that have no row any more.

    Raises:
        CheckpointError: the file is damaged, or another one than the manifest says.
    """

    def __init__(self, file: IO[bytes], where: str, facts: PartFacts) -> None:
        self.where, file_tensors = where, TensorFile(file, where)
        crcs: Mapping[str, int] = facts["crc32"]
        if file_tensors.header.size != facts["bytes"] or file_tensors.header_crc32 != crcs.get(HEADER):
            raise damaged(where, "its header differs from what the manifest says")
        for name, array in file_tensors.arrays.items():
            if zlib.crc32(array.reshape(-1).view(np.uint8).data) != crcs.get(name):
                raise damaged(where, f"the checksum of {name!r} differs")
        with refusing(where, _FIX):
            self._check(file_tensors, facts)

    def _check(self, file_tensors: TensorFile, facts: PartFacts) -> None:
        """Compares the description, the facts and the columns."""
        described = Described.of(file_tensors.header, _KIND, _VERSION)
        self.segments, self._dtype = described.segments, described.dtype
        width = sum(dim for _, dim in self.segments)
        declared = {tensor.name: tensor for tensor in file_tensors.header.tensors}
        num_rows, num_left = (len(file_tensors.arrays.get(name, ())) for name in ("ids", "left_ids"))
        for expected in _tensors(self._dtype, num_rows, width, num_left):
            if declared.get(expected.name) != expected:
                raise ValueError(
                    f"it has no tensor {expected.name!r} of {expected.dtype}{list(expected.shape)}"
                )
        self._ids, self._tables, self._rows = (file_tensors.arrays[name] for name in KeyedRows._fields)
        self.left: tuple[Longs, Ints] = file_tensors.arrays["left_ids"], file_tensors.arrays["left_tables"]
        keys = np.concatenate([self._ids, self.left[0]]), np.concatenate([self._tables, self.left[1]])
        if wrong := wrong_keys(*keys, len(described.tables), described.shard, described.num_shards):
            raise ValueError(wrong)
        counts = np.bincount(self._tables, minlength=len(described.tables)).tolist()
        self.tables: Mapping[str, int] = dict(zip(described.tables, counts, strict=True))
        actual = {
            "group": described.group,
            "shard": described.shard,
            "num_shards": described.num_shards,
            "tables": self.tables,
            "left": num_left,
        }
        for field, value in actual.items():
            if facts.get(field) != value:
                raise ValueError(f"its {field} is {value}, but the manifest says {facts.get(field)}")
        if any_nan(self._rows, _TAGS[self._dtype]):
            raise ValueError("a row holds NaN")

    def check_columns(self, spec: GroupSpec) -> None:
        """Checks that the part has the columns of a group of tables.

        Raises:
            CheckpointError: it has other columns. The error names them.
        """
        expected = [(segment.name, segment.dim) for segment in spec.segments]
        if self.segments != expected:
            raise CheckpointError(
                f"rows of tables {list(self.tables)} have columns {self.segments}, expected {expected}"
            )

    def chunks(self, spec: GroupSpec) -> Iterator[tuple[Longs, Ints, Floats]]:
        """Yields keys and rows, float32[K, W], in chunks, with a group's columns; see :meth:`check_columns`."""
        self.check_columns(spec)
        for start in range(0, len(self._ids), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            yield self._ids[part], self._tables[part], widened(self._rows[part], self._dtype)


def _tensors(dtype: str, num_rows: int, width: int, num_left: int) -> list[StoredTensor]:
    """Returns the descriptions of all tensors of a part."""
    return [
        StoredTensor("ids", "I64", (num_rows,)),
        StoredTensor("tables", "I32", (num_rows,)),
        StoredTensor("rows", _TAGS[dtype], (num_rows, width)),
        StoredTensor("left_ids", "I64", (num_left,)),
        StoredTensor("left_tables", "I32", (num_left,)),
    ]


def widened(values: NDArray[Any], dtype: str) -> Floats:
    """Converts bits of 16-bit floats to float32. Returns float32 unchanged."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.view(np.float16).astype(np.float32) if dtype == "float16" else values
