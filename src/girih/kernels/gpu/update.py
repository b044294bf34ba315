"""Changes rows in GPU memory: updates them by gradients, and sets them to given values.

Shapes: U unique keys, W columns of a row, D columns of a segment, S segments.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.gpu.counting import ROWS_EVER
from girih.kernels.gpu.gradients import summed
from girih.kernels.gpu.index import find_rows
from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import (
    FLOAT32,
    NO_ROW,
    VALUES,
    VERSION,
    columns_at,
    floats_at,
    holds_key,
    items,
    load,
    record,
    whole_vectors,
    words_at,
)
from girih.kernels.gpu.lookup import load_columns
from girih.kernels.gpu.optimizers import FTRL, settle, updated
from girih.kernels.gpu.rounding import narrow, row_noise

_ROWS_EVER = constexpr(ROWS_EVER)


@kernel
def rows_to_move(
    slots: tensor, num_slots: tensor, chunks: tensor, keys: tensor, tables: tensor, num_keys: tensor, rows: tensor, words: tensor,
    refused: tensor, step: tensor, moving: tensor, CHUNK_BITS: constexpr, STRIDE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Finds the row of each key, and marks the row as updated in this step. Checks the hints in ``rows``.

    Args:
        rows: int32[U], hints. words: see :mod:`girih.kernels.gpu.counting`.
        refused: int32[1]. If it is not negative, the step is refused and no row is updated.
        moving: int32[U], output: -1 for keys without a row, and for all keys of a refused step.
    """
    i = items(BLOCK)
    mask = (i < tl.load(num_keys)) & (tl.load(refused) < 0)
    key_id = load(keys + i, mask)
    table = load(tables + i, mask)
    row = tl.load(rows + i, mask=mask, other=NO_ROW)
    hinted = mask & (row >= 0) & (row < tl.load(words + _ROWS_EVER))
    there = holds_key(record(chunks, row, hinted, CHUNK_BITS, STRIDE), key_id, table, hinted)
    lost = mask & (there == 0)
    row = tl.where(there, row, find_rows(slots, num_slots, chunks, key_id, table, lost, CHUNK_BITS, STRIDE))
    known = mask & (row >= 0)
    words = words_at(record(chunks, row, known, CHUNK_BITS, STRIDE))
    version = load(words + VERSION, known)
    tl.store(words + VERSION, tl.maximum(version, step), mask=known)
    tl.store(moving + i, tl.where(known, row, NO_ROW), mask=i < tl.load(num_keys))


@triton.jit
def _tile(tile: tensor, rows: tensor, num_keys: tensor, BLOCK: constexpr) -> Any:
    """Returns the keys of a tile, their rows, and whether each row exists."""
    i = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < num_keys, other=NO_ROW)
    return i, row, row >= 0


@kernel
def move_rows(
    chunks: tensor, rows: tensor, keys: tensor, tables: tensor, num_keys: tensor, hyper: tensor,
    seeds: tensor, step: tensor, gradients: tensor, num_columns: tensor, first_column: tensor,
    dim: tensor, state_start: tensor, OPTIMIZER: constexpr, STATE_WIDTH: constexpr, DTYPE: constexpr,
    ALIGNED: constexpr, CHUNK_BITS: constexpr, STRIDE: constexpr, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Makes one optimizer step on one segment of the rows of keys.

    Args:
        rows: int32[U], -1 for keys without a row.
        hyper: float64[8], the hyperparameters of the segment. seeds: int64[T], for random rounding.
        gradients: float32[U, W]. W is ``num_columns``.
        first_column, dim, state_start: the segment's first column, its number of columns, the first word of its state.
    """
    column, num = tl.arange(0, COLUMNS)[None, :], tl.load(num_keys)
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK), tl.num_programs(0)):
        i, row, mask = _tile(tile, rows, num, BLOCK)
        place = i[:, None].to(tl.int64) * num_columns + first_column + column
        gradient = load(gradients + place, mask[:, None] & (column < dim))
        _move(
            chunks, row, keys, tables, hyper, seeds, step, first_column, dim, state_start, i, mask, column, gradient,
            OPTIMIZER, STATE_WIDTH, DTYPE, ALIGNED, CHUNK_BITS, STRIDE,
        )  # fmt: skip


@kernel
def sum_and_move_rows(
    chunks: tensor, rows: tensor, keys: tensor, tables: tensor, num_keys: tensor, hyper: tensor,
    seeds: tensor, step: tensor, gradients: tensor, num_columns: tensor, first_column: tensor,
    dim: tensor, state_start: tensor, sources: tensor, num_features: tensor, features: tensor, examples: tensor, positions: tensor,
    factors: tensor, starts: tensor, pieces: tensor, sums: tensor, largest: tensor, limit: tensor, OPTIMIZER: constexpr,
    STATE_WIDTH: constexpr, DTYPE: constexpr, ALIGNED: constexpr, POOLED: constexpr, WHOLE: constexpr, CHUNK_BITS: constexpr, STRIDE: constexpr,
    COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Updates rows like :func:`move_rows`, and also sums the gradients if no sum can overflow.

    See :class:`girih.kernels.gpu.gradients.FusedInputs`.
    """
    column, num = tl.arange(0, COLUMNS)[None, :], tl.load(num_keys)
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK), tl.num_programs(0)):
        i, row, mask = _tile(tile, rows, num, BLOCK)
        here = mask & (tl.load(largest) <= limit)
        gradient = summed(
            sources, num_features, features, examples, positions, factors, starts, pieces, sums, i, here, column, dim, POOLED,
            WHOLE, ALIGNED, COLUMNS, BLOCK,
        )  # fmt: skip
        place = i[:, None].to(tl.int64) * num_columns + first_column + column
        written = (mask & (here == 0))[:, None] & (column < dim)
        gradient += load(gradients + place, written)
        _move(
            chunks, row, keys, tables, hyper, seeds, step, first_column, dim, state_start, i, mask, column, gradient,
            OPTIMIZER, STATE_WIDTH, DTYPE, ALIGNED, CHUNK_BITS, STRIDE,
        )  # fmt: skip


