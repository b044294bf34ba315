"""Segments on their way to a disk: written by a thread, from memory that is readable meanwhile."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.store.tiers.direct_file import DirectFile, aligned_memory

Bytes = NDArray[np.uint8]


class _Write(NamedTuple):
    segment: int
    memory: Bytes
    done: Future[None]


class WriteBehind:
    """Writes segments in order, at most ``most`` of them at a time; its methods are one thread's.

    Args:
        segment_bytes: of each, one behind the other in the file.
    """

    def __init__(self, file: DirectFile, segment_bytes: int, most: int) -> None:
        self._file, self._segment_bytes = file, segment_bytes
        self._left = most + 1  # buffers that may still be made: one is filled while others are written
        self._free: list[Bytes] = []
        self._writes: deque[_Write] = deque()
        self._thread = ThreadPoolExecutor(1, "girih-cold-write")

    def take(self, written: list[int]) -> Bytes:
        """Memory for a segment, uint8[segment_bytes]; waits where all of it is on its way to the disk.

        Args:
            written: gets the segments that are on the disk since, whose memory is not theirs any more.
        """
        written += self.settle()
        if not self._free and self._left:
            self._left -= 1
            return aligned_memory(self._segment_bytes)
        if not self._free:
            self._writes[0].done.exception()  # waits
            written += self.settle()
        return self._free.pop()

    def submit(self, segment: int, memory: Bytes) -> None:
        """Has a segment written; its memory stays as it is until that is done."""
        done = self._thread.submit(self._file.write, memory, segment * self._segment_bytes)
        self._writes.append(_Write(segment, memory, done))

    def settle(self, *, wait: bool = False) -> list[int]:
        """The segments that were written since; with ``wait`` all others too.

        Raises:
            StorageFullError: the disk is full, then and from then on.
            OSError: it could not be written, then and from then on.
        """
        written = []
        while self._writes and (wait or self._writes[0].done.done()):
            self._writes[0].done.result()
            write = self._writes.popleft()
            self._free.append(write.memory)
            written.append(write.segment)
        return written

    def run(self, work: Any, *arguments: Any) -> Future[None]:
        """Has other work done by the thread, behind the segments that are to be written."""
        return self._thread.submit(work, *arguments)

    def close(self) -> None:
        """Ends the thread, when it has written what it was given."""
        self._thread.shutdown(cancel_futures=True)
