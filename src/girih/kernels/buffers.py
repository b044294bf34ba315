"""Arrays whose memory is reused once nothing refers to it.

Fresh memory costs: the system clears each page when it is first touched, which takes longer than to fill it.
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
_STEPS = 8  # sizes between a power of two and the next
_MOST_TOO_LARGE = 8
_KEPT = 1.25  # of the most that was ever in use together


class Take(Protocol):
    """Gives an array to fill: :meth:`Buffers.take`, or memory that is sent as it is."""

    def __call__(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]: ...


_Memory = tuple[int, memoryview]
"""Which it is of all that were made, and its bytes."""


class Buffers:
    """Gives out arrays; the memory of one comes back when it, and every view of it, is gone.

    Any thread may take, and any may drop. What is kept is at most a quarter more than was once in use together.

    Args:
        least_bytes: smaller arrays are the allocator's.
    """

    def __init__(self, least_bytes: int = 1 << 16) -> None:
        self.least_bytes = least_bytes
        self._free: dict[int, list[_Memory]] = {}
        self._sizes: list[int] = []  # of these, the smallest first
        self._lent: dict[int, _Lent] = {}
        self._num_made = 0
        self._most_in_use = 0

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """An array with any content that nobody else sees, C-contiguous, aligned to cache lines."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < self.least_bytes:
            fresh = np.empty(num_bytes + LINE_BYTES, np.uint8)
            start = -fresh.__array_interface__["data"][0] % LINE_BYTES
            return fresh[start : start + num_bytes].view(dtype).reshape(shape)
        size = _size_class(num_bytes)
        memory = self._find(size)
        if memory is None:
            memory = self._make(size)
        # views of an array over a memoryview refer to that array, not to the memory below it
        array = np.frombuffer(memory[1], dtype, count)
        lent = _Lent(array, self._reclaim)
        lent.memory = memory
        self._lent[id(lent)] = lent
        return array.reshape(shape)

    # A last view may go at any moment, in the middle of these methods too: so they take no lock, and every use of
    # the lists is one operation, which the interpreter does not interrupt.

    def _reclaim(self, lent: _Lent) -> None:
        del self._lent[id(lent)]
        heappush(self._free[len(lent.memory[1])], lent.memory)

    def _find(self, size: int) -> _Memory | None:
        """The smallest that lies about, unless it is far too large; of those the one that was made first.

        So what is taken and dropped by turns is always the same few, which the cache still has.
        """
        for number in range(bisect_left(self._sizes, size), len(self._sizes)):
            if self._sizes[number] > _MOST_TOO_LARGE * size:
                break
            free = self._free[self._sizes[number]]
            if free:
                try:
                    return heappop(free)
                except IndexError:  # another thread was faster
                    pass
        return None

    def _make(self, size: int) -> _Memory:
        """New memory; what lies about in sizes that are no longer asked for goes."""
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
    """An array that is out, and its memory."""

    __slots__ = ("memory",)
    memory: _Memory


def _size_class(num_bytes: int) -> int:
    """Rounds a size up by at most an eighth, so that sizes that nearly agree are one."""
    step = (1 << (num_bytes - 1).bit_length()) // (2 * _STEPS)
    return -(-num_bytes // step) * step


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % LINE_BYTES
    return memory[start : start + num_bytes]
