"""Memory that is used again: to have fresh pages from the system costs as much as to fill them."""

from __future__ import annotations

import math
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

LEAST_BYTES: Final = 1 << 20  # below, the allocator does well enough


class Buffers:
    """Lends arrays; the memory of one comes back when it, and every view of it, is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """As ``np.empty``."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        step = 1 << (num_bytes.bit_length() - 4)  # so that sizes that nearly agree are one
        size = -(-num_bytes // step) * step
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            self._give_back(size)
            block = np.empty(size, dtype=np.uint8)
        # views of an array over a memoryview refer to that array, not to the block below it
        lent = np.frombuffer(block[:num_bytes].data, dtype=dtype)
        weakref.finalize(lent, free.append, block).atexit = False
        return lent.reshape(shape)

    def _give_back(self, num_bytes: int) -> None:
        """Frees as much of what lies about in other sizes, so that it does not pile up."""
        for free in self._free.values():
            while free and num_bytes > 0:
                num_bytes -= len(free.pop())
