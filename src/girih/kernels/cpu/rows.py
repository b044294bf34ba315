"""Functions on one row of a shard: take, fill, read, write and drop.

Shapes: W columns that training sees, S segments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import index, recency
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import F32, F64, I32
from girih.kernels.cpu.jit import JIT_DISABLED, intrinsic, njit_lean, types
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.optimizers import begin_row
from girih.kernels.cpu.rounding import narrow_row, widen_row
from girih.kernels.cpu.saving import keep_row, note_changed, note_left
from girih.kernels.cpu.system import prefetch_words, row_address
from girih.kernels.cpu.vector import copy_row

MAKING, LEAVING, SETTING = range(3)
"""The kinds of notes, all below 0: a row is being made for a key, is being removed, or is being set from outside."""
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1

if JIT_DISABLED:

    def settle() -> None:
        """Does nothing without the JIT, because only the JIT reorders writes."""

else:

    @intrinsic
    def settle(typing_context: Any) -> Any:
        """Prevents the compiler from moving writes across this point, so that a killed process leaves them in order."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence("seq_cst", "singlethread")
            return context.get_dummy_value()

        return types.void(), generate


@njit_lean
def note(shard: Shard, kind: Any, row: Any) -> None:
    """Records the next change of a row. The note is valid until the next note or the next verb."""
    settle()
    shard.state[at.AMID] = ~((np.int64(kind) << _ROW_BITS) | np.int64(row))
    settle()


@njit_lean
def note_move(shard: Shard, position: Any, row: Any) -> None:
    """Records that a row is updated next, by the gradient of the key at ``position``.

    ``NO_ROW`` records that the rows of all earlier positions have been updated.
    """
    settle()
    shard.state[at.AMID] = (np.int64(position) << _ROW_BITS) | (np.int64(row) + 1)
    settle()


def noted(word: int) -> tuple[int | None, int, int]:
    """Returns (kind, row, position) of a note. The kind is None for an update by a gradient.

    The row is ``NO_ROW`` if no row was being updated.
    """
    if word < 0:
        return ~word >> _ROW_BITS, ~word & _ROW_MASK, 0
    return None, (word & _ROW_MASK) - 1, word >> _ROW_BITS


ROWS_AHEAD = 32  # rows between the prefetch and the use of a row


@njit_lean
def prefetch_row(shard: Shard, row: Any, num_words: Any) -> None:
    """Prefetches the first words of a row. The number may be -1."""
    prefetch_words(row_address(shard.values, row), num_words)


@njit_lean
def prefetch_ahead(shard: Shard, rows: I32, i: Any, num_words: Any) -> None:
    """Prefetches the row that is used :data:`ROWS_AHEAD` places after place ``i`` of ``rows``, int32[U].

    Rows are requested one by one. If 32 rows were requested together, some processors would wait for free line buffers,
    and an update of rows in memory would take twice as long (decision 0086).
    """
    if i == 0:
        for first in range(min(ROWS_AHEAD, rows.shape[0])):
            prefetch_row(shard, rows[first], num_words)
    if i + ROWS_AHEAD < rows.shape[0]:
        prefetch_row(shard, rows[i + ROWS_AHEAD], num_words)


@njit_lean
def holds(shard: Shard, row: Any, key_id: Any, table: Any) -> Any:
    """Returns whether a row number is the current row of this key. The number may be any integer."""
    return 0 <= row < shard.state[at.ROWS_EVER] and index.holds_key(shard, row, key_id, table)


@njit_lean
def read_row(shard: Shard, layout: Layout, row: Any, out: F32, number: Any) -> None:
    """Copies a row's columns to ``out[number]``, float32[W]."""
    dim = out.shape[1]
    if layout.dtype == at.FLOAT32:
        copy_row(out, number, 0, shard.values, row, at.VALUES, dim)
    else:
        widen_row(layout.dtype, shard.halves[row, 2 * at.VALUES : 2 * at.VALUES + dim], out[number])


@njit_lean
def write_row(shard: Shard, layout: Layout, row: Any, value: F32, number: Any) -> None:
    """Sets a row's columns from ``value[number]``, float32[W], rounded to nearest if rows have 16 bits."""
    if layout.dtype == at.FLOAT32:
        copy_row(shard.values, row, at.VALUES, value, number, 0, value.shape[1])
    else:
        narrow_row(
            layout.dtype, value[number], shard.halves[row, 2 * at.VALUES : 2 * at.VALUES + value.shape[1]]
        )


@njit_lean
def begin_state(shard: Shard, layout: Layout, row: Any, value: F32, hyper: F64) -> None:
    """Writes the optimizer state of a new row whose columns are ``value``, float32[W]."""
    for segment in range(layout.segments.shape[0]):
        first = layout.segments[segment, at.FIRST_COLUMN]
        start = layout.segments[segment, at.STATE_START]
        begin_row(
            layout.segments[segment, at.OPTIMIZER],
            value[first : first + layout.segments[segment, at.DIM]],
            shard.values[row, start : start + layout.segments[segment, at.STATE_WIDTH]],
            hyper[segment],
        )


@njit_lean
def take_row(
    shard: Shard, layout: Layout, key_id: Any, table: Any, now: Any, count: Any, version: Any
) -> Any:
    """Gives a key a row. The caller must have claimed memory before, and must write the row's value and state."""
    row = shard.state[at.FREE_ROW]
    if row >= 0:
        note(shard, MAKING, row)
        shard.state[at.FREE_ROW] = shard.meta[row, at.OLDER]
    else:
        row = shard.state[at.ROWS_EVER]
        note(shard, MAKING, row)
        shard.state[at.ROWS_EVER] = row + 1
    keep_row(shard, row)
    shard.keys[row, 0] = key_id
    shard.meta[row, at.TABLE] = table
    shard.meta[row, at.LAST_USED] = now
    shard.meta[row, at.COUNT] = count
    shard.meta[row, at.VERSION] = version
    note_changed(shard, row)
    index.insert(shard, key_id, table, row)
    if shard.state[at.GROWING] != 0:
        index.move(shard, index.MOVES)
    if layout.rules[table, at.EVICTION] != at.EVICT_NONE:
        recency.push_newest(shard, table, row)
    shard.state[at.NUM_ROWS] += 1
    shard.tables[table, at.TABLE_ROWS] += 1
    return row


@njit_lean
def drop_row(shard: Shard, layout: Layout, row: Any) -> None:
    """Removes a row from its key, the index and its list, and adds it to the chain of free rows."""
    note(shard, LEAVING, row)
    keep_row(shard, row)
    note_left(shard, row)
    table = np.int64(shard.meta[row, at.TABLE])
    index.delete(shard, shard.keys[row, 0], table)
    if layout.rules[table, at.EVICTION] != at.EVICT_NONE:
        recency.unlink(shard, table, row)
    shard.meta[row, at.TABLE] = at.NO_ROW
    shard.meta[row, at.OLDER] = shard.state[at.FREE_ROW]
    shard.state[at.FREE_ROW] = row
    shard.state[at.NUM_ROWS] -= 1
    shard.tables[table, at.TABLE_ROWS] -= 1
