"""Finds the positions of the label and of the pairs in lines of text.

A pair is ``index:value`` or ``field:index:value``.

Shapes: L lines, P pairs of all lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I64, U8, I64x2, SealedU8
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.strings import MAX_INT, canonical

GOOD, BLANK, NO_COLON, COLONS, NO_INTEGER, NO_VALUE = 0, 1, 2, 3, 4, 5
"""The first error of a line, see :func:`split_pairs`."""


@njit_lean
def _integer(data: Any, start: Any, end: Any) -> Any:
    """Returns (True, the 64 bits) if a word is an integer from -2**63 to 2**64 - 1. Leading zeros are allowed."""
    negative = end > start and data[start] == 45
    first = start + 1 if negative else start
    while first + 1 < end and data[first] == 48:
        first += 1
    good, value = canonical(data, first, end)
    if first < end and data[first] == 45:
        good = False
    if negative:
        good = good and value <= MAX_INT + np.uint64(1)
        value = ~value + np.uint64(1)
    return good, np.int64(value)


@kernel()
def split_pairs(
    data: SealedU8, colons: int, labels: I64x2, faults: U8, rows: I64, cuts: I64x2, ids: I64
) -> Any:
    """Splits lines, each of which ends with a line break. Text after a ``#`` is dropped.

    Args:
        colons: the number of colons in a pair: 1, or 2 with a field.
        labels: int64[L, 2], output: the begin and end of each line's label, if it has one.
        faults: uint8[L], output: GOOD, or the error of a line. The caller sets all to BLANK.
        rows: int64[P], output: the line of each pair.
        cuts: int64[P, 4], output: the begin of a pair, its index and its value, and its end.
        ids: int64[P], output: the index of each pair.

    Returns:
        The number of pairs, P.
    """
    line, pair, at = np.int64(0), np.int64(0), np.int64(0)
    is_first = True
    while at < len(data):
        byte = data[at]
        if byte == 10:
            line += 1
            is_first = True
        if byte == 35:
            while data[at + 1] != 10:
                at += 1
        if byte == 10 or byte == 32 or byte == 9 or byte == 13 or byte == 35:
            at += 1
            continue
        start, index, value, found = at, at, at, 0
        while byte != 10 and byte != 32 and byte != 9 and byte != 13 and byte != 35:
            if byte == 58:
                found += 1
                if found == colons - 1:
                    index = at + 1
                if found == colons:
                    value = at + 1
            at += 1
            byte = data[at]
        fault = GOOD
        if found == 0 and is_first:
            labels[line, 0], labels[line, 1] = start, at
        elif found != colons:
            fault = NO_COLON if found == 0 else COLONS
        else:
            good, number = _integer(data, index, value - 1)
            fault = NO_INTEGER if not good else NO_VALUE if value == at else GOOD
            rows[pair], ids[pair] = line, number
            cuts[pair, 0], cuts[pair, 1], cuts[pair, 2], cuts[pair, 3] = start, index, value, at
            pair += 1
        if faults[line] == BLANK or faults[line] == GOOD:
            faults[line] = fault
        is_first = False
    return pair


@kernel()
def copy_words(data: SealedU8, starts: I64, ends: I64, offsets: I64, out: U8) -> None:
    """Copies words to adjacent memory, and writes the end of each word to ``offsets``.

    Shapes: int64[R], int64[R], int64[R+1], uint8[·].
    """
    at = np.int64(0)
    for word in range(len(starts)):
        for byte in range(starts[word], ends[word]):
            out[at] = data[byte]
            at += 1
        offsets[word + 1] = at
