"""The initial value of a row: a pure function of (seed, table, segment, id, column).

It does not depend on order of arrival, number of shards or machine. Normal values are Box–Muller pairs, computed in
float64 and rounded to float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, U16
from girih.kernels.cpu.hashing import mix, mul_add, stream, uniform01
from girih.kernels.cpu.jit import JIT_DISABLED, intrinsic, njit_lean, types
from girih.kernels.cpu.layout import (
    DIM,
    FIRST_COLUMN,
    FLOAT32,
    INIT_CONSTANT,
    INIT_NORMAL,
    INIT_UNIFORM,
    Layout,
)
from girih.kernels.cpu.rounding import narrow_row, widen_row

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_MANTISSA = (1 << 52) - 1
_SQRT_HALF_BITS = 0x3FE6_A09E_0000_0000
_ONE_BITS = 0x3FF0_0000_0000_0000

if JIT_DISABLED:

    def log(x: Any) -> Any:
        """Returns the natural logarithm of a positive, normal float64."""
        return math.log(x)

    def cos_sin_turns(turns: Any) -> Any:
        """Returns cosine and sine of 2π · ``turns``, a float64 from 0 to 1."""
        return math.cos(2.0 * math.pi * turns), math.sin(2.0 * math.pi * turns)

else:

    def _reinterpreted(source: Any, target: Any) -> Any:
        def value(typing_context: Any, x: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return builder.bitcast(arguments[0], context.get_value_type(target))

            return target(source), generate

        return intrinsic(value)

    _bits_of = _reinterpreted(types.float64, types.int64)
    _float_of = _reinterpreted(types.int64, types.float64)

    # Horner's rule is written out, because a loop over coefficients would hide the lanes of the outer loop.

    @njit_lean
    def log(x: Any) -> Any:
        """Returns the natural logarithm of a positive, normal float64."""
        bits = _bits_of(x) + (_ONE_BITS - _SQRT_HALF_BITS)
        exponent = np.float64((bits >> 52) - 0x3FF)
        f = _float_of((bits & _MANTISSA) + _SQRT_HALF_BITS) - 1.0
        s = f / (2.0 + f)
        z = s * s
        w = z * z
        even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
        odd = 1.818357216161805012e-01 + w * 1.479819860511658591e-01
        odd = 2.857142874366239149e-01 + w * odd
        odd = z * (6.666666666666735130e-01 + w * odd)
        half = 0.5 * f * f
        return exponent * _LN2_HIGH - ((half - (s * (half + even + odd) + exponent * _LN2_LOW)) - f)

    @njit_lean
    def cos_sin_turns(turns: Any) -> Any:
        """Returns cosine and sine of 2π · ``turns``, a float64 from 0 to 1."""
        quarter = np.int64(turns * 4.0 + 0.5)
        x = (turns * 4.0 - np.float64(quarter)) * (0.5 * math.pi)
        z = x * x
        sine = -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10
        sine = 2.75573137070700676789e-06 + z * sine
        sine = -1.98412698298579493134e-04 + z * sine
        sine = 8.33333333332248946124e-03 + z * sine
        sine = -1.66666666666666324348e-01 + z * sine
        sine = x + x * z * sine
        tail = 2.08757232129817482790e-09 + z * -1.13596475577881948265e-11
        tail = -2.75573143513906633035e-07 + z * tail
        tail = 2.48015872894767294178e-05 + z * tail
        tail = -1.38888888888741095749e-03 + z * tail
        tail = z * (4.16666666666666019037e-02 + z * tail)
        cosine = 1.0 - (0.5 * z - z * tail)
        swapped = (quarter & 1) != 0
        first = sine if swapped else cosine
        second = cosine if swapped else sine
        first = -first if ((quarter + 1) & 2) != 0 else first
        second = -second if (quarter & 2) != 0 else second
        return first, second


@njit_lean
def fill_normal(out: F32, base: Any, mean: Any, std: Any) -> None:
    """Writes normally distributed columns. Columns 2k and 2k+1 are one Box–Muller pair."""
    for pair in range(out.shape[0] // 2):
        radius = std * math.sqrt(-2.0 * log(uniform01(stream(base, 2 * pair))))
        cosine, sine = cos_sin_turns(uniform01(stream(base, 2 * pair + 1)))
        out[2 * pair] = mean + radius * cosine
        out[2 * pair + 1] = mean + radius * sine
    if out.shape[0] % 2:
        last = out.shape[0] - 1
        radius = std * math.sqrt(-2.0 * log(uniform01(stream(base, last))))
        out[last] = mean + radius * cos_sin_turns(uniform01(stream(base, last + 1)))[0]


@njit_lean
def fill_uniform(out: F32, base: Any, low: Any, high: Any) -> None:
    """Writes columns that are uniform between ``low`` and ``high``."""
    for column in range(out.shape[0]):
        out[column] = low + (high - low) * uniform01(stream(base, column))


@njit_lean
def fill_initial(layout: Layout, key_id: Any, table: Any, out: F32) -> None:
    """Writes the initial value of a row's W columns, float32[W], not yet rounded to 16 bits."""
    for segment in range(layout.segments.shape[0]):
        first = layout.segments[segment, FIRST_COLUMN]
        columns = out[first : first + layout.segments[segment, DIM]]
        kind = layout.initializers[table, segment]
        first_option = layout.initializer_options[table, segment, 0]
        second_option = layout.initializer_options[table, segment, 1]
        base = mix(mul_add(key_id, 1, layout.seeds[table, segment]))
        if kind == INIT_NORMAL:
            fill_normal(columns, base, first_option, second_option)
        elif kind == INIT_UNIFORM:
            fill_uniform(columns, base, first_option, second_option)
        elif kind == INIT_CONSTANT:
            columns[:] = first_option
        else:
            columns[:] = 0.0


@njit_lean
def read_initial(layout: Layout, key_id: Any, table: Any, out: F32, halves: U16) -> None:
    """Writes the initial value of a key without a row, float32[W], rounded as in a row.

    ``halves`` is scratch, uint16[W].
    """
    fill_initial(layout, key_id, table, out)
    if layout.dtype != FLOAT32:
        narrow_row(layout.dtype, out, halves)
        widen_row(layout.dtype, halves, out)
