"""16-bit floats: exact widening, rounding to nearest, and stochastic rounding.

The probability of rounding up in stochastic rounding is proportional to the part that is cut off. So updates that are
smaller than the spacing of the format are correct on average. The random noise has 16 bits, so the probability is exact
for normal numbers, and accurate to 2⁻¹⁶ for subnormal numbers. bfloat16 and float16 saturate at their largest finite
value (65,504 for float16). NaN stays NaN.

A float32 is represented by its bits, as int64. Shapes: W columns of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, U16
from girih.kernels.cpu.hashing import mix, mul_add, stream, word16
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import BFLOAT16

NEAREST = -1
_SIGN = 0x8000_0000
_INFINITY = 0x7F80_0000
_LEAST_NORMAL_HALF = 0x3880_0000  # 2⁻¹⁴
_TOO_SMALL = 40  # if this number of bits is cut, no noise can round up


@njit_lean
def narrow_bfloat16(bits: Any, noise: Any) -> Any:
    """Returns the bfloat16 of a float32, both as bits. ``noise`` is 16 random bits, or ``NEAREST``."""
    magnitude = bits & ~_SIGN
    sign = (bits & _SIGN) >> 16
    if magnitude > _INFINITY:
        return sign | 0x7FC0
    if noise == NEAREST:
        noise = 0x7FFF + ((magnitude >> 16) & 1)
    return sign | min((magnitude + noise) >> 16, 0x7F7F)


@njit_lean
def narrow_float16(bits: Any, noise: Any) -> Any:
    """Returns the float16 of a float32, both as bits. ``noise`` is 16 random bits, or ``NEAREST``."""
    magnitude = bits & ~_SIGN
    sign = (bits & _SIGN) >> 16
    if magnitude > _INFINITY:
        return sign | 0x7E00
    if magnitude >= _LEAST_NORMAL_HALF:
        if noise == NEAREST:
            rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1)
        else:
            rounded = magnitude + (noise >> 3)
        return sign | min((rounded >> 13) - (112 << 10), 0x7BFF)
    cut = 126 - (magnitude >> 23)  # bits below 2⁻²⁴, the spacing of subnormal numbers
    if cut > _TOO_SMALL:
        return sign
    mantissa = (magnitude & 0x7F_FFFF) | 0x80_0000
    if noise == NEAREST:
        noise = (1 << (cut - 1)) - 1 + ((mantissa >> cut) & 1)
    elif cut <= 16:
        noise = noise >> (16 - cut)
    else:
        noise = noise << (cut - 16)
    return sign | ((mantissa + noise) >> cut)


@njit_lean
def widen_bfloat16(half: Any) -> Any:
    """Returns the bits of the float32 that equals a bfloat16."""
    return np.int64(half) << 16


@njit_lean
def widen_float16(half: Any) -> Any:
    """Returns the bits of the float32 that equals a float16."""
    value = np.int64(half)
    sign = (value & 0x8000) << 16
    exponent = (value >> 10) & 0x1F
    mantissa = value & 0x3FF
    if exponent == 0x1F:
        return sign | _INFINITY | (mantissa << 13)
    if exponent == 0:
        if mantissa == 0:
            return sign
        exponent = np.int64(1)
        while mantissa & 0x400 == 0:
            mantissa <<= 1
            exponent -= 1
        mantissa &= 0x3FF
    return sign | ((exponent + 112) << 23) | (mantissa << 13)


@njit_lean
def _narrow(dtype: Any, bits: Any, noise: Any) -> Any:
    return narrow_bfloat16(bits, noise) if dtype == BFLOAT16 else narrow_float16(bits, noise)


@njit_lean
def widen_row(dtype: Any, halves: U16, values: F32) -> None:
    """Converts W 16-bit columns, ``halves``, to float32, ``values``."""
    bits = values.view(np.uint32)
    for column in range(bits.shape[0]):
        half = halves[column]
        bits[column] = widen_bfloat16(half) if dtype == BFLOAT16 else widen_float16(half)


@njit_lean
def narrow_row(dtype: Any, values: F32, halves: U16) -> None:
    """Converts W columns, ``values``, to 16 bits, ``halves``, rounded to nearest."""
    bits = values.view(np.uint32)
    for column in range(bits.shape[0]):
        halves[column] = _narrow(dtype, np.int64(bits[column]), NEAREST)


@njit_lean
def narrow_row_randomly(dtype: Any, values: F32, halves: U16, seed: Any, key_id: Any, step: Any) -> None:
    """Converts W columns to 16 bits, rounded by noise that depends only on (seed, id, step, column)."""
    bits = values.view(np.uint32)
    base = mix(mul_add(mix(mul_add(key_id, 1, seed)), 1, step))
    noise = base
    for column in range(bits.shape[0]):
        if column & 3 == 0:
            noise = stream(base, column >> 2)
        halves[column] = _narrow(dtype, np.int64(bits[column]), word16(noise, column & 3))
