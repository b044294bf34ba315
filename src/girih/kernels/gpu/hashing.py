"""64-bit hashing on a GPU. Results are the same bits as in :mod:`girih.kernels.cpu.hashing`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.cpu import layout as at

_GOLDEN = constexpr(0x9E37_79B9_7F4A_7C15)
_FIRST = constexpr(0xBF58_476D_1CE4_E5B9)
_SECOND = constexpr(0x94D0_49BB_1331_11EB)


@triton.jit
def as_uint64(x: tensor) -> Any:
    """Converts an integer tensor to int64, and returns the bits as uint64."""
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def mix(h: tensor) -> Any:
    """Applies the finalizer of splitmix64 to a uint64."""
    h = (h ^ (h >> 30)) * _FIRST
    h = (h ^ (h >> 27)) * _SECOND
    return h ^ (h >> 31)


@triton.jit
def stream(seed: tensor, number: tensor) -> Any:
    """Returns the ``number``-th 64 random bits of the sequence that starts at ``seed``, a uint64."""
    return mix(seed + (as_uint64(number) + 1) * _GOLDEN)


@triton.jit
def scaled(h: tensor, n: tensor) -> Any:
    """Returns the upper 32 bits of a hash, scaled evenly to 0 … n-1, as int64."""
    return (((h >> 32) * as_uint64(n)) >> 32).to(tl.int64)


@triton.jit
def uniform01(h: tensor) -> Any:
    """Returns the upper 52 bits of a hash as a float64 in the open interval (0, 1)."""
    return ((h >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def word16(h: tensor, number: tensor) -> Any:
    """Returns the ``number``-th 16 bits of a hash, 0 to 3, as an int64."""
    return ((h >> (as_uint64(number) * 16)) & 0xFFFF).to(tl.int64)


@triton.jit
def key_hash(key_id: tensor, table: tensor) -> Any:
    """Returns the 64-bit hash of a key, which is an int64 id and a table's number."""
    start = stream(as_uint64(table), tl.zeros_like(table))
    return mix(start ^ mix(as_uint64(key_id)))


_LN2_HIGH = constexpr(6.93147180369123816490e-01)
_LN2_LOW = constexpr(1.90821492927058770002e-10)
_MANTISSA = constexpr((1 << 52) - 1)
_SQRT_HALF_BITS = constexpr(0x3FE6_A09E_0000_0000)
_OFFSET = constexpr(0x3FF0_0000_0000_0000 - 0x3FE6_A09E_0000_0000)
_HALF_PI = constexpr(1.5707963267948966)


@triton.jit
def log(x: tensor) -> Any:
    """Returns the natural logarithm of a positive, normal float64."""
    bits = x.to(tl.int64, bitcast=True) + _OFFSET
    exponent = ((bits >> 52) - 0x3FF).to(tl.float64)
    f = ((bits & _MANTISSA) + _SQRT_HALF_BITS).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * ((w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01)) + 3.999999999940941908e-01)
    odd = w * 1.479819860511658591e-01 + 1.818357216161805012e-01
    odd = w * odd + 2.857142874366239149e-01
    odd = z * (w * odd + 6.666666666666735130e-01)
    half = f * 0.5 * f
    return exponent * _LN2_HIGH - ((half - (s * (half + even + odd) + exponent * _LN2_LOW)) - f)


@triton.jit
def cos_sin_turns(turns: tensor) -> Any:
    """Returns cosine and sine of 2π · ``turns``, a float64 from 0 to 1."""
    quarter = (turns * 4.0 + 0.5).to(tl.int64)
    x = (turns * 4.0 - quarter.to(tl.float64)) * _HALF_PI
    z = x * x
    sine = z * 1.58969099521155010221e-10 - 2.50507602534068634195e-08
    sine = z * sine + 2.75573137070700676789e-06
    sine = z * sine - 1.98412698298579493134e-04
    sine = z * sine + 8.33333333332248946124e-03
    sine = z * sine - 1.66666666666666324348e-01
    sine = x + x * z * sine
    tail = z * -1.13596475577881948265e-11 + 2.08757232129817482790e-09
    tail = z * tail - 2.75573143513906633035e-07
    tail = z * tail + 2.48015872894767294178e-05
    tail = z * tail - 1.38888888888741095749e-03
    tail = z * (z * tail + 4.16666666666666019037e-02)
    cosine = 1.0 - (z * 0.5 - z * tail)
    swapped = (quarter & 1) != 0
    first = tl.where(swapped, sine, cosine)
    second = tl.where(swapped, cosine, sine)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    second = tl.where((quarter & 2) != 0, -second, second)
    return first, second


_NORMAL = constexpr(at.INIT_NORMAL)
_UNIFORM = constexpr(at.INIT_UNIFORM)
_CONSTANT = constexpr(at.INIT_CONSTANT)


@triton.jit
def initial_values(
    key_id: tensor,
    seed: tensor,
    kind: tensor,
    first: tensor,
    second: tensor,
    column: tensor,
) -> Any:
    """Returns the initial values of columns of one segment, float32[K, C].

    Args:
        key_id: int64[K, 1]. seed: uint64[K, 1], the seed of the key's table and the segment.
        kind, first, second: int64[K, 1], float64[K, 1], float64[K, 1]: the initializer and its options.
        column: int32[1, C], the columns' numbers within the segment.
    """
    base = mix(as_uint64(key_id) + seed)
    own = uniform01(stream(base, column))
    pair = (column // 2) * 2
    radius = second * tl.sqrt(log(uniform01(stream(base, pair))) * -2.0)
    cosine, sine = cos_sin_turns(uniform01(stream(base, pair + 1)))
    normal = first + radius * tl.where(column % 2 == 0, cosine, sine)
    uniform = first + (second - first) * own
    value = tl.where(kind == _NORMAL, normal, tl.where(kind == _UNIFORM, uniform, first))
    return tl.where(kind >= _CONSTANT, value, 0.0).to(tl.float32)
