"""64-bit hashing: what index, routing, initial values and random bits are made of.

Hashes are unsigned 64-bit: ``np.uint64`` under the JIT, Python integers without it (NumPy scalars
would warn when they overflow). Code that holds one only passes it to the functions here, which take
and give either kind; ``^`` may join two. Results decide routing and initial values, which are part of
what checkpoints mean: they never change.

U unique keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64
from girih.kernels.cpu.jit import JIT_DISABLED, njit_lean

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_FIRST = 0xBF58_476D_1CE4_E5B9
_SECOND = 0x94D0_49BB_1331_11EB

if JIT_DISABLED:

    def mix(x: Any) -> Any:
        """The finaliser of splitmix64: a bijection of 64 bits in which every bit moves every other."""
        h = int(x) & _MASK
        h = ((h ^ (h >> 30)) * _FIRST) & _MASK
        h = ((h ^ (h >> 27)) * _SECOND) & _MASK
        return h ^ (h >> 31)

    def mul_add(x: Any, factor: Any, term: Any) -> Any:
        """``x · factor + term`` modulo 2⁶⁴."""
        return (int(x) * int(factor) + int(term)) & _MASK

    def stream(seed: Any, number: Any) -> Any:
        """The ``number``-th 64 random bits of the sequence that ``seed`` begins (splitmix64)."""
        return mix(int(seed) + (int(number) + 1) * _GOLDEN)

    def low_bits(h: Any, mask: Any) -> Any:
        """``h & mask`` as an index; ``mask`` is a power of two less one, below 2⁶³."""
        return int(h) & int(mask)

    def scaled(h: Any, n: Any) -> Any:
        """The upper 32 bits of a hash, spread evenly over 0 … n-1; ``n`` below 2³¹."""
        return ((int(h) >> 32) * int(n)) >> 32

    def uniform01(h: Any) -> Any:
        """The upper 52 bits of a hash as a float64 in the open interval (0, 1)."""
        return ((int(h) >> 12) + 0.5) * 2.0**-52

    def word16(h: Any, number: Any) -> Any:
        """The ``number``-th 16 bits of a hash, 0 to 3, as an int64."""
        return (int(h) >> (16 * int(number))) & 0xFFFF

else:
    _U30, _U27, _U31, _U12, _U32, _ONE, _U16 = (np.uint64(n) for n in (30, 27, 31, 12, 32, 1, 16))
    _U_FIRST, _U_SECOND, _U_GOLDEN, _U_WORD = (np.uint64(n) for n in (_FIRST, _SECOND, _GOLDEN, 0xFFFF))

    @njit_lean
    def mix(x: Any) -> Any:
        """The finaliser of splitmix64: a bijection of 64 bits in which every bit moves every other."""
        h = np.uint64(x)
        h = (h ^ (h >> _U30)) * _U_FIRST
        h = (h ^ (h >> _U27)) * _U_SECOND
        return h ^ (h >> _U31)

    @njit_lean
    def mul_add(x: Any, factor: Any, term: Any) -> Any:
        """``x · factor + term`` modulo 2⁶⁴."""
        return np.uint64(x) * np.uint64(factor) + np.uint64(term)

    @njit_lean
    def stream(seed: Any, number: Any) -> Any:
        """The ``number``-th 64 random bits of the sequence that ``seed`` begins (splitmix64)."""
        return mix(np.uint64(seed) + (np.uint64(number) + _ONE) * _U_GOLDEN)

    @njit_lean
    def low_bits(h: Any, mask: Any) -> Any:
        """``h & mask`` as an index; ``mask`` is a power of two less one, below 2⁶³."""
        return np.int64(np.uint64(h) & np.uint64(mask))

    @njit_lean
    def scaled(h: Any, n: Any) -> Any:
        """The upper 32 bits of a hash, spread evenly over 0 … n-1; ``n`` below 2³¹."""
        return np.int64(((np.uint64(h) >> _U32) * np.uint64(n)) >> _U32)

    @njit_lean
    def uniform01(h: Any) -> Any:
        """The upper 52 bits of a hash as a float64 in the open interval (0, 1)."""
        return (np.float64(np.uint64(h) >> _U12) + 0.5) * 2.0**-52

    @njit_lean
    def word16(h: Any, number: Any) -> Any:
        """The ``number``-th 16 bits of a hash, 0 to 3, as an int64."""
        return np.int64((np.uint64(h) >> (np.uint64(number) * _U16)) & _U_WORD)


@njit_lean
def key_hash(key_id: Any, table: Any) -> Any:
    """64 bits of a key. The index takes the low ones, routing the high ones."""
    return mix(stream(table, 0) ^ mix(key_id))


@njit_lean
def shards_of_keys(ids: I64, tables: I32, num_shards: int, out: I32) -> None:
    """Writes the shard of every key to ``out``, int32[U]."""
    for i in range(ids.shape[0]):
        out[i] = scaled(key_hash(ids[i], tables[i]), num_shards)


@njit_lean
def fill_stream(seed: Any, out: Any) -> None:
    """Writes the splitmix64 sequence that ``seed``, a uint64, begins: uint64[·]."""
    for i in range(len(out)):
        out[i] = stream(seed, i)
