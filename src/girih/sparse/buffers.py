"""Arrays that are used again once nobody looks at them.

Fresh memory costs: the system zeroes each page when it is first touched, for a large batch that takes longer
than filling it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MOST = 64
_ALIGNMENT = 64
_LISTED = [np.empty(0)]
_UNSEEN = sys.getrefcount(_LISTED[0])
"""References to an array that only a list holds, as ``getrefcount`` counts them."""


class Buffers:
    """Gives out arrays; whoever drops the last view of one gives it back, knowingly or not."""

    def __init__(self) -> None:
        self._held: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """An array with any content that nobody else sees, aligned to cache lines."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with self._lock:
            memory = self._free(size + _ALIGNMENT)
            start = -memory.ctypes.data % _ALIGNMENT
            return memory[start : start + size].view(dtype).reshape(shape)

    def _free(self, size: int) -> NDArray[np.uint8]:
        """The smallest that is large enough, or a new one."""
        best: NDArray[np.uint8] | None = None
        for number in range(len(self._held)):
            fits = size <= len(self._held[number]) < (1 << 62 if best is None else len(best))
            if fits and sys.getrefcount(self._held[number]) == _UNSEEN:
                best = self._held[number]
        if best is None:
            best = np.empty(size + size // 4, np.uint8)
            self._keep(best)
        return best

    def _keep(self, memory: NDArray[np.uint8]) -> None:
        """Makes room for a new one in place of the smallest that is free; all being seen, it is not kept."""
        if len(self._held) >= _MOST:
            numbers = range(_MOST)
            free = [n for n in numbers if sys.getrefcount(self._held[n]) == _UNSEEN]
            if not free:
                return
            del self._held[min(free, key=lambda n: len(self._held[n]))]
        self._held.append(memory)
