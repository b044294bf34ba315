"""Readers of blocks: each reads what a list asks for, to the end, in whatever way the system offers."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

from girih.kernels.cpu.disk import Blocks, Reads
from girih.kernels.cpu.disk_reads import read_in_turn
from girih.kernels.cpu.system import System
from girih.store.tiers.direct_file import DirectFile, aligned_memory, unreadable


class BlockReader(Protocol):
    """Reads blocks of one file; one list at a time.

    Attributes:
        name: of the way, for statistics.
        memory_bytes: for what is on its way.
    """

    name: str
    memory_bytes: int

    def read(self, reads: Reads, num_reads: int) -> None:
        """Does the first ``num_reads`` reads of a list and copies from them what is wanted.

        Raises:
            OSError: a block could not be read.
        """

    def close(self) -> None:
        """Lets go of what it holds."""


def c_library() -> System:
    """The functions that kernels call, of this process."""
    library = ctypes.CDLL(None)
    names = ("pread", "syscall", "__error" if sys.platform == "darwin" else "__errno_location")
    return System(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))


class ThreadedReader:
    """Threads, each of which waits for one read at a time."""

    name = "threads"

    def __init__(self, file: DirectFile, blocks: Blocks, num_threads: int = 16) -> None:
        self._file, self._blocks, self._system = file, blocks, c_library()
        self._memory = [aligned_memory(blocks.read_bytes) for _ in range(num_threads)]
        self.memory_bytes = num_threads * blocks.read_bytes
        self._threads = ThreadPoolExecutor(num_threads, "girih-cold-read")

    def read(self, reads: Reads, num_reads: int) -> None:
        """See :meth:`BlockReader.read`."""
        bounds = [num_reads * part // len(self._memory) for part in range(len(self._memory) + 1)]
        parts = [
            self._threads.submit(
                read_in_turn, self._system, self._file.descriptor, self._blocks, reads, first, last, memory
            )
            for (first, last), memory in zip(pairwise(bounds), self._memory, strict=True)
            if first < last
        ]
        for error in [part.result() for part in parts]:
            if error:
                raise unreadable(error, self._file.where)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()
