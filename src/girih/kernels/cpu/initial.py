"""The initial value of a row: a pure function of (seed, table, segment, id, column).

It depends neither on arrival order, nor on the number of shards, nor on the machine that asks.
Normal values are Box–Muller pairs, computed in float64 and rounded to float32.
"""

from __future__ import annotations

import math
from typing import Any

from girih.kernels.cpu.arrays import F32
from girih.kernels.cpu.hashing import mix, mul_add, stream, uniform01
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import DIM, FIRST_COLUMN, INIT_CONSTANT, INIT_NORMAL, INIT_UNIFORM, Layout
from girih.kernels.cpu.transcendental import cos_sin_turns, log


@njit_lean
def fill_normal(out: F32, base: Any, mean: Any, std: Any) -> None:
    """Normally distributed columns; columns 2k and 2k+1 are one Box–Muller pair."""
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
    """Columns uniform between ``low`` and ``high``."""
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
