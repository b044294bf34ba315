"""Gathering rows out of decoded columns: single ids, and bags between offsets.

Shapes: R rows of a column, M values in all its bags, B rows gathered.
"""

from __future__ import annotations

from typing import Any

from girih.kernels.cpu.jit import njit


@njit
def gather(values: Any, index: Any, out: Any) -> None:
    """Writes ``values[index]`` to ``out``: T[R], int64[B], T[B]."""
    for b in range(len(index)):
        out[b] = values[index[b]]


@njit
def count_bags(offsets: Any, index: Any) -> Any:
    """How many values the bags ``index`` hold together: int64[R+1], int64[B]."""
    total = 0
    for b in range(len(index)):
        total += offsets[index[b] + 1] - offsets[index[b]]
    return total


@njit
def bag_ends(offsets: Any, index: Any, first: Any, ends: Any) -> None:
    """Writes where each gathered bag ends, the first beginning at ``first``: int64[R+1], int64[B], int, int[B]."""
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
            out[at] = values[i]
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
