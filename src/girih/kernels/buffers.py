"""Arrays whose memory is reused as soon as nothing refers to the arrays any more.

New memory is slow. The system clears each page at its first access, which takes longer than filling the page.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE_BYTES: Final = 64
_STEPS = 8  # sizes between two powers of two
_MOST_TOO_LARGE = 8
_KEPT = 1.25  # the most kept memory, as a multiple of the largest memory that was in use at any time


class Take(Protocol):
    """A function that returns an array to fill: :meth:`Buffers.take`, or a function that returns memory for sending."""

    def __call__(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]: ...


_Memory = tuple[int, memoryview]
"""A piece of memory: its number in the order of creation, and its bytes."""


class Buffers:
    """A pool of memory for arrays. The pool reuses an array's memory when the array and all of its views are gone.

    Any thread may take and drop arrays. The memory of the pool is at most 1.25 times the largest memory that was in use
    at any time.

    Args:
        least_bytes: arrays with fewer bytes are allocated by NumPy, without the pool.
    """

    def __init__(self, least_bytes: int = 1 << 16) -> None:
        self.least_bytes = least_bytes
        self._free: dict[int, list[_Memory]] = {}
        self._sizes: list[int] = []  # the keys of _free, sorted
        self._lent: dict[int, _Lent] = {}
        self._num_made = 0
        self._most_in_use = 0

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """Returns an array with arbitrary content, C-contiguous and aligned to cache lines.

        No other array shares its memory.
        """
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < self.least_bytes:
            return _aligned(num_bytes).view(dtype).reshape(shape)
        size = _size_class(num_bytes)
        block = self._find(size) or self._make(size)
        # Views of an array over a memoryview refer to this array, not to the memoryview's memory.
        array = np.frombuffer(block[1], dtype, count)
        lent = _Lent(array, self._reclaim)
        lent.memory = block
        self._lent[id(lent)] = lent
        return array.reshape(shape)

    # The last view of an array may be dropped at any moment, also during these methods. So they must not take a lock.
    # Each access to the lists is a single operation, which the interpreter does not interrupt.

    def _reclaim(self, lent: _Lent) -> None:
        del self._lent[id(lent)]
        heappush(self._free[len(lent.memory[1])], lent.memory)

    def _find(self, size: int) -> _Memory | None:
        """Returns the smallest free memory that is large enough and not far too large, or None.

        Among memory of the same size, the memory that was created first is preferred. So arrays that are taken and
        dropped repeatedly use the same memory, which is still in the cache.
        """
        for number in range(bisect_left(self._sizes, size), len(self._sizes)):
            if self._sizes[number] > _MOST_TOO_LARGE * size:
                break
            free = self._free[self._sizes[number]]
            if free:
                try:
                    return heappop(free)
                except IndexError:  # another thread has just taken this memory
                    pass
        return None

    def _make(self, size: int) -> _Memory:
        """Allocates new memory. Drops free memory that exceeds the limit."""
        if size not in self._free:
            self._free.setdefault(size, [])
            insort(self._sizes, size)
        in_use = size + sum(len(lent.memory[1]) for lent in list(self._lent.values()))
        self._most_in_use = max(self._most_in_use, in_use)
        lists = list(self._free.values())
        too_much = in_use + sum(len(memory) for free in lists for _, memory in free)
        too_much -= int(_KEPT * self._most_in_use)
        for free in lists:
            while too_much > 0:
                try:
                    too_much -= len(free.pop()[1])
                except IndexError:
                    break
        self._num_made += 1
        return self._num_made, _aligned(size).data


class _Lent(weakref.ref[NDArray[Any]]):
    """A weak reference to an array that is in use, and its memory."""

    __slots__ = ("memory",)
    memory: _Memory


def _size_class(num_bytes: int) -> int:
    """Rounds a size up by at most 1/8, so that similar sizes share memory."""
    step = (1 << (num_bytes - 1).bit_length()) // (2 * _STEPS)
    return -(-num_bytes // step) * step


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % LINE_BYTES
    return memory[start : start + num_bytes]
