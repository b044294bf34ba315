"""One row of a shard: taken, filled, read, written and given back.

Shapes: W columns that training sees, S segments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import index, recency
from girih.kernels.cpu.initial import fill_initial
from girih.kernels.cpu.jit import njit_lean, prefetch_at
from girih.kernels.cpu.layout import (
    COUNT,
    DIM,
    EVICT_NONE,
    EVICTION,
    FIRST_COLUMN,
    FLOAT32,
    FREE_ROW,
    GROWING,
    LAST_USED,
    NO_ROW,
    NUM_ROWS,
    OLDER,
    OPTIMIZER,
    ROWS_EVER,
    STATE_START,
    STATE_WIDTH,
    TABLE,
    TABLE_ROWS,
    VALUES,
    VERSION,
    Layout,
    Shard,
)
from girih.kernels.cpu.optimizers import begin_row
from girih.kernels.cpu.rounding import narrow_row, widen_row
from girih.kernels.cpu.saving import keep_row
from girih.kernels.cpu.vector import copy_row

AT_ONCE = 32  # rows that are asked for together
_LINE = 64


@njit_lean
def prefetch_rows(shard: Shard, rows: NDArray[np.int32], first: Any, last: Any, num_words: Any) -> None:
    """Asks for the cache lines of the first words of some of ``rows``, int32[U], as far as there are so many.

    A block of rows is asked for before the block before it is used: one by one, between uses, they come a third more
    slowly where nothing of them is in a cache.
    """
    for i in range(first, min(last, rows.shape[0])):
        for byte in range(0, 4 * num_words, _LINE):
            prefetch_at(shard.values, rows[i], byte)
        prefetch_at(shard.values, rows[i], 4 * num_words - 1)


@njit_lean
def holds(shard: Shard, row: Any, key_id: Any, table: Any) -> Any:
    """Whether a row number, from wherever, is the row of this key now."""
    return 0 <= row < shard.state[ROWS_EVER] and index.holds_key(shard, row, key_id, table)


@njit_lean
def read_row(
    shard: Shard, layout: Layout, row: Any, out: NDArray[np.float32], bits: NDArray[np.uint32], number: Any
) -> None:
    """Copies a row's columns to ``out[number]``, float32[W]; ``bits`` is the same memory as uint32."""
    dim = out.shape[1]
    if layout.dtype == FLOAT32:
        copy_row(out, number, 0, shard.values, row, VALUES, dim)
    else:
        widen_row(layout.dtype, shard.halves[row, 2 * VALUES : 2 * VALUES + dim], bits[number])


@njit_lean
def write_row(
    shard: Shard, layout: Layout, row: Any, value: NDArray[np.float32], bits: NDArray[np.uint32], number: Any
) -> None:
    """Sets a row's columns from ``value[number]``, float32[W], rounded to nearest where rows are of 16 bits."""
    if layout.dtype == FLOAT32:
        copy_row(shard.values, row, VALUES, value, number, 0, value.shape[1])
    else:
        narrow_row(layout.dtype, bits[number], shard.halves[row, 2 * VALUES : 2 * VALUES + value.shape[1]])


@njit_lean
def read_initial(
    shard: Shard, layout: Layout, key_id: Any, table: Any, out: NDArray[np.float32], bits: NDArray[np.uint32]
) -> None:
    """Reads a key without a row: its initial value, as a row would keep it."""
    fill_initial(layout, key_id, table, out)
    if layout.dtype != FLOAT32:
        narrow_row(layout.dtype, bits, shard.scratch_halves)
        widen_row(layout.dtype, shard.scratch_halves, bits)


@njit_lean
def begin_state(
    shard: Shard, layout: Layout, row: Any, value: NDArray[np.float32], hyper: NDArray[np.float64]
) -> None:
    """Writes the optimizer state of a new row whose columns are ``value``, float32[W]."""
    for segment in range(layout.segments.shape[0]):
        first = layout.segments[segment, FIRST_COLUMN]
        start = layout.segments[segment, STATE_START]
        begin_row(
            layout.segments[segment, OPTIMIZER],
            value[first : first + layout.segments[segment, DIM]],
            shard.values[row, start : start + layout.segments[segment, STATE_WIDTH]],
            hyper[segment],
        )


@njit_lean
def take_row(
    shard: Shard, layout: Layout, key_id: Any, table: Any, now: Any, count: Any, version: Any
) -> Any:
    """Gives a key a row, with its value and state still to be written; memory must be there."""
    row = shard.state[FREE_ROW]
    if row >= 0:
        shard.state[FREE_ROW] = shard.meta[row, OLDER]
    else:
        row = shard.state[ROWS_EVER]
        shard.state[ROWS_EVER] = row + 1
    keep_row(shard, row)
    shard.keys[row, 0] = key_id
    shard.meta[row, TABLE] = table
    shard.meta[row, LAST_USED] = now
    shard.meta[row, COUNT] = count
    shard.meta[row, VERSION] = version
    index.insert(shard, key_id, table, row)
    if shard.state[GROWING] != 0:
        index.move(shard, index.MOVES)
    if layout.rules[table, EVICTION] != EVICT_NONE:
        recency.push_newest(shard, table, row)
    shard.state[NUM_ROWS] += 1
    shard.tables[table, TABLE_ROWS] += 1
    return row


@njit_lean
def drop_row(shard: Shard, layout: Layout, row: Any) -> None:
    """Takes a row from its key: out of the index, out of its list, onto the chain of free rows."""
    keep_row(shard, row)
    table = np.int64(shard.meta[row, TABLE])
    index.delete(shard, shard.keys[row, 0], table)
    if layout.rules[table, EVICTION] != EVICT_NONE:
        recency.unlink(shard, table, row)
    shard.meta[row, TABLE] = NO_ROW
    shard.meta[row, OLDER] = shard.state[FREE_ROW]
    shard.state[FREE_ROW] = row
    shard.state[NUM_ROWS] -= 1
    shard.tables[table, TABLE_ROWS] -= 1
