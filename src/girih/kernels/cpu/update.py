"""Writing rows: gradients through the optimizers, values from outside, removal.

Shapes: U unique keys, W columns of a row, S segments, T tables, K rows to drop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import index
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import F32, F64, I32, I64
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE_ADAGRAD, settle_row, update_row
from girih.kernels.cpu.rounding import narrow_row_randomly
from girih.kernels.cpu.rows import begin_state, drop_row, holds, prefetch_ahead, read_row, write_row
from girih.kernels.cpu.saving import keep_row

SEVERAL = -1  # in place of an optimizer: ask each segment


@njit_lean
def update_segments(
    shard: Shard, layout: Layout, row: Any, columns: F32, grad: F32, hyper: F64, optimizer: Any
) -> None:
    """One optimizer step on a row whose W columns are ``columns``.

    By ``optimizer`` where the row is one segment; else that is ``SEVERAL``, and each segment has its own.
    """
    if optimizer != SEVERAL:
        start = layout.segments[0, at.STATE_START]
        state = shard.values[row, start : start + layout.segments[0, at.STATE_WIDTH]]
        update_row(optimizer, columns, state, grad, hyper[0])
        return
    for segment in range(layout.segments.shape[0]):
        first = layout.segments[segment, at.FIRST_COLUMN]
        last = first + layout.segments[segment, at.DIM]
        start = layout.segments[segment, at.STATE_START]
        update_row(
            layout.segments[segment, at.OPTIMIZER],
            columns[first:last],
            shard.values[row, start : start + layout.segments[segment, at.STATE_WIDTH]],
            grad[first:last],
            hyper[segment],
        )


@njit_lean
def apply_gradients(
    shard: Shard, layout: Layout, ids: I64, tables: I32, rows: I32, grads: F32, hyper: F64, step: int
) -> Any:
    """Moves the row of every key by its gradient, float32[U, W]; returns how many keys have none.

    ``rows`` int32[U] is where the rows were: each is checked against its key, and looked up again if another
    key lives there now. A gradient never reaches another key's row.
    """
    optimizer = layout.segments[0, at.OPTIMIZER] if layout.segments.shape[0] == 1 else SEVERAL
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
    ids: I64,
    tables: I32,
    rows: I32,
    grads: F32,
    hyper: F64,
    step: int,
    optimizer: Any,
) -> Any:
    num_keys, num_columns = grads.shape
    num_words, dropped = shard.values.shape[1], 0
    for i in range(num_keys):
        prefetch_ahead(shard, rows, i, num_words)
        table = np.int64(tables[i])
        row = np.int64(rows[i])
        if not holds(shard, row, ids[i], table):
            row = index.find(shard, ids[i], table)
            if row < 0:
                shard.tables[table, at.DROPPED] += 1
                dropped += 1
                continue
        shard.tables[table, at.UPDATES] += 1
        keep_row(shard, row)
        shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(step))
        if layout.dtype == at.FLOAT32:
            update_segments(
                shard, layout, row, shard.values[row, at.VALUES : at.VALUES + num_columns], grads[i], hyper,
                optimizer,
            )  # fmt: skip
            continue
        read_row(shard, layout, row, shard.scratch, 0)
        update_segments(shard, layout, row, shard.scratch[0], grads[i], hyper, optimizer)
        narrow_row_randomly(
            layout.dtype,
            shard.scratch[0],
            shard.halves[row, 2 * at.VALUES : 2 * at.VALUES + num_columns],
            layout.table_seeds[table],
            ids[i],
            step,
        )
    return dropped


@njit_lean
def assign(shard: Shard, layout: Layout, rows: I32, values: F32, hyper: F64, version: int) -> None:
    """Sets the columns of rows to ``values``, float32[U, W]; optimizer state stays, and is made to agree."""
    for i in range(rows.shape[0]):
        if rows[i] < 0:
            continue
        row = np.int64(rows[i])
        keep_row(shard, row)
        write_row(shard, layout, row, values, i)
        shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(version))
        for segment in range(layout.segments.shape[0]):
            first = layout.segments[segment, at.FIRST_COLUMN]
            start = layout.segments[segment, at.STATE_START]
            settle_row(
                layout.segments[segment, at.OPTIMIZER],
                values[i, first : first + layout.segments[segment, at.DIM]],
                shard.values[row, start : start + layout.segments[segment, at.STATE_WIDTH]],
                hyper[segment],
            )


@njit_lean
def begin_states(shard: Shard, layout: Layout, rows: I32, hyper: F64) -> None:
    """Writes a new optimizer state for rows, int32[K], that have their W columns."""
    for i in range(rows.shape[0]):
        read_row(shard, layout, np.int64(rows[i]), shard.scratch, 0)
        begin_state(shard, layout, rows[i], shard.scratch[0], hyper)


@njit_lean
def drop_rows(shard: Shard, layout: Layout, rows: I32) -> Any:
    """Removes the keys of these rows, int32[K], skipping -1; returns how many left."""
    dropped = 0
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            table = np.int64(shard.meta[rows[i], at.TABLE])
            drop_row(shard, layout, np.int64(rows[i]))
            shard.tables[table, at.EVICTED] += 1
            dropped += 1
    return dropped
