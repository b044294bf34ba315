"""Turns strings into ids, directly from the buffers of a column.

A *span* is a pair of byte positions in ``data``. Arrow's offsets are adjacent spans. Hashes are XXH64 with seed 0, and
are equal on every machine. For the public specification see github.com/Cyan4973/xxHash.

Shapes: R strings.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I64, U8, U64, Bools, SealedI64, SealedU8
from girih.kernels.cpu.jit import kernel, njit_lean

PRIME_1 = np.uint64(0x9E3779B185EBCA87)
PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME_3 = np.uint64(0x165667B19E3779F9)
PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME_5 = np.uint64(0x27D4EB2F165667C5)
MAX_INT = np.uint64(0x7FFFFFFFFFFFFFFF)
MAX_TENTH = np.uint64(0x1999999999999999)
"""The largest number to which a decimal digit can be appended in 64 bits. To this number, only digits up to 5."""


def ids_of_strings(data: SealedU8, starts: SealedI64, ends: SealedI64) -> tuple[I64, Bools]:
    """Returns the ids of R strings. If a string is the plain decimal spelling of an integer, its id is this integer.

    Otherwise the id is the XXH64 of the string.

    Returns:
        The ids, int64[R]. And bool[R], True for strings that look like a whole float, such as ``7.0`` or ``1.5e+17``.
    """
    ids, floats = np.empty(len(starts), dtype=np.uint64), np.zeros(len(starts), dtype=np.bool_)
    with np.errstate(over="ignore"):
        _ids_of_strings(data, starts, ends, ids, floats)
    return ids.view(np.int64), floats


@njit_lean
def _load(data: Any, at: Any, count: Any) -> Any:
    value = np.uint64(0)
    for byte in range(count):
        value |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return value


@njit_lean
def _rotate(value: Any, bits: Any) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@njit_lean
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1


@njit_lean
def _merge(value: Any, lane: Any) -> Any:
    return (value ^ _round(np.uint64(0), lane)) * PRIME_1 + PRIME_4


@njit_lean
def _xxh64(data: Any, start: Any, end: Any) -> Any:
    at = start
    if end - start >= 32:
        lane_1 = PRIME_1 + PRIME_2
        lane_2 = PRIME_2
        lane_3 = np.uint64(0)
        lane_4 = ~PRIME_1 + np.uint64(1)
        while at + 32 <= end:
            lane_1 = _round(lane_1, _load(data, at, 8))
            lane_2 = _round(lane_2, _load(data, at + 8, 8))
            lane_3 = _round(lane_3, _load(data, at + 16, 8))
            lane_4 = _round(lane_4, _load(data, at + 24, 8))
            at += 32
        value = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
        value = _merge(_merge(_merge(_merge(value, lane_1), lane_2), lane_3), lane_4)
    else:
        value = PRIME_5
    value += np.uint64(end - start)
    while at + 8 <= end:
        value ^= _round(np.uint64(0), _load(data, at, 8))
        value = _rotate(value, 27) * PRIME_1 + PRIME_4
        at += 8
    if at + 4 <= end:
        value ^= _load(data, at, 4) * PRIME_1
        value = _rotate(value, 23) * PRIME_2 + PRIME_3
        at += 4
    while at < end:
        value ^= np.uint64(data[at]) * PRIME_5
        value = _rotate(value, 11) * PRIME_1
        at += 1
    value ^= value >> np.uint64(33)
    value *= PRIME_2
    value ^= value >> np.uint64(29)
    value *= PRIME_3
    value ^= value >> np.uint64(32)
    return value


@njit_lean
def canonical(data: Any, start: Any, end: Any) -> Any:
    """Returns (True, its 64 bits) if a string is the plain decimal spelling of an integer from -2**63 to 2**64 - 1."""
    zero = np.uint64(0)
    if end <= start:
        return False, zero
    negative = data[start] == 45
    first = start + 1 if negative else start
    digits = end - first
    if digits < 1 or digits > 20:
        return False, zero
    if data[first] == 48:
        return digits == 1 and not negative, zero
    value = zero
    for at in range(first, end):
        digit = np.int64(data[at]) - 48
        if digit < 0 or digit > 9:
            return False, zero
        if value > MAX_TENTH or (value == MAX_TENTH and digit > 5):
            return False, zero
        value = value * np.uint64(10) + np.uint64(digit)
    if negative:
        return value <= MAX_INT + np.uint64(1), ~value + np.uint64(1)
    return True, value


@njit_lean
def _is_whole_float(data: Any, start: Any, end: Any) -> Any:
    """Returns whether a string is like ``7.0`` or ``1.5e+17``.

    The string has digits and ``.0``, or digits and dots, ``e+`` and two more characters.
    """
    # Test for dot and plus first. They are rare, so branch prediction works.
    if end - start >= 3 and data[end - 2] == 46 and data[end - 1] == 48:
        behind, has_exponent = end - 2, False
    elif end - start >= 5 and data[end - 3] == 43 and data[end - 4] == 101:
        behind, has_exponent = end - 4, True
    else:
        return False
    first = start + 1 if data[start] == 45 else start
    for at in range(first, behind):
        if not (48 <= data[at] <= 57 or (has_exponent and data[at] == 46)):
            return False
    return behind > first


@kernel()
def _ids_of_strings(data: SealedU8, starts: SealedI64, ends: SealedI64, ids: U64, floats: Bools) -> None:
    for row in range(len(starts)):
        is_integer, value = canonical(data, starts[row], ends[row])
        if not is_integer:
            value = _xxh64(data, starts[row], ends[row])
            floats[row] = _is_whole_float(data, starts[row], ends[row])
        ids[row] = value


@kernel()
def unpack(data: SealedU8, offsets: I64, out: U8) -> Any:
    """Unpacks strings that each follow their length, a little-endian uint32, into adjacent bytes.

    Args:
        offsets: int64[R+1], output: the end of each string in ``out``. The caller sets the first offset to 0.
        out: uint8[·], output, with the size of ``data`` without the R lengths.

    Returns:
        The number of bytes of ``data`` that were read. If ``data`` does not consist of R strings, the result is -1 or
        smaller than the size of ``data``.
    """
    at = np.int64(0)
    for row in range(len(offsets) - 1):
        if at + 4 > len(data):
            return np.int64(-1)
        length = np.int64(data[at]) | np.int64(data[at + 1]) << 8 | np.int64(data[at + 2]) << 16
        length |= np.int64(data[at + 3]) << 24
        at += 4
        start = offsets[row]
        if at + length > len(data) or start + length > len(out):
            return np.int64(-1)
        for byte in range(length):
            out[start + byte] = data[at + byte]
        offsets[row + 1] = start + length
        at += length
    return at
