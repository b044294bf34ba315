"""Lanes: shared memory from one process to another, for what is too large to be copied through a socket.

A lane is a file of memory without a name: one byte for each of 4,096 slots, then the data. The sender alone gives out data, lowest
address first, so that what is used by turns is always the same memory, which the cache still has. With each array
it sends goes a slot, whose byte it sets; the receiver clears it when the last view of the array is gone, in whatever
order. So neither waits for the other, and no lock is shared.

Bytes are cleared after all reads in program order. Processors that may reorder a read after a later write (not x86)
would need a barrier, which the interpreter's own locks give in practice.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import OWN_PART_BYTES, Part
from girih.errors import WireError

NUM_SLOTS: Final = 4096
LANE_BYTES: Final = 64 << 20
_LINE: Final = 64
_GROWTH: Final = 1 << 20


class LaneFile:
    """The memory itself, mapped, without a name.

    Args:
        file: its descriptor, from here on the object's.

    Raises:
        WireError, OSError: it is no such file.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        size = os.fstat(file).st_size
        if size <= NUM_SLOTS:
            raise WireError(f"a file of {size} bytes is no lane")
        self.num_bytes = size - NUM_SLOTS
        self._map = mmap.mmap(file, size)
        view = memoryview(self._map)
        self.slots, self.data = view[:NUM_SLOTS], view[NUM_SLOTS:]
        self.address: int = np.frombuffer(self.data, np.uint8).__array_interface__["data"][0]

    @classmethod
    def make(cls, num_bytes: int) -> LaneFile:
        """A new one: address space, which takes memory as it is used.

        Raises:
            OSError: there is none.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("girih")
        else:
            file, path = tempfile.mkstemp(prefix="girih-")
            os.unlink(path)
        try:
            os.ftruncate(file, NUM_SLOTS + num_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, NUM_SLOTS)
            return cls(file)
        except BaseException:
            os.close(file)
            raise

    def view(self, slot: int, start: int, size: int) -> Part:
        """For the receiver: what was sent, in place; its room is free again when the last view of it is gone.

        Raises:
            WireError: it lies outside the lane.
        """
        if slot >= NUM_SLOTS or start + size > self.num_bytes:
            raise WireError(f"an array of {size:,} bytes at {start:,} in a lane of {self.num_bytes:,}")
        array = np.frombuffer(self.data[start : start + size], np.uint8)
        _when_dropped(array, self.slots.__setitem__, slot, 0)
        return array

    def close(self) -> None:
        """Views of it stay; the mapping goes with the last."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@dataclass(order=True, slots=True)
class _Chunk:
    start: int
    end: int = field(compare=False)
    held: bool = field(compare=False, default=True)  # by an array of this process
    slots: list[int] = field(compare=False, default_factory=list)  # under which it was sent


class OutLane:
    """The sender's end. Any thread may take arrays; one thread sends."""

    def __init__(self, file: LaneFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []  # in the order of their starts
        self._free_slots = list(range(NUM_SLOTS))
        self._backed = 0  # so many bytes have memory; beyond, touching could kill the process
        self._most = file.num_bytes

    def buffer(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """An array whose memory is the lane's; None when there is no room, or it is a small one."""
        num_bytes = dtype.itemsize * math.prod(shape)
        chunk = self._take(num_bytes) if num_bytes >= OWN_PART_BYTES else None
        if chunk is None:
            return None
        array = np.frombuffer(self._file.data[chunk.start : chunk.start + num_bytes], dtype)
        _when_dropped(array, setattr, chunk, "held", False)
        return array.reshape(shape)

    def send(self, part: Part) -> tuple[int, int] | None:
        """Makes the part readable for the other side: its slot and where it starts; None when there is no room."""
        start = part.__array_interface__["data"][0] - self._file.address
        chunk = self._find(start, len(part)) if 0 <= start < self._file.num_bytes else None
        copied = chunk is None
        if chunk is None:
            chunk = self._take(len(part))
            if chunk is None:
                return None
            start = chunk.start
            np.copyto(np.frombuffer(self._file.data[start : start + len(part)], np.uint8), part)
        with self._lock:
            slot = self._free_slots.pop() if self._free_slots else None
            if slot is not None:
                self._file.slots[slot] = 1
                chunk.slots.append(slot)
            if copied:
                chunk.held = False
        return None if slot is None else (slot, start)

    def close(self) -> None:
        """Closes this end: what was sent stays with its receiver, what was taken with its owner."""
        with self._lock:
            self._most = 0
            self._file.close()

    def _find(self, start: int, size: int) -> _Chunk | None:
        with self._lock:
            number = bisect_right(self._chunks, start, key=lambda chunk: chunk.start) - 1
            chunk = self._chunks[number] if number >= 0 else None
        return chunk if chunk is not None and start + size <= chunk.end else None

    def _take(self, num_bytes: int) -> _Chunk | None:
        size = max(1, -(-num_bytes // _LINE)) * _LINE
        with self._lock:
            self._reclaim()
            start = 0
            for chunk in self._chunks:
                if start + size <= chunk.start:
                    break
                start = chunk.end
            if start + size > self._most or not self._back(start + size):
                return None
            taken = _Chunk(start, start + size)
            insort(self._chunks, taken)
        return taken

    def _reclaim(self) -> None:
        """Frees what neither side has any more."""
        slots = self._file.slots
        kept = []
        for chunk in self._chunks:
            for slot in list(chunk.slots):
                if not slots[slot]:
                    chunk.slots.remove(slot)
                    self._free_slots.append(slot)
            if chunk.held or chunk.slots:
                kept.append(chunk)
        self._chunks = kept

    def _back(self, end: int) -> bool:
        """Has the system give memory up to ``end``, which it may not have (a container's /dev/shm is small)."""
        if end > self._backed and hasattr(os, "posix_fallocate"):
            more = min(self._file.num_bytes, -(-end // _GROWTH) * _GROWTH)
            try:
                os.posix_fallocate(self._file.file, NUM_SLOTS + self._backed, more - self._backed)
            except OSError:
                self._most = self._backed
                return False
            self._backed = more
        return True


def _when_dropped(array: NDArray[Any], call: Callable[..., None], *arguments: Any) -> None:
    """Has a function called when an array, and every view of it, is gone; not when the process ends."""
    weakref.finalize(array, call, *arguments).atexit = False
