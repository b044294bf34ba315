"""Changes rows: updates them by gradients, sets them to given values, and removes them.

Shapes: U unique keys, W columns of a row, S segments, T tables, K rows to drop, M terms of sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from girih.kernels.cpu import index, recency
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import F32, F64, I32, I64, U8, F32x2, F64x2, SealedF32x2, SealedU8, sealed
from girih.kernels.cpu.initial import fill_initial
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.optimizers import UPDATES, settle_row, update_row
from girih.kernels.cpu.rounding import narrow_row_randomly
from girih.kernels.cpu.rows import (
    SETTING,
    begin_state,
    drop_row,
    holds,
    note,
    note_move,
    prefetch_ahead,
    read_row,
    take_row,
    write_row,
)
from girih.kernels.cpu.saving import keep_row, note_changed
from girih.kernels.cpu.system import prefetch_columns
from girih.kernels.cpu.vector import add_scaled, sum_rows

GRADIENT = 1  # the row of a shard's scratch for the gradient of the current row
TERMS_AHEAD = 32
_NO_FACTORS = np.empty(0, np.float32)
_NO_TAIL = np.empty((0, 0), np.float32)


@njit_lean
def prefetch_terms(grads: F32, order: I32, term: Any) -> None:
    """Prefetches the row of ``grads`` for a term, if there is one."""
    if term < order.shape[0]:
        prefetch_columns(grads, order[term], 0, grads.shape[1])


@njit_lean
def sum_terms(scratch: F32, column: Any, grads: F32, order: I32, factors: F32, start: Any, stop: Any) -> None:
    """Writes the sum of some terms, added in their order, to the gradient of the current row, from ``column`` on."""
    dim = grads.shape[1]
    if factors.shape[0] == 0:
        sum_rows(scratch, GRADIENT, column, grads, order, start, stop, dim)
        return
    for d in range(dim):
        scratch[GRADIENT, column + d] = np.float32(0.0)
    for i in range(start, stop):
        add_scaled(scratch, GRADIENT, column, grads, np.int64(order[i]), 0, dim, factors[i])


@njit_lean
def _row_of(shard: Shard, key_id: Any, table: Any, row: Any) -> Any:
    """Returns the row of a key. Returns -1 if the key has no row, and counts the dropped gradient.

    Checks the hint ``row``.
    """
    if not holds(shard, row, key_id, table):
        row = index.find(shard, key_id, table)
        if row < 0:
            shard.tables[table, at.DROPPED] += 1
    return row


@njit_lean
def _mark_moved(shard: Shard, table: Any, row: Any, step: Any) -> None:
    shard.tables[table, at.UPDATES] += 1
    keep_row(shard, row)
    note_changed(shard, row)
    shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(step))


@njit_lean
def row_to_move(shard: Shard, key_id: Any, table: Any, row: Any, step: Any) -> Any:
    """Returns the row of a key, or -1. Checks the hint ``row``, and marks the row as updated in this step."""
    row = _row_of(shard, key_id, table, row)
    if row >= 0:
        _mark_moved(shard, table, row, step)
    return row


def _updating(update: Any, *, alike: bool, single: bool) -> Any:
    """Returns a function for one optimizer step on the columns of a row, float32[W]; see :func:`_applying`."""

    @njit_lean
    def update_segments(shard: Shard, layout: Layout, row: Any, columns: F32, grad: F32, hyper: F64) -> None:
        if single:
            start = layout.segments[0, at.STATE_START]
            state = shard.values[row, start : start + layout.segments[0, at.STATE_WIDTH]]
            update(columns, state, grad, hyper[0])
        else:
            for segment in range(layout.segments.shape[0]):
                first = layout.segments[segment, at.FIRST_COLUMN]
                last = first + layout.segments[segment, at.DIM]
                start = layout.segments[segment, at.STATE_START]
                state = shard.values[row, start : start + layout.segments[segment, at.STATE_WIDTH]]
                if alike:
                    update(columns[first:last], state, grad[first:last], hyper[segment])
                else:
                    optimizer = layout.segments[segment, at.OPTIMIZER]
                    update_row(optimizer, columns[first:last], state, grad[first:last], hyper[segment])

    return update_segments


def _applying(name: str, update: Any, *, alike: bool, single: bool) -> Any:
    """Returns a kernel that updates rows by gradients, compiled for the given optimizers.

    A general kernel with all optimizers and any segments would take 1.5 times as long for a step on a row, and three
    times as long to compile.

    Args:
        update: the function of the optimizer, if all segments are ``alike``.
        alike: True if all segments have the same optimizer.
        single: True if rows have one segment.
    """
    update_segments = _updating(update, alike=alike, single=single)

    def apply(
        shard: Shard,
        layout: Layout,
        ids: I64,
        tables: I32,
        rows: I32,
        starts: I32,
        order: I32,
        factors: F32,
        grads: SealedF32x2,
        tail: SealedF32x2,
        hyper: F64x2,
        step: int,
        first: int,
    ) -> Any:
        num_columns, num_words, dropped = shard.scratch.shape[1], shard.values.shape[1], 0
        for i in range(len(ids)):
            prefetch_ahead(shard, rows, i, num_words)
            prefetch_terms(grads, order, np.int64(starts[i]) + TERMS_AHEAD)
            table = np.int64(tables[i])
            row = _row_of(shard, ids[i], table, np.int64(rows[i]))
            if row < 0:
                dropped += 1
                note_move(shard, first + i + 1, at.NO_ROW)
                continue
            start, stop = np.int64(starts[i]), np.int64(starts[i + 1])
            sum_terms(shard.scratch, 0, grads, order, factors, start, stop)
            if tail.shape[1] > 0:
                sum_terms(shard.scratch, grads.shape[1], tail, order, factors, start, stop)
            grad = shard.scratch[GRADIENT]
            note_move(shard, first + i, row)
            _mark_moved(shard, table, row, step)
            if layout.dtype == at.FLOAT32:
                columns = shard.values[row, at.VALUES : at.VALUES + num_columns]
                update_segments(shard, layout, row, columns, grad, hyper)
            else:
                read_row(shard, layout, row, shard.scratch, 0)
                update_segments(shard, layout, row, shard.scratch[0], grad, hyper)
                halves = shard.halves[row, 2 * at.VALUES : 2 * at.VALUES + num_columns]
                narrow_row_randomly(
                    layout.dtype, shard.scratch[0], halves, layout.table_seeds[table], ids[i], step
                )
            note_move(shard, first + i + 1, at.NO_ROW)
        return dropped

    # numba's cache identifies functions by their names
    apply.__name__ = apply.__qualname__ = f"apply_{name}"
    return kernel()(apply)


_APPLY: dict[tuple[int | None, bool], Any] = {
    (None, False): _applying("any", None, alike=False, single=False)
}
for _number, (_name, _update) in enumerate(UPDATES.items()):
    _APPLY[_number, True] = _applying(_name, _update, alike=True, single=True)
    _APPLY[_number, False] = _applying(f"{_name}_to_segments", _update, alike=True, single=False)


def applying(optimizers: Sequence[int]) -> Any:
    """Returns the kernel that :func:`apply_gradients` calls for rows whose segments have these optimizers."""
    alike = len(set(optimizers)) == 1
    return _APPLY[optimizers[0] if alike else None, len(optimizers) == 1]


class Terms(NamedTuple):
    """The gradients of keys as sums of rows of a matrix.

    Attributes:
        starts: int32[U+1]: key i has the terms from ``starts[i]`` to ``starts[i+1]``.
        order: int32[M]: the row of each term.
        factors: float32[M], or of length 0 if all are 1.
        tail: float32[·, E]: the columns that follow the columns of the matrix. E may be 0.
    """

    starts: I32
    order: I32
    factors: F32
    tail: F32


def apply_gradients(
    shard: Shard,
    layout: Layout,
    ids: I64,
    tables: I32,
    rows: I32,
    grads: SealedF32x2,
    hyper: F64x2,
    step: int,
    terms: Terms | None = None,
    first: int = 0,
) -> int:
    """Updates the row of every key by its gradient. Returns the number of keys without a row.

    ``rows``, int32[U], are hints for finding the rows. If another key has a row now, the index is searched. A gradient
    never changes the row of another key.

    Args:
        grads: float32[U, W], or float32[·, W - E] whose rows are summed by ``terms``.
        first: the position of the first key among all keys of the call.
    """
    if terms is None:
        numbers = _numbers((len(ids) + 1).bit_length())[: len(ids) + 1]
        terms = Terms(numbers, numbers, _NO_FACTORS, _NO_TAIL)
    apply = applying(layout.segments[:, at.OPTIMIZER].tolist())
    tail = sealed(terms.tail)
    return apply(  # type: ignore[no-any-return]
        shard,
        layout,
        ids,
        tables,
        rows,
        terms.starts,
        terms.order,
        terms.factors,
        grads,
        tail,
        hyper,
        step,
        first,
    )


@functools.lru_cache(maxsize=32)
def _numbers(bits: int) -> I32:
    return np.arange(1 << bits, dtype=np.int32)


@kernel()
def assign(shard: Shard, layout: Layout, rows: I32, values: F32x2, hyper: F64x2, version: int) -> None:
    """Sets the columns of rows to ``values``, float32[U, W]. FTRL's state is adapted to the new values."""
    for i in range(rows.shape[0]):
        if rows[i] < 0:
            continue
        row = np.int64(rows[i])
        note(shard, SETTING, row)
        keep_row(shard, row)
        note_changed(shard, row)
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


