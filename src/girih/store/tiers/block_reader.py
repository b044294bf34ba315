"""Readers of blocks: each reads all blocks of a list, by threads or by ``io_uring``."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.disk import Blocks, Reads
from girih.kernels.cpu.disk_reads import IO_URING_ENTER, SLOT_WORDS, Ring, read_at_once, read_in_turn
from girih.kernels.cpu.system import System
from girih.store.tiers.direct_file import DirectFile, aligned_memory, unreadable


class BlockReader(Protocol):
    """Reads blocks of one file, one list at a time.

    Attributes:
        name: the name of the method, for statistics.
        memory_bytes: the size of the buffers for pending reads.
    """

    name: str
    memory_bytes: int

    def read(self, reads: Reads, num_reads: int) -> None:
        """Carries out the first ``num_reads`` reads of a list, and copies the requested records.

        Raises:
            OSError: a block could not be read.
        """

    def close(self) -> None:
        """Releases its resources."""


def c_library() -> System:
    """Returns the C functions of this process that kernels call."""
    library = ctypes.CDLL(None)
    names = ("pread", "syscall", "__error" if sys.platform == "darwin" else "__errno_location")
    return System(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))


class ThreadedReader:
    """Threads that each wait for one read at a time."""

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


DEPTH = 256
IO_URING_SETUP = 425  # the same number on all processors
_REQUESTS_OFFSET = 0x10000000  # mmap offset of a ring's requests
_ONE_MAPPING, _KNOWS_READ = 1 << 0, 1 << 3  # features; Linux 5.6 added the second with reads
_PARAMETER_WORDS = 30
_REQUEST_BYTES, _RESULT_BYTES = 64, 16


class RingReader:
    """Reads blocks through an ``io_uring``, :data:`DEPTH` at a time.

    Raises:
        OSError: the system has no ``io_uring``, or does not let this process use it.
    """

    name = "io_uring"

    def __init__(self, file: DirectFile, blocks: Blocks, depth: int = DEPTH) -> None:
        self._file, self._blocks, self._system = file, blocks, c_library()
        self._ring = open_ring(depth)
        self._memory = aligned_memory(depth * blocks.read_bytes).reshape(depth, blocks.read_bytes)
        self.memory_bytes = self._memory.nbytes
        self._slots = np.empty((depth, SLOT_WORDS), np.int64)

    def read(self, reads: Reads, num_reads: int) -> None:
        """See :meth:`BlockReader.read`."""
        error = read_at_once(
            self._system,
            self._file.descriptor,
            self._blocks,
            reads,
            num_reads,
            self._ring,
            self._memory,
            self._slots,
        )
        if error:
            raise unreadable(error, self._file.where)

    def close(self) -> None:
        """Closes the ring."""
        os.close(self._ring.descriptor)


def open_ring(depth: int) -> Ring:
    """Opens a ring for up to ``depth`` requests at the same time. ``depth`` is a power of two.

    Raises:
        OSError: the system has no ``io_uring``, or does not let this process use it.
    """
    if not sys.platform.startswith("linux"):  # other systems use other call numbers
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = np.zeros(_PARAMETER_WORDS, np.uint32)
    descriptor = _system_call(IO_URING_SETUP, depth, words.ctypes.data)
    try:
        os.set_inheritable(descriptor, False)
        num_requests, num_results, features = int(words[0]), int(words[1]), int(words[5])
        if not features & _ONE_MAPPING or not features & _KNOWS_READ:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        _system_call(IO_URING_ENTER, descriptor, 0, 0, 0, 0, 0)  # some systems forbid only this call
        (_, asked, _, _, _, _, order), (taken, completed, _, _, _, results) = words[10:17], words[20:26]
        size = max(order + 4 * num_requests, results + _RESULT_BYTES * num_results)
        queues = _mapped(descriptor, int(size), 0)
        requests = _mapped(descriptor, _REQUEST_BYTES * num_requests, _REQUESTS_OFFSET)
    except BaseException:
        os.close(descriptor)
        raise
    queues[order : order + 4 * num_requests].view(np.int32)[:] = np.arange(num_requests)
    end = results + _RESULT_BYTES * num_results
    return Ring(
        descriptor,
        queues[asked : asked + 4].view(np.int32),
        requests.view(np.int64).reshape(num_requests, -1),
        queues[taken : taken + 4].view(np.int32),
        queues[completed : completed + 4].view(np.int32),
        queues[results:end].view(np.int64).reshape(num_results, -1),
    )


def _mapped(descriptor: int, size: int, offset: int) -> NDArray[np.uint8]:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, size, flags=flags, offset=offset), np.uint8)


def _system_call(number: int, *arguments: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    got = int(call(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)))
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got
