"""Kernels of the codecs of activations and their gradients in ``comm/codecs/`` (HT §4.2).

A float32 is represented by its bits. The bits of magnitudes have the same order as the magnitudes. Infinity is above
all numbers, and NaN is above infinity. Shapes: n numbers, R rows of D numbers, k numbers kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I64, U16, U32, F32x2, SealedF32, SealedF32x2, U8x2
from girih.kernels.cpu.jit import kernel, njit_lean

LEVELS = 255.0
LARGEST = float(np.finfo(np.float32).max)
NARROW = 2.0**-100
"""If the range of a row is smaller than this, only its least number is sent."""
NUM_COUNTS = 1 << 16
_MAGNITUDE = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_LOW_BITS = 15  # low bits of the 31 bits of a magnitude


@njit_lean
def _bfloat16(bits: Any) -> Any:
    """Returns the bfloat16 nearest to a float32, ties to even, both as bits. NaN stays NaN."""
    magnitude = np.uint32(bits & np.uint32(_MAGNITUDE))
    sign = np.uint32(np.uint32(bits & np.uint32(0x8000_0000)) >> np.uint32(16))
    odd = np.uint32(magnitude >> np.uint32(16)) & np.uint32(1)
    nearest = np.uint32(np.uint32(magnitude + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
    half = np.uint32(0x7FC0) if magnitude > np.uint32(_INFINITY) else np.uint32(nearest)
    return np.uint16(sign | half)


@kernel()
def narrow(values: SealedF32, halves: U16) -> None:
    """Rounds ``values``, float32[n], to bfloat16, and writes the bits to ``halves``, uint16[n]."""
    bits = values.view(np.uint32)
    for i in range(len(bits)):
        halves[i] = _bfloat16(bits[i])


@njit_lean
def _ordered(bits: Any) -> Any:
    """Maps a float32's bits, int32, to an integer. These integers have the order of the floats.

    The function is its own inverse.
    """
    return np.int32(bits ^ (np.int32(bits >> 31) & np.int32(_MAGNITUDE)))


@kernel()
def quantize_rows(values: SealedF32x2, codes: U8x2, ranges: F32x2) -> None:
    """Encodes each number of a row as a number of steps above the row's least number.

    Args:
        values: float32[R, D], D > 0.
        codes: uint8[R, D], output.
        ranges: float32[R, 2], output: step and least number of each row. Both are NaN if a number is not finite, or if
            the range exceeds float32.
    """
    bits, range_bits = values.view(np.int32), ranges.view(np.int32)
    width = values.shape[1]
    for r in range(values.shape[0]):
        least, most = np.int32(0x7FFF_FFFF), np.int32(-0x8000_0000)
        for i in range(width):
            place = _ordered(bits[r, i])
            least, most = min(least, place), max(most, place)
        range_bits[r, 0], range_bits[r, 1] = _ordered(most), _ordered(least)
        low = ranges[r, 1]
        span = np.float64(ranges[r, 0]) - np.float64(low)
        if most >= _INFINITY or least <= -_INFINITY - 1 or span > LARGEST:
            ranges[r, 0], ranges[r, 1] = np.float32(np.nan), np.float32(np.nan)
            codes[r, :] = 0
        elif span < NARROW:
            ranges[r, 0] = np.float32(0)
            codes[r, :] = 0
        else:
            ranges[r, 0] = np.float32(span / LEVELS)
            factor = np.float32(LEVELS / span)
            for i in range(width):
                steps = np.float32(values[r, i] - low) * factor
                codes[r, i] = np.uint8(np.int32(np.rint(steps)))


@kernel()
def keep_largest(values: SealedF32, counts: I64, indices: U32, halves: U16) -> None:
    """Writes the k numbers of largest magnitude, in the order of their indices. Prefers the first of equal magnitudes.

    Args:
        values: float32[n].
        counts: scratch, int64[NUM_COUNTS].
        indices: uint32[k], output, 0 < k ≤ n.
        halves: uint16[k], output: the numbers, as bfloat16.
    """
    bits = values.view(np.uint32)
    num_values, left = len(bits), np.int64(len(indices))
    counts[:] = 0
    for i in range(num_values):
        counts[np.uint32(bits[i] & np.uint32(_MAGNITUDE)) >> np.uint32(_LOW_BITS)] += 1
    high = np.int64(NUM_COUNTS - 1)
    while counts[high] < left:
        left -= counts[high]
        high -= 1
    counts[:] = 0
    for i in range(num_values):
        place = np.int64(bits[i] & np.uint32(_MAGNITUDE))
        if place >> _LOW_BITS == high:
            counts[place & ((1 << _LOW_BITS) - 1)] += 1
    low = np.int64((1 << _LOW_BITS) - 1)
    while counts[low] < left:
        left -= counts[low]
        low -= 1
    least = np.uint32((high << _LOW_BITS) | low)
    num = np.int64(0)
    for i in range(num_values):
        magnitude = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        if magnitude < least:
            continue
        if magnitude == least:
            if left == 0:
                continue
            left -= 1
        indices[num] = i
        halves[num] = _bfloat16(bits[i])
        num += 1