@kernel()
def begin_states(shard: Shard, layout: Layout, rows: I32, hyper: F64x2) -> None:
    """Writes the initial optimizer state of rows, int32[K], whose W columns are written already."""
    for i in range(rows.shape[0]):
        read_row(shard, layout, np.int64(rows[i]), shard.scratch, 0)
        begin_state(shard, layout, rows[i], shard.scratch[0], hyper)


@kernel()
def drop_rows(shard: Shard, layout: Layout, rows: I32) -> Any:
    """Removes rows, int32[K], skipping -1. Returns the number of removed rows."""
    dropped = 0
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            table = np.int64(shard.meta[rows[i], at.TABLE])
            drop_row(shard, layout, np.int64(rows[i]))
            shard.tables[table, at.EVICTED] += 1
            dropped += 1
    return dropped


@kernel()
def load_keys(
    shard: Shard, layout: Layout, ids: I64, tables: I32, last_used: I32, counts: I32, versions: I32, rows: I32
) -> None:
    """Finds or makes a row for each key, and writes its meta. Writes the row numbers to ``rows``, int32[K].

    Memory for K rows and slots must be claimed before. The rows become the newest of their tables, in order.
    """
    for i in range(ids.shape[0]):
        table = np.int64(tables[i])
        row = index.find(shard, ids[i], table)
        if row < 0:
            row = take_row(shard, layout, ids[i], table, last_used[i], counts[i], versions[i])
        else:
            shard.meta[row, at.LAST_USED] = last_used[i]
            shard.meta[row, at.COUNT] = counts[i]
            shard.meta[row, at.VERSION] = versions[i]
            if layout.rules[table, at.EVICTION] != at.EVICT_NONE:
                recency.touch(shard, table, row)
        rows[i] = row


