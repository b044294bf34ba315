"""Gathering rows out of decoded columns: single ids, and bags between offsets.

Indices are made unsigned where they are used: Numba then leaves out its test for negative ones, and
the gathers of a loop overlap (11.5 instead of 5.9 million rows of 26 features a second).

Shapes: R rows of a column, M values in all its bags, B rows gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.jit import njit


@njit
def gather(values: Any, index: Any, out: Any) -> None:
    """Writes ``values[index]`` to ``out``: T[R], int64[B], T[B]."""
    for b in range(len(index)):
        out[b] = values[np.uint64(index[b])]


@njit
def gather_rows(values: Any, index: Any, out: Any) -> None:
    """Writes ``values[index]`` to ``out``: T[R, X], int64[B], T[B, X]."""
    for b in range(len(index)):
        row = np.uint64(index[b])
        for x in range(values.shape[1]):
            out[b, x] = values[row, x]


@njit
def count_bags(offsets: Any, index: Any) -> Any:
    """How many values the bags ``index`` hold together: int64[R+1], int64[B]."""
    total = 0
    for b in range(len(index)):
        total += offsets[index[b] + 1] - offsets[index[b]]
    return total


@njit
def bag_ends(offsets: Any, index: Any, first: Any, ends: Any) -> None:
    """Writes where each gathered bag ends, the first at ``first``: int64[R+1], int64[B], int, int[B]."""
    end = first
    for b in range(len(index)):
        end += offsets[index[b] + 1] - offsets[index[b]]
        ends[b] = end


@njit
def gather_bags(values: Any, offsets: Any, index: Any, out: Any) -> None:
    """Writes the values of the bags ``index`` one after the other: T[M], int64[R+1], int64[B], T[·]."""
    at = 0
    for b in range(len(index)):
        for i in range(offsets[index[b]], offsets[index[b] + 1]):
            out[at] = values[np.uint64(i)]
            at += 1


@njit
def copy_tails(values: Any, offsets: Any, short_offsets: Any, out: Any) -> None:
    """Copies the last values of each bag, as many as ``short_offsets`` leaves room for."""
    for row in range(len(offsets) - 1):
        begin = short_offsets[row]
        size = short_offsets[row + 1] - begin
        source = offsets[row + 1] - size
        for i in range(size):
            out[begin + i] = values[source + i]
