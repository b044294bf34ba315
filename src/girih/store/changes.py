"""The changes of a shard since a moment: rows that were made or updated, and keys whose rows left.

Kernels record changes: one bit per row, and a list of keys (:mod:`girih.kernels.cpu.saving`). The cost of reading
them grows with the number of changes, plus 1/8 byte for each row that ever existed.

A key may lose its row and get a row again any number of times. Only its state when changes are read counts. A key that
has a row is among the changed rows, because each new row is recorded. A key without a row is among the keys that left.

Shapes: D rows that changed, G keys that left, W columns of a row that training sees, K rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import index, layout
from girih.store.spec import Ints, Longs
from girih.store.values import Values

MOST_BYTES = 256 << 20
"""Bytes that a shard's changes may take in memory. Above this, writing all rows is as fast."""
_AT_ONCE = 1 << 13


@dataclass(frozen=True, slots=True)
class Changes:
    """The current state of rows that changed, and the keys that no longer have a row.

    Attributes:
        ids, tables: int64[D], int32[D]: the keys of the rows. Each key occurs once.
        rows: the columns that training sees, without optimizer state: float32[D, W], or the bits of 16-bit floats as
            uint16[D, W].
        left_ids, left_tables: int64[G], int32[G]: the keys that lost their rows. Each key occurs once.
    """

    ids: Longs
    tables: Ints
    rows: NDArray[Any]
    left_ids: Longs
    left_tables: Ints


def num_changed(values: Values) -> int:
    """Returns the number of row numbers that changed. Some of these rows may have left."""
    return int(np.bitwise_count(_bits(values)).sum())


def too_many(values: Values) -> bool:
    """Returns whether the records of changes are incomplete, or the changes take too much memory."""
    lost = bool(values.memory.arrays.left[0, layout.LEFT_LOST])
    width = values.spec.dim * (4 if values.spec.dtype == "float32" else 2)
    return lost or num_changed(values) * (width + 12) > MOST_BYTES


def changes_of(values: Values) -> Changes:
    """Copies the changes since recording began. The caller holds the lock."""
    memory = values.memory
    arrays = memory.arrays
    changed = _set_bits(_bits(values))
    tables = arrays.meta[changed, layout.TABLE]
    live = changed[tables >= 0]
    halves = values.spec.dtype != "float32"
    rows = np.empty((len(live), values.spec.dim), np.uint16 if halves else np.float32)
    for first in range(0, len(live), _AT_ONCE):
        some = live[first : first + _AT_ONCE]
        for part in memory.stretches(len(some), 4):
            words = np.empty((len(some[part]), values.layout.num_words - layout.META_COLUMNS), np.int32)
            values.copy(some[part], words, reads=False)
            rows[first : first + _AT_ONCE][part] = words.view(rows.dtype)[:, : values.spec.dim]
    return Changes(arrays.keys[live, 0], arrays.meta[live, layout.TABLE], rows, *_left(values))


def _bits(values: Values) -> NDArray[np.uint8]:
    arrays = values.memory.arrays
    return arrays.changed[: -(-int(arrays.state[layout.ROWS_EVER]) // 8)]


def _set_bits(bits: NDArray[np.uint8]) -> Ints:
    """Returns the indices of set bits, in order."""
    some = np.flatnonzero(bits)
    flags = np.unpackbits(bits[some], bitorder="little").reshape(-1, 8).view(np.bool_)
    return (8 * some[:, None] + np.arange(8))[flags].astype(np.int32)


def _left(values: Values) -> tuple[Longs, Ints]:
    """Returns the keys whose rows left and that have no row now. Each key occurs once."""
    arrays = values.memory.arrays
    noted = arrays.left[1 : 1 + int(arrays.left[0, layout.NUM_LEFT])]
    ids, tables = np.ascontiguousarray(noted[:, 0]), noted[:, 1].astype(np.int32)
    rows = np.empty(len(ids), np.int32)
    index.find_all(arrays, ids, tables, rows)
    ids, tables = ids[rows < 0], tables[rows < 0]
    order = np.lexsort((ids, tables))
    ids, tables = ids[order], tables[order]
    first = np.ones(len(ids), np.bool_)
    first[1:] = (ids[1:] != ids[:-1]) | (tables[1:] != tables[:-1])
    return ids[first], tables[first]
