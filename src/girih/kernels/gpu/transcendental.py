"""Logarithm, sine and cosine in float64: the polynomials of :mod:`girih.kernels.cpu.transcendental`, bit for bit."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_LN2_HIGH: tl.constexpr = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW: tl.constexpr = tl.constexpr(1.90821492927058770002e-10)
_MANTISSA: tl.constexpr = tl.constexpr((1 << 52) - 1)
_SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3FE6_A09E_0000_0000)
_OFFSET: tl.constexpr = tl.constexpr(0x3FF0_0000_0000_0000 - 0x3FE6_A09E_0000_0000)
_HALF_PI: tl.constexpr = tl.constexpr(1.5707963267948966)


@triton.jit
def log(x: tl.tensor) -> Any:
    """The natural logarithm of a positive, normal float64."""
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
def cos_sin_turns(turns: tl.tensor) -> Any:
    """Cosine and sine of 2π · ``turns``, a float64 from 0 to 1."""
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
