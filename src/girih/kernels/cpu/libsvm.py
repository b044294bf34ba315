"""Finds the pieces of ``label index:value index:value …`` lines.

Shapes: R lines, P pairs expected on each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.jit import njit

OK, BLANK, PAIR_COUNT, NO_COLON, BAD_INDEX = range(5)


@njit
def split_pairs(
    data: Any,
    starts: Any,
    ends: Any,
    labels: Any,
    indices: Any,
    value_starts: Any,
    value_ends: Any,
    counts: Any,
    status: Any,
) -> None:
    """ShardedParameters R lines at spaces, and pairs at their colon; what follows a ``#`` does not count.

    Args:
        data: uint8[·]; starts, ends: int64[R], the lines.
        labels: int64[R, 2], the span of the label, empty where the line begins with a pair.
        indices, value_starts, value_ends: int64[P, R], the index of each pair and the span of its value.
        counts: int64[R], the pairs found. status: uint8[R], what is wrong with the line, if anything.
    """
    num_pairs = len(indices)
    for row in range(len(starts)):
        at = starts[row]
        end = ends[row]
        labels[row, 0] = at
        labels[row, 1] = at
        pairs = 0
        tokens = 0
        problem = OK
        while at < end and data[at] != 35:
            if data[at] == 32 or data[at] == 9 or data[at] == 13:
                at += 1
                continue
            begin = at
            colon = np.int64(-1)
            while at < end and data[at] != 32 and data[at] != 9 and data[at] != 13 and data[at] != 35:
                if data[at] == 58 and colon < 0:
                    colon = at
                at += 1
            tokens += 1
            if colon < 0:
                if tokens == 1:
                    labels[row, 0] = begin
                    labels[row, 1] = at
                elif problem == OK:
                    problem = NO_COLON
                continue
            if pairs < num_pairs:
                negative = data[begin] == 45
                first = begin + 1 if negative else begin
                index = np.int64(0)
                if colon - first < 1 or colon - first > 18:
                    problem = BAD_INDEX
                else:
                    for i in range(first, colon):
                        if data[i] < 48 or data[i] > 57:
                            problem = BAD_INDEX
                            break
                        index = index * 10 + np.int64(data[i]) - 48
                indices[pairs, row] = -index if negative else index
                value_starts[pairs, row] = colon + 1
                value_ends[pairs, row] = at
            pairs += 1
        counts[row] = pairs
        if tokens == 0:
            problem = BLANK
        elif problem == OK and pairs != num_pairs:
            problem = PAIR_COUNT
        status[row] = problem
