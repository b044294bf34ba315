"""Rows of a column to their places in batches: single ids, bags between offsets, rows of a matrix.

A call serves one column and many batches, so that the column is read while it lies in cache. Loops run
over slices and indices are made unsigned: Numba then leaves out its test for negative ones, and the loads
of a loop overlap (26 columns of a million rows, shuffled: 57 instead of 123 ms).

Shapes: R rows of a column, M values in all its bags, K batches of B rows each, X columns of a matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.jit import njit_lean, prefetch, prefetch_at

AHEAD = 16  # rows between asking for one and reading it
LINE_BYTES = 64


@njit_lean
def take(values: Any, index: Any, starts: Any, out: Any) -> None:
    """Writes ``values[index]``, batch k from ``out[starts[k]]`` on: T[R], int64[K, B], int64[K], T[·]."""
    for k in range(len(starts)):
        rows = index[k]
        part = out[starts[k] : starts[k] + len(rows)]
        for b in range(len(rows)):
            part[b] = values[np.uint64(rows[b])]


@njit_lean
def take_rows(values: Any, index: Any, out: Any) -> None:
    """Writes ``values[index]``: T[R, X], int64[B], T[B, X]."""
    width = values.shape[1]
    row_bytes = width * values.itemsize
    for b in range(len(index)):
        if b + AHEAD < len(index):
            for byte in range(0, row_bytes, LINE_BYTES):
                prefetch_at(values, index[b + AHEAD], byte)
        row = values[np.uint64(index[b])]
        target = out[b]
        for x in range(width):
            target[x] = row[x]


@njit_lean
def count_values(offsets: Any, index: Any, counts: Any) -> None:
    """Writes how many values the bags of each batch hold: int64[R+1], int64[K, B], int64[K]."""
    starts, ends = offsets[:-1], offsets[1:]
    for k in range(len(counts)):
        rows = index[k]
        total = np.int64(0)
        for b in range(len(rows)):
            row = np.uint64(rows[b])
            total += ends[row] - starts[row]
        counts[k] = total


@njit_lean
def bag_ends(offsets: Any, index: Any, firsts: Any, ends: Any) -> None:
    """Writes where each bag taken ends, the first bag of batch k beginning at ``firsts[k]``.

    Shapes: int64[R+1], int64[K, B], int64[K], int[K, B].
    """
    befores, afters = offsets[:-1], offsets[1:]
    for k in range(len(firsts)):
        rows = index[k]
        part = ends[k]
        end = firsts[k]
        for b in range(len(rows)):
            row = np.uint64(rows[b])
            end += afters[row] - befores[row]
            part[b] = end


@njit_lean
def take_bags(values: Any, offsets: Any, index: Any, starts: Any, out: Any) -> None:
    """Writes the values of the bags ``index`` one after the other, batch k from ``out[starts[k]]`` on.

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


@njit_lean
def copy_tails(values: Any, offsets: Any, short_offsets: Any, out: Any) -> None:
    """Copies the last values of each bag, as many as ``short_offsets`` leaves room for: T[M], int64[R+1] twice."""
    for row in range(len(offsets) - 1):
        begin = short_offsets[row]
        size = short_offsets[row + 1] - begin
        source = offsets[row + 1] - size
        for i in range(size):
            out[begin + i] = values[source + i]
