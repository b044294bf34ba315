"""Copies rows of a column to their places in batches. A row is an id, a bag between offsets, or a row of a matrix.

A call copies the rows of one column for many batches, so that the column stays in the cache. Loops run over slices and
use unsigned indices. So numba does not test for negative indices, and the loads of a loop overlap. Example: 26 shuffled
columns of a million rows take 57 instead of 123 ms.

Shapes: R rows of a column, M values in all its bags, K batches of B rows each, X columns of a matrix, S ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I64, F32x2, I32x2, I64x2, SealedF32, SealedF32x2, SealedI64
from girih.kernels.cpu.jit import kernel
from girih.kernels.cpu.system import prefetch, prefetch_columns

_IDS, _WEIGHTS = {"values": SealedI64, "out": I64}, {"values": SealedF32, "out": F32}
AHEAD = 16  # rows between the prefetch and the read of a row


@kernel(_IDS, _WEIGHTS)
def take(values: Any, index: I64x2, starts: I64, out: Any) -> None:
    """Writes ``values[index]``. Batch k begins at ``out[starts[k]]``. Shapes: T[R], int64[K, B], int64[K], T[·]."""
    for k in range(len(starts)):
        rows = index[k]
        part = out[starts[k] : starts[k] + len(rows)]
        for b in range(len(rows)):
            part[b] = values[np.uint64(rows[b])]


@kernel()
def take_rows(values: SealedF32x2, index: I64, out: F32x2) -> None:
    """Writes ``values[index]`` to ``out``. Shapes: float32[R, X], int64[B], float32[B, X]."""
    width = values.shape[1]
    for b in range(len(index)):
        if b + AHEAD < len(index):
            prefetch_columns(values, index[b + AHEAD], 0, width)
        row = values[np.uint64(index[b])]
        target = out[b]
        for x in range(width):
            target[x] = row[x]


@kernel()
def count_values(offsets: SealedI64, index: I64x2, counts: I64) -> None:
    """Writes the number of values in the bags of each batch to ``counts``.

    Shapes: int64[R+1], int64[K, B], int64[K].
    """
    starts, ends = offsets[:-1], offsets[1:]
    for k in range(len(counts)):
        rows = index[k]
        total = np.int64(0)
        for b in range(len(rows)):
            row = np.uint64(rows[b])
            total += ends[row] - starts[row]
        counts[k] = total


@kernel()
def bag_ends(offsets: SealedI64, index: I64x2, firsts: I64, column: int, ends: I32x2) -> None:
    """Writes the end of each copied bag to ``ends``, from ``column`` on.

    The first bag of batch k begins at ``firsts[k]``. Shapes: int64[R+1], int64[K, B], int64[K], int32[K, ·].
    """
    befores, afters = offsets[:-1], offsets[1:]
    for k in range(len(firsts)):
        rows = index[k]
        part = ends[k, column : column + len(rows)]
        end = firsts[k]
        for b in range(len(rows)):
            row = np.uint64(rows[b])
            end += afters[row] - befores[row]
            part[b] = end


@kernel(_IDS, _WEIGHTS)
def take_bags(values: Any, offsets: SealedI64, index: I64x2, starts: I64, out: Any) -> None:
    """Copies the values of the bags ``index`` to adjacent memory. Batch k begins at ``out[starts[k]]``.

    Shapes: T[M], int64[R+1], int64[K, B], int64[K], T[·].
    """
    befores, afters = offsets[:-1], offsets[1:]
    for k in range(len(starts)):
        rows = index[k]
        at = starts[k]
        for b in range(len(rows)):
            if b + AHEAD < len(rows):
                prefetch(values, befores[np.uint64(rows[b + AHEAD])])
            row = np.uint64(rows[b])
            size = afters[row] - befores[row]
            bag = values[befores[row] : afters[row]]
            target = out[at : at + size]
            for i in range(size):
                target[i] = bag[i]
            at += size


@kernel(_IDS, _WEIGHTS)
def copy_tails(values: Any, offsets: SealedI64, short_offsets: SealedI64, out: Any) -> None:
    """Copies the last values of each bag. ``short_offsets`` are the bounds of the shortened bags.

    Shapes: T[M], int64[R+1], int64[R+1], T[·].
    """
    for row in range(len(offsets) - 1):
        begin = short_offsets[row]
        size = short_offsets[row + 1] - begin
        source = offsets[row + 1] - size
        for i in range(size):
            out[begin + i] = values[source + i]


@kernel(_IDS, _WEIGHTS)
def copy_stretches(values: Any, begins: I64, ends: I64, starts: I64, out: Any) -> None:
    """Copies ``values[begins[s]:ends[s]]`` to ``out`` from ``starts[s]`` on. These three arrays are int64[S]."""
    for s in range(len(begins)):
        size = ends[s] - begins[s]
        stretch = values[begins[s] : ends[s]]
        target = out[starts[s] : starts[s] + size]
        for i in range(size):
            target[i] = stretch[i]
