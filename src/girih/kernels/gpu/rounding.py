"""16-bit floats on a GPU: widening, rounding to nearest and stochastic rounding.

Results are the same as in :mod:`girih.kernels.cpu.rounding`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.gpu.hashing import as_uint64, mix, stream, word16
from girih.kernels.gpu.layout import BFLOAT16

_MAGNITUDE = constexpr(0x7FFF_FFFF)
_INFINITY = constexpr(0x7F80_0000)
_LEAST_NORMAL_HALF = constexpr(0x3880_0000)
_TOO_SMALL = constexpr(40)


@triton.jit
def widen(halves: tensor, DTYPE: constexpr) -> Any:
    """Converts 16-bit columns, given by their bits as int16, to float32."""
    if DTYPE == BFLOAT16:
        return (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return halves.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _narrow_bfloat16(magnitude: tensor, noise: tensor, NEAREST: constexpr) -> Any:
    if NEAREST:
        noise = 0x7FFF + ((magnitude >> 16) & 1)
    rounded = tl.minimum((magnitude + noise) >> 16, 0x7F7F)
    return tl.where(magnitude > _INFINITY, 0x7FC0, rounded)


@triton.jit
def _narrow_float16(magnitude: tensor, noise: tensor, NEAREST: constexpr) -> Any:
    if NEAREST:
        normal = magnitude + 0xFFF + ((magnitude >> 13) & 1)
    else:
        normal = magnitude + (noise >> 3)
    normal = tl.minimum((normal >> 13) - (112 << 10), 0x7BFF)
    cut = tl.maximum(tl.minimum(126 - (magnitude >> 23), _TOO_SMALL + 1), 1)  # bits below 2⁻²⁴
    mantissa = (magnitude & 0x7F_FFFF) | 0x80_0000
    if NEAREST:
        one = tl.full(mantissa.shape, 1, tl.int64)
        noise = (one << (cut - 1)) - 1 + ((mantissa >> cut) & 1)
    else:
        noise = tl.where(cut <= 16, noise >> tl.maximum(16 - cut, 0), noise << tl.maximum(cut - 16, 0))
    tiny = tl.where(cut > _TOO_SMALL, 0, (mantissa + noise) >> cut)
    rounded = tl.where(magnitude >= _LEAST_NORMAL_HALF, normal, tiny)
    return tl.where(magnitude > _INFINITY, 0x7E00, rounded)


@triton.jit
def narrow(values: tensor, noise: tensor, DTYPE: constexpr, NEAREST: constexpr) -> Any:
    """Converts float32 columns to 16 bits, int16.

    ``noise`` has 16 random bits per column, as int64. With ``NEAREST``, noise is not used.
    """
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits.to(tl.int64) >> 16) & 0x8000
    magnitude = bits.to(tl.int64) & _MAGNITUDE
    if DTYPE == BFLOAT16:
        rounded = _narrow_bfloat16(magnitude, noise, NEAREST)
    else:
        rounded = _narrow_float16(magnitude, noise, NEAREST)
    return (sign | rounded).to(tl.int16)


@triton.jit
def row_noise(seed: tensor, key_id: tensor, step: tensor, column: tensor) -> Any:
    """Returns 16 random bits for columns of rows, as int64. They depend only on (seed, id, step, column)."""
    base = mix(mix(as_uint64(key_id) + seed) + as_uint64(step))
    return word16(stream(base, column >> 2), column & 3)
