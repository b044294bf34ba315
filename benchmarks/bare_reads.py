"""Blocks read with nothing around them: what a disk gives to the same requests, for `girih bench ssd_reads`.

Nothing is found, sorted, copied or checked but the number of bytes.

Shapes: m blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.disk_reads import IO_URING_ENTER, Ring
from girih.kernels.cpu.jit import numba
from girih.kernels.cpu.system import System, address_of, call, load_acquire, store_release
from girih.store.tiers.block_reader import c_library, open_ring
from girih.store.tiers.direct_file import aligned_memory

Longs = NDArray[np.int64]
_COUNTERS = 0xFFFFFFFF


def bare_ring(file: int, block_bytes: int, depth: int) -> Callable[[Longs], None]:
    """Reads blocks at int64[m] offsets through an io_uring, in order, ``depth`` at a time."""
    system, ring = c_library(), open_ring(depth)
    memory = aligned_memory(depth * block_bytes).reshape(depth, block_bytes)

    def read(offsets: Longs) -> None:
        if _read_ring(system, file, offsets, ring, memory):
            raise OSError("a block could not be read through the bare ring")

    return read


def bare_threads(file: int, block_bytes: int, number: int) -> Callable[[Longs], None]:
    """Reads blocks at int64[m] offsets by ``os.preadv``, in threads that take turns at the interpreter."""
    pool = ThreadPoolExecutor(number)
    memory = [aligned_memory(block_bytes).data for _ in range(number)]

    def read_part(part: list[int], block: memoryview) -> None:
        for offset in part:
            if os.preadv(file, [block], offset) != block_bytes:
                raise OSError("a block could not be read by a bare thread")

    def read(offsets: Longs) -> None:
        parts = [part.tolist() for part in np.array_split(offsets, number)]
        list(pool.map(read_part, parts, memory))

    return read


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _ask(ring: Ring, number: int, file: int, offset: int, address: int, size: int, slot: int) -> None:
    words = ring.requests[number & (len(ring.requests) - 1)]
    words[:] = 0
    words[0], words[1], words[2], words[3], words[4] = 22 | (file << 32), offset, address, size, slot


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read_ring(system: System, file: int, offsets: Longs, ring: Ring, memory: Any) -> int:
    depth, size = memory.shape
    asked, taken = load_acquire(ring.asked), load_acquire(ring.taken)
    done, waiting = 0, 0
    for slot in range(min(depth, len(offsets))):
        _ask(ring, asked + waiting, file, offsets[slot], address_of(memory) + slot * size, size, slot)
        waiting += 1
    begun = waiting
    while done < len(offsets):
        store_release(ring.asked, asked + waiting)
        got = call(system.syscall, IO_URING_ENTER, ring.descriptor, waiting, 1, 1, 0, 0)
        if got < 0:
            return 1
        asked, waiting = asked + got, waiting - got
        given = load_acquire(ring.given)
        while (given - taken) & _COUNTERS:
            slot, found = ring.results[taken & (len(ring.results) - 1)]
            if found & _COUNTERS != size:
                return 1
            taken, done = taken + 1, done + 1
            if begun < len(offsets):
                address = address_of(memory) + slot * size
                _ask(ring, asked + waiting, file, offsets[begun], address, size, slot)
                begun, waiting = begun + 1, waiting + 1
        store_release(ring.taken, taken)
    return 0
