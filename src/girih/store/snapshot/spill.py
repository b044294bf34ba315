"""Records that a save's log had no room for: a file without a name, written by a thread of its own.

Each spill is one log's records, grouped by chunk, so that those of a chunk are read back at once.

Shapes: L records of a log, V 32-bit words of a record; a spilled record is its number and V words.
"""

from __future__ import annotations

import errno
import os
import queue
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, NamedTuple

import numpy as np

from girih.store.arrays import Ints, Longs

_MOST_BUFFERS = 16


class _Spill(NamedTuple):
    start: int
    ends: Longs
    written: Future[None]


class SpillFile:
    """Takes what one thread spills; another may read it back meanwhile.

    Args:
        directory: where the file lies; it never has a name there.
        most_records: L. num_words: V.
        num_bytes: spilled so far.
    """

    def __init__(self, directory: str | os.PathLike[str], most_records: int, num_words: int) -> None:
        self.num_bytes = 0
        self._directory = directory
        self._num_words = 1 + num_words
        self._spills: list[_Spill] = []
        self._file: IO[bytes] | None = None
        self._writer = ThreadPoolExecutor(1, "girih-spill")
        self._buffers: queue.LifoQueue[Ints] = queue.LifoQueue()  # the last one is in memory already
        for buffer in np.empty((_MOST_BUFFERS, most_records, 1 + num_words), np.int32):
            self._buffers.put(buffer)

    def add(self, gather: Callable[[Ints, Longs], int], num_chunks: int) -> None:
        """Spills what ``gather`` writes to int32[L, 1 + V], chunk by chunk; it sets their ends, int64[num_chunks].

        Waits only where :data:`_MOST_BUFFERS` earlier spills are not written yet.

        Raises:
            OSError: the file cannot be made. What goes wrong later is raised in :meth:`of_chunk`.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        buffer, ends = self._buffers.get(), np.empty(num_chunks, np.int64)
        count = gather(buffer, ends)
        written = self._writer.submit(self._write, self._file.fileno(), buffer, count, self.num_bytes)
        self._spills.append(_Spill(self.num_bytes, ends, written))
        self.num_bytes += count * buffer.itemsize * buffer.shape[1]

    def of_chunk(self, chunk: int) -> Iterator[Ints]:
        """The spilled records of a chunk, int32[·, 1 + V].

        Raises:
            OSError: they could not be written, or not be read back.
        """
        for start, ends, written in self._spills[:]:
            first = int(ends[chunk - 1]) if chunk else 0
            if first < ends[chunk] and self._file is not None:
                written.result()
                records = np.empty((int(ends[chunk]) - first, self._num_words), np.int32)
                at = start + first * records.itemsize * self._num_words
                if os.preadv(self._file.fileno(), [records.data], at) < records.nbytes:
                    raise OSError(errno.EIO, "records that were kept for a checkpoint cannot be read back")
                yield records

    def close(self) -> None:
        """Lets go of the file."""
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    def _write(self, descriptor: int, buffer: Ints, count: int, position: int) -> None:
        try:
            data = memoryview(buffer[:count].reshape(-1).view(np.uint8).data)
            while len(data):
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
        finally:
            self._buffers.put(buffer)
