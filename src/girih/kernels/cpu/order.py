"""The random numbers that rows are sorted by when an epoch is shuffled."""

from __future__ import annotations

from typing import Any

from girih.kernels.cpu.hashing import stream
from girih.kernels.cpu.jit import njit_lean


@njit_lean
def fill_stream(seed: Any, out: Any) -> None:
    """Writes the splitmix64 sequence that ``seed``, a uint64, begins: uint64[·]."""
    for i in range(len(out)):
        out[i] = stream(seed, i)
