"""Reads blocks of a file with direct I/O, one at a time by ``pread``, or many at the same time by ``io_uring``.

A ring is memory that is shared with the system. It has a queue for requests, and a queue for results, which arrive in
any order. One call submits requests and waits for a result, so one thread keeps a whole disk busy.

Shapes: m reads of a list, Q pending reads, E entries for requests, C entries for results. E and C are powers of two.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from girih.kernels.cpu.arrays import I32, I64, U8, I64x2, U8x2
from girih.kernels.cpu.disk import Blocks, Reads, take_records
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.system import System, address_of, call, errno_of, load_acquire, store_release

IO_URING_ENTER = 426  # the same number on all processors
_GET_EVENTS = 1
_READ = 22
_SECTOR = 512  # a short read continues at a whole sector
_EINTR, _EAGAIN, _EBUSY, _EIO = errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EIO
_COUNTERS = 0xFFFFFFFF  # counters of the ring wrap around
_NUMBER, _DONE, _FREE = range(3)
SLOT_WORDS = 3


class Ring(NamedTuple):
    """The queues of an ``io_uring``, in memory that the system reads and writes concurrently.

    Attributes:
        descriptor: the file descriptor of the ring.
        asked: int32[1], the number of all requests that were written.
        requests: int64[E, 8], the requests.
        taken: int32[1], the number of all results that were read.
        given: int32[1], the number of all results that the system wrote.
        results: int64[C, 2], the results.
    """

    descriptor: int
    asked: I32
    requests: I64x2
    taken: I32
    given: I32
    results: I64x2


@kernel()
def read_in_turn(
    system: System, file: int, blocks: Blocks, reads: Reads, first: int, last: int, memory: U8
) -> Any:
    """Carries out reads ``first`` to ``last`` of the list, one at a time, and copies the requested records of each.

    Args:
        memory: uint8[read_bytes], aligned.

    Returns:
        0, or the error number. The number is EIO if the file is too short.
    """
    target = address_of(memory)
    for number in range(first, last):
        done, size = 0, reads.sizes[number]
        while done < size:
            got = call(system.pread, file, target + done, size - done, reads.offsets[number] + done, 0, 0, 0)
            if got < 0:
                error = errno_of(system)
                if error != _EINTR and error != _EAGAIN:
                    return error
            elif done + got == size:
                done = size
            elif got < _SECTOR:
                return _EIO
            else:
                done += got // _SECTOR * _SECTOR
        take_records(blocks, reads, number, target)
    return 0


@kernel()
def read_at_once(
    system: System,
    file: int,
    blocks: Blocks,
    reads: Reads,
    num_reads: int,
    ring: Ring,
    memory: U8x2,
    slots: I64x2,
) -> Any:
    """Carries out all reads of the list, and copies the requested records of each. Up to Q reads run at the same time.

    Reads end in any order. After an error, this function submits no more requests and waits for pending requests.

    Args:
        num_reads: the number of reads, m.
        memory: uint8[Q, read_bytes], aligned. Q is at most E.
        slots: scratch, int64[Q, 3], the state of each pending read.

    Returns:
        0, or the error number. The number is EIO if the file is too short.
    """
    error = 0
    asked, taken = load_acquire(ring.asked), load_acquire(ring.taken)
    next_read, num_flying, num_waiting, is_refused = 0, 0, 0, False
    num_free = len(memory)
    for slot in range(num_free):
        slots[slot, _FREE] = slot
    while num_flying > 0 or (next_read < num_reads and error == 0):
        while num_free > 0 and next_read < num_reads and error == 0:
            num_free -= 1
            slot = slots[num_free, _FREE]
            slots[slot, _NUMBER], slots[slot, _DONE] = next_read, 0
            _write_request(ring, asked + num_waiting, file, blocks, reads, memory, slots, slot)
            next_read += 1
            num_flying += 1
            num_waiting += 1
        store_release(ring.asked, asked + num_waiting)
        # If the ring lacks memory for a request, submit the request again after some requests have finished.
        handed = 0 if is_refused and num_flying > num_waiting else num_waiting
        got = call(system.syscall, IO_URING_ENTER, ring.descriptor, handed, 1, _GET_EVENTS, 0, 0)
        is_refused = False
        if got >= 0:
            asked += got
            num_waiting -= got
        else:
            failure = errno_of(system)
            is_refused = failure == _EAGAIN or failure == _EBUSY
            if not is_refused and failure != _EINTR:
                return failure  # the ring is unusable
        given = load_acquire(ring.given)
        while (given - taken) & _COUNTERS:
            result = taken & (len(ring.results) - 1)
            slot = ring.results[result, 0]
            found = _signed(ring.results[result, 1])
            taken += 1
            done, size = slots[slot, _DONE] + found, reads.sizes[slots[slot, _NUMBER]]
            if found >= 0 and done < size and found >= _SECTOR:
                slots[slot, _DONE] += found // _SECTOR * _SECTOR
            elif found < 0 and (found == -_EINTR or found == -_EAGAIN):
                pass
            else:
                if found < 0:
                    error = -found
                elif done < size:
                    error = _EIO
                elif error == 0:
                    take_records(
                        blocks, reads, slots[slot, _NUMBER], address_of(memory) + slot * blocks.read_bytes
                    )
                slots[num_free, _FREE] = slot
                num_free += 1
                num_flying -= 1
                continue
            _write_request(ring, asked + num_waiting, file, blocks, reads, memory, slots, slot)
            num_waiting += 1
        store_release(ring.taken, taken)
    return error


@njit_lean
def _write_request(
    ring: Ring,
    number: Any,
    file: Any,
    blocks: Blocks,
    reads: Reads,
    memory: U8,
    slots: I64,
    slot: Any,
) -> None:
    """Requests the missing part of a slot's read."""
    request, read, done = number & (len(ring.requests) - 1), slots[slot, _NUMBER], slots[slot, _DONE]
    words = ring.requests[request]
    words[0] = _READ | (file << 32)
    words[1] = reads.offsets[read] + done
    words[2] = address_of(memory) + slot * blocks.read_bytes + done
    words[3] = reads.sizes[read] - done
    words[4] = slot
    words[5] = 0
    words[6] = 0
    words[7] = 0


@njit_lean
def _signed(word: Any) -> Any:
    """Returns the lower 32 bits of a word as a signed number."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