@triton.jit
def _move(
    chunks: tensor, row: tensor, keys: tensor, tables: tensor, hyper: tensor, seeds: tensor, step: tensor,
    first_column: tensor, dim: tensor, state_start: tensor, i: tensor, mask: tensor, column: tensor, gradient: tensor,
    OPTIMIZER: constexpr, STATE_WIDTH: constexpr, DTYPE: constexpr, ALIGNED: constexpr, CHUNK_BITS: constexpr, STRIDE: constexpr,
) -> None:  # fmt: skip
    """Makes one optimizer step on the rows, int32[K], of keys with true ``mask``, by gradients, float32[K, C]."""
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    SIZE: constexpr = 4 if DTYPE == FLOAT32 else 2
    start = address + 4 * VALUES + first_column * SIZE
    inside = mask[:, None] & (column < dim)
    values = load_columns(start, column, inside, DTYPE, ALIGNED)
    state = address + 4 * state_start
    values = updated(
        values, gradient, state, hyper, dim, column, mask[:, None], OPTIMIZER, STATE_WIDTH, ALIGNED
    )
    place = columns_at(start, column, DTYPE, ALIGNED)
    if DTYPE == FLOAT32:
        tl.store(place, values, mask=inside)
    else:
        key_id = load(keys + i, mask)[:, None]
        table = load(tables + i, mask)
        seed = load(seeds + table, mask).to(tl.uint64, bitcast=True)[:, None]
        noise = row_noise(seed, key_id, tl.zeros_like(key_id) + step, first_column + column)
        halves = narrow(values, noise, DTYPE, False)
        tl.store(place, halves, mask=inside)


@kernel
def assign_rows(
    chunks: tensor, rows: tensor, num_keys: tensor, source: tensor, num_columns: tensor, hyper: tensor, step: tensor,
    first_column: tensor, dim: tensor, state_start: tensor, OPTIMIZER: constexpr, DTYPE: constexpr,
    ALIGNED: constexpr, CHUNK_BITS: constexpr, STRIDE: constexpr, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Sets one segment of rows to columns of ``source``, float32[U, W]. FTRL's state is adapted to the new values."""
    column = tl.arange(0, COLUMNS)[None, :]
    i, row, mask = _tile(tl.program_id(0), rows, tl.load(num_keys), BLOCK)
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    inside = mask[:, None] & (column < dim)
    place = i.to(tl.int64)[:, None] * num_columns + first_column + column
    values = load(source + place, inside)
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    words = words_at(address)
    version = load(words + VERSION, mask)
    tl.store(words + VERSION, tl.maximum(version, step), mask=mask)
    SIZE: constexpr = 4 if DTYPE == FLOAT32 else 2
    start = columns_at(address + 4 * VALUES + first_column * SIZE, column, DTYPE, ALIGNED)
    if DTYPE == FLOAT32:
        tl.store(start, values, mask=inside)
    else:
        tl.store(start, narrow(values, 0, DTYPE, True), mask=inside)
    if OPTIMIZER == FTRL:
        settle(values, floats_at(address + 4 * state_start)[:, None] + column, hyper, dim, inside)
