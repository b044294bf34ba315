"""64-bit hashing for the index, routing, initial values and random bits.

Hashes are unsigned 64-bit integers: ``np.uint64`` under the JIT, and Python integers without the JIT, because NumPy
scalars would warn at overflow. These functions take and return either type. Other code may pass hashes to these
functions, and combine two hashes by ``^``, but nothing else. Results decide routing and initial values, on which
checkpoints depend. So the functions never change.

Shapes: U unique keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, U64, SealedI32, SealedI64
from girih.kernels.cpu.jit import JIT_DISABLED, kernel, njit_lean


def _wrapped(x: Any) -> int:
    return int(x) & 0xFFFF_FFFF_FFFF_FFFF


_u64: Any = _wrapped if JIT_DISABLED else np.uint64
_index: Any = int if JIT_DISABLED else np.int64
_MASK = _u64(0xFFFF_FFFF_FFFF_FFFF)  # Python integers do not wrap around
_GOLDEN, _FIRST, _SECOND = (
    _u64(0x9E37_79B9_7F4A_7C15),
    _u64(0xBF58_476D_1CE4_E5B9),
    _u64(0x94D0_49BB_1331_11EB),
)
_1, _12, _16, _27, _30, _31, _32, _WORD = (_u64(n) for n in (1, 12, 16, 27, 30, 31, 32, 0xFFFF))


@njit_lean
def mix(x: Any) -> Any:
    """Applies the finalizer of splitmix64: a bijection of 64 bits in which every bit affects every other bit."""
    h = _u64(x)
    h = ((h ^ (h >> _30)) * _FIRST) & _MASK
    h = ((h ^ (h >> _27)) * _SECOND) & _MASK
    return h ^ (h >> _31)


@njit_lean
def mul_add(x: Any, factor: Any, term: Any) -> Any:
    """Returns ``x · factor + term`` modulo 2⁶⁴."""
    return (_u64(x) * _u64(factor) + _u64(term)) & _MASK


@njit_lean
def stream(seed: Any, number: Any) -> Any:
    """Returns the ``number``-th 64 random bits of the splitmix64 sequence that starts at ``seed``."""
    return mix(_u64(seed) + (_u64(number) + _1) * _GOLDEN)


@njit_lean
def low_bits(h: Any, mask: Any) -> Any:
    """Returns ``h & mask`` as an index. ``mask`` is a power of two minus 1, below 2⁶³."""
    return _index(_u64(h) & _u64(mask))


@njit_lean
def scaled(h: Any, n: Any) -> Any:
    """Returns the upper 32 bits of a hash, scaled evenly to 0 … n-1. ``n`` is below 2³¹."""
    return _index(((_u64(h) >> _32) * _u64(n)) >> _32)


@njit_lean
def uniform01(h: Any) -> Any:
    """Returns the upper 52 bits of a hash as a float64 in the open interval (0, 1)."""
    return (np.float64(_u64(h) >> _12) + 0.5) * 2.0**-52


@njit_lean
def word16(h: Any, number: Any) -> Any:
    """Returns the ``number``-th 16 bits of a hash, 0 to 3, as an int64."""
    return _index((_u64(h) >> (_u64(number) * _16)) & _WORD)


@njit_lean
def key_hash(key_id: Any, table: Any) -> Any:
    """Returns the 64-bit hash of a key. The index uses the low bits, and routing uses the high bits."""
    return mix(stream(table, 0) ^ mix(key_id))


@kernel()
def shards_of_keys(ids: SealedI64, tables: SealedI32, num_shards: int, out: I32) -> None:
    """Writes the shard of every key to ``out``, int32[U]."""
    for i in range(ids.shape[0]):
        out[i] = scaled(key_hash(ids[i], tables[i]), num_shards)


@kernel()
def fill_stream(seed: np.uint64, out: U64) -> None:
    """Writes the splitmix64 sequence that starts at ``seed``, a uint64, to ``out``, uint64[·]."""
    for i in range(len(out)):
        out[i] = stream(seed, i)
