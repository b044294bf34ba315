"""64-bit hashing on a GPU: the functions of :mod:`girih.kernels.cpu.hashing`, bit for bit."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_GOLDEN: tl.constexpr = tl.constexpr(0x9E37_79B9_7F4A_7C15)
_FIRST: tl.constexpr = tl.constexpr(0xBF58_476D_1CE4_E5B9)
_SECOND: tl.constexpr = tl.constexpr(0x94D0_49BB_1331_11EB)


@triton.jit
def as_uint64(x: tl.tensor) -> Any:
    """An integer tensor as uint64, int64 by its bits."""
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def mix(h: tl.tensor) -> Any:
    """The finaliser of splitmix64, of a uint64."""
    h = (h ^ (h >> 30)) * _FIRST
    h = (h ^ (h >> 27)) * _SECOND
    return h ^ (h >> 31)


@triton.jit
def stream(seed: tl.tensor, number: tl.tensor) -> Any:
    """The ``number``-th 64 random bits of the sequence that ``seed``, a uint64, begins."""
    return mix(seed + (as_uint64(number) + 1) * _GOLDEN)


@triton.jit
def scaled(h: tl.tensor, n: tl.tensor) -> Any:
    """The upper 32 bits of a hash, spread evenly over 0 … n-1, as int64."""
    return (((h >> 32) * as_uint64(n)) >> 32).to(tl.int64)


@triton.jit
def uniform01(h: tl.tensor) -> Any:
    """The upper 52 bits of a hash as a float64 in the open interval (0, 1)."""
    return ((h >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def word16(h: tl.tensor, number: tl.tensor) -> Any:
    """The ``number``-th 16 bits of a hash, 0 to 3, as an int64."""
    return ((h >> (as_uint64(number) * 16)) & 0xFFFF).to(tl.int64)


@triton.jit
def key_hash(key_id: tl.tensor, table: tl.tensor) -> Any:
    """64 bits of a key: an int64 and a table's number."""
    start = stream(as_uint64(table), tl.zeros_like(table))
    return mix(start ^ mix(as_uint64(key_id)))
