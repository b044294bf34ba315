"""Initial values on a GPU: the pure function of :mod:`girih.kernels.cpu.initial`, bit for bit.

Shapes: K keys of a program, C columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from girih.kernels.cpu import layout as at
from girih.kernels.gpu.hashing import as_uint64, mix, stream, uniform01
from girih.kernels.gpu.transcendental import cos_sin_turns, log

_NORMAL: tl.constexpr = tl.constexpr(at.INIT_NORMAL)
_UNIFORM: tl.constexpr = tl.constexpr(at.INIT_UNIFORM)
_CONSTANT: tl.constexpr = tl.constexpr(at.INIT_CONSTANT)


@triton.jit
def initial_values(
    key_id: tl.tensor,
    seed: tl.tensor,
    kind: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    column: tl.tensor,
) -> Any:
    """float32[K, C]: initial values of columns of one segment.

    Args:
        key_id, seed: int64[K, 1], uint64[K, 1] of table and segment.
        kind, first, second: int64, float64, float64[K, 1]: the initializer and its options.
        column: int32[1, C], within the segment.
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