@kernel()
def initial_values(layout: Layout, ids: I64, tables: I32, out: F32x2) -> None:
    """Writes the initial values of keys, float32[K, W], not yet rounded to 16 bits."""
    for i in range(ids.shape[0]):
        fill_initial(layout, ids[i], np.int64(tables[i]), out[i])


@kernel()
def relink(shard: Shard, table: int, rows: I32) -> None:
    """Builds a table's list from ``rows``, which has all rows of the table, oldest first."""
    shard.tables[table, at.NEWEST] = at.NO_ROW
    shard.tables[table, at.OLDEST] = at.NO_ROW
    for i in range(rows.shape[0]):
        recency.push_newest(shard, table, np.int64(rows[i]))


@kernel()
def follow(shard: Shard, table: int, oldest: int, newer_of: I32, new_of: I32) -> None:
    """Appends the rows of a saved list to the newest end of a table's list, in the saved order.

    The saved list begins at ``oldest``. ``newer_of`` and ``new_of``, int32[R], have for each saved row number: the next
    newer saved row, and the new row number or -1.
    """
    row = np.int64(oldest)
    for _ in range(newer_of.shape[0]):
        if row < 0:
            return
        if new_of[row] >= 0:
            recency.touch(shard, table, np.int64(new_of[row]))
        row = np.int64(newer_of[row])


@kernel()
def add_cells(mine: U8, theirs: SealedU8) -> None:
    """Adds counts of one Bloom filter to another, cell by cell, saturating."""
    for i in range(mine.shape[0]):
        mine[i] = min(np.int64(mine[i]) + np.int64(theirs[i]), np.int64(255))
