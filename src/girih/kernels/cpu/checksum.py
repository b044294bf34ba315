"""A checksum of memory, at about the speed of reading it. It finds damage, not malice.

Four lanes, each over every fourth 64-bit word: multiply by an odd number, then fold the upper bits onto the lower.
Both steps are one-to-one for a given word, so that a change of any one word changes its lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.jit import JIT_DISABLED, njit_lean

_PRIME_1 = np.uint64(0x9E3779B97F4A7C15)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_FOLD = np.uint64(32)


@njit_lean
def _mix(lane: Any, word: Any) -> Any:
    mixed = (lane ^ word) * _PRIME_1
    return mixed ^ (mixed >> _FOLD)


@njit_lean
def _of_words(words: NDArray[np.uint64], tail: Any, num_bytes: Any) -> Any:
    a, b, c, d = _PRIME_1, _PRIME_2, ~_PRIME_1, ~_PRIME_2
    whole = len(words) - len(words) % 4
    for i in range(0, whole, 4):
        a = _mix(a, words[i])
        b = _mix(b, words[i + 1])
        c = _mix(c, words[i + 2])
        d = _mix(d, words[i + 3])
    for i in range(whole, len(words)):
        a = _mix(a, words[i])
    a = _mix(a, tail)
    a = _mix(a, np.uint64(num_bytes))
    return _mix(_mix(_mix(a, b), c), d)


def checksum(data: NDArray[np.uint8]) -> int:
    """64 bits of uint8[n], C-contiguous."""
    whole = len(data) - len(data) % 8
    words = data[:whole].view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    tail = np.uint64(int.from_bytes(data[whole:].tobytes(), "little"))
    if JIT_DISABLED:
        with np.errstate(over="ignore"):
            return int(_of_words(words, tail, len(data)))
    return int(_of_words(words, tail, len(data)))
