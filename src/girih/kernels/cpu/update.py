"""Writing rows: gradients through the optimizers, values from outside, removal.

Shapes: U unique keys, W columns of a row, S segments, T tables, K rows to drop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import index
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import (
    COUNT,
    DIM,
    DROPPED,
    EVICTED,
    FIRST_COLUMN,
    FLOAT32,
    LAST_USED,
    OPTIMIZER,
    STATE_START,
    STATE_WIDTH,
    TABLE,
    UPDATES,
    VALUES,
    VERSION,
    Layout,
    Shard,
)
from girih.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE_ADAGRAD, settle_row, update_row
from girih.kernels.cpu.rounding import narrow_row_randomly
from girih.kernels.cpu.rows import (
    AT_ONCE,
    begin_state,
    drop_row,
    holds,
    prefetch_rows,
    read_row,
    write_row,
)
from girih.kernels.cpu.saving import keep_row

SEVERAL = -1  # in place of an optimizer: ask each segment


@njit_lean
def update_segments(
    shard: Shard,
    layout: Layout,
    row: Any,
    columns: NDArray[np.float32],
    grad: NDArray[np.float32],
    hyper: NDArray[np.float64],
    optimizer: Any,
) -> None:
    """One optimizer step on a row whose W columns are ``columns``.

    By ``optimizer`` where the row is one segment; else that is ``SEVERAL``, and each segment has its own.
    """
    if optimizer != SEVERAL:
        start = layout.segments[0, STATE_START]
        state = shard.values[row, start : start + layout.segments[0, STATE_WIDTH]]
        update_row(optimizer, columns, state, grad, hyper[0])
        return
    for segment in range(layout.segments.shape[0]):
        first = layout.segments[segment, FIRST_COLUMN]
        last = first + layout.segments[segment, DIM]
        start = layout.segments[segment, STATE_START]
        update_row(
            layout.segments[segment, OPTIMIZER],
            columns[first:last],
            shard.values[row, start : start + layout.segments[segment, STATE_WIDTH]],
            grad[first:last],
            hyper[segment],
        )


@njit_lean
def apply_gradients(
    shard: Shard,
    layout: Layout,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    rows: NDArray[np.int32],
    grads: NDArray[np.float32],
    hyper: NDArray[np.float64],
    step: int,
) -> Any:
    """Moves the row of every key by its gradient, float32[U, W]; returns how many keys have none.

    ``rows`` int32[U] is where the rows were: each is checked against its key, and looked up again if another
    key lives there now. A gradient never reaches another key's row.
    """
    optimizer = layout.segments[0, OPTIMIZER] if layout.segments.shape[0] == 1 else SEVERAL
    # The numbers are constants, so that each loop is compiled as if there were no other optimizer: with all of
    # them in it, and with slices of any segment, a step on a row takes half as long again.
    if optimizer == ROWWISE_ADAGRAD:
        return _move(shard, layout, ids, tables, rows, grads, hyper, step, ROWWISE_ADAGRAD)
    if optimizer == ADAGRAD:
        return _move(shard, layout, ids, tables, rows, grads, hyper, step, ADAGRAD)
    if optimizer == ADAM:
        return _move(shard, layout, ids, tables, rows, grads, hyper, step, ADAM)
    return _move(shard, layout, ids, tables, rows, grads, hyper, step, SEVERAL)


@njit_lean
def _move(
    shard: Shard,
    layout: Layout,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    rows: NDArray[np.int32],
    grads: NDArray[np.float32],
    hyper: NDArray[np.float64],
    step: int,
    optimizer: Any,
) -> Any:
    num_keys, num_columns = grads.shape
    num_words, dropped = shard.values.shape[1], 0
    prefetch_rows(shard, rows, 0, AT_ONCE, num_words)
    for first in range(0, num_keys, AT_ONCE):
        last = min(first + AT_ONCE, num_keys)
        prefetch_rows(shard, rows, first + AT_ONCE, last + AT_ONCE, num_words)
        for i in range(first, last):
            table = np.int64(tables[i])
            row = np.int64(rows[i])
            if not holds(shard, row, ids[i], table):
                row = index.find(shard, ids[i], table)
                if row < 0:
                    shard.tables[table, DROPPED] += 1
                    dropped += 1
                    continue
            shard.tables[table, UPDATES] += 1
            keep_row(shard, row)
            shard.meta[row, VERSION] = max(shard.meta[row, VERSION], np.int32(step))
            if layout.dtype == FLOAT32:
                update_segments(
                    shard, layout, row, shard.values[row, VALUES : VALUES + num_columns], grads[i], hyper,
                    optimizer,
                )  # fmt: skip
                continue
            read_row(shard, layout, row, shard.scratch, shard.scratch_bits, 0)
            update_segments(shard, layout, row, shard.scratch[0], grads[i], hyper, optimizer)
            narrow_row_randomly(
                layout.dtype,
                shard.scratch_bits[0],
                shard.halves[row, 2 * VALUES : 2 * VALUES + num_columns],
                layout.table_seeds[table],
                ids[i],
                step,
            )
    return dropped


@njit_lean
def assign(
    shard: Shard,
    layout: Layout,
    rows: NDArray[np.int32],
    values: NDArray[np.float32],
    value_bits: NDArray[np.uint32],
    hyper: NDArray[np.float64],
    version: int,
) -> None:
    """Sets the columns of rows to ``values``, float32[U, W]; optimizer state stays, and is made to agree."""
    for i in range(rows.shape[0]):
        if rows[i] < 0:
            continue
        row = np.int64(rows[i])
        keep_row(shard, row)
        write_row(shard, layout, row, values, value_bits, i)
        shard.meta[row, VERSION] = max(shard.meta[row, VERSION], np.int32(version))
        for segment in range(layout.segments.shape[0]):
            first = layout.segments[segment, FIRST_COLUMN]
            start = layout.segments[segment, STATE_START]
            settle_row(
                layout.segments[segment, OPTIMIZER],
                values[i, first : first + layout.segments[segment, DIM]],
                shard.values[row, start : start + layout.segments[segment, STATE_WIDTH]],
                hyper[segment],
            )


@njit_lean
def begin_states(shard: Shard, layout: Layout, rows: NDArray[np.int32], hyper: NDArray[np.float64]) -> None:
    """Writes a new optimizer state for rows, int32[K], that have their W columns."""
    for i in range(rows.shape[0]):
        read_row(shard, layout, np.int64(rows[i]), shard.scratch, shard.scratch_bits, 0)
        begin_state(shard, layout, rows[i], shard.scratch[0], hyper)


@njit_lean
def drop_rows(shard: Shard, layout: Layout, rows: NDArray[np.int32]) -> Any:
    """Removes the keys of these rows, int32[K], skipping -1; returns how many left."""
    dropped = 0
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            table = np.int64(shard.meta[rows[i], TABLE])
            drop_row(shard, layout, np.int64(rows[i]))
            shard.tables[table, EVICTED] += 1
            dropped += 1
    return dropped


@njit_lean
def usage(
    meta: NDArray[np.int32], rows: NDArray[np.int32], counts: NDArray[np.int32], last_used: NDArray[np.int32]
) -> None:
    """Copies count and last use of rows, int32[K] each, for the LFU pass."""
    for i in range(rows.shape[0]):
        counts[i] = meta[rows[i], COUNT]
        last_used[i] = meta[rows[i], LAST_USED]
