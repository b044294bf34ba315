"""Blocks from a disk that is slow, out of order and faulty: a system that the test plays itself."""

import ctypes
import errno

import numpy as np
import pytest

from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.disk import Reads, plan_reads
from girih.kernels.cpu.disk_reads import IO_URING_ENTER, SLOT_WORDS, Ring, read_at_once, read_in_turn
from girih.kernels.cpu.system import System
from girih.store.tiers.block_reader import c_library
from girih.store.tiers.record_log import blocks_of

BLOCKS = blocks_of(100, 64 << 10)
SEGMENTS, ENTRIES, RESULTS, DEPTH = 16, 16, 32, 16
FILE, RING = 7, 8
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 7, use_errno=True)


class Disk:
    """A file in memory, and a system that hands out what is asked of it in its own way.

    ``fault(rng)`` gives, for each request, how many bytes of it succeed, or a number below 0 for an error.
    """

    def __init__(self, seed, fault=lambda rng, size: size):
        self.rng, self.fault = np.random.default_rng(seed), fault
        self.file = self.rng.integers(0, 256, SEGMENTS * BLOCKS.segment_bytes, np.uint8)
        self.ring = Ring(
            RING,
            np.full(1, -3, np.int32),  # counters that run over soon
            np.zeros((ENTRIES, 8), np.int64),
            np.full(1, -2, np.int32),
            np.full(1, -2, np.int32),
            np.zeros((RESULTS, 2), np.int64),
        )
        self.flying, self.handed, self.most_flying, self.num_errors = [], -3, 0, 0
        self.functions = FUNCTION(self.pread), FUNCTION(self.enter)
        pread, enter = (ctypes.cast(each, ctypes.c_void_p).value for each in self.functions)
        self.system = System(pread, enter, c_library().errno)

    def serve(self, address, size, offset):
        found = self.fault(self.rng, size)
        if found > 0:
            ctypes.memmove(address, self.file[offset:].ctypes.data, found)
        self.num_errors += found != size
        return found

    def pread(self, file, address, size, offset, *_):
        assert file == FILE
        found = self.serve(address, size, offset)
        if found < 0:
            ctypes.set_errno(-found)
        return max(-1, found)

    def enter(self, call, ring, handed, least, flags, *_):
        assert (call, ring, least, flags) == (IO_URING_ENTER, RING, 1, 1)
        ready = (int(self.ring.asked[0]) - self.handed) & 0xFFFFFFFF
        assert handed <= ready <= ENTRIES
        if self.rng.random() < 0.2:
            ctypes.set_errno(int(self.rng.choice([errno.EINTR, errno.EAGAIN, errno.EBUSY])))
            return -1
        handed = self.rng.integers(1, handed + 1) if handed else 0
        for _ in range(handed):
            words = self.ring.requests[self.handed & (ENTRIES - 1)]
            assert words[0] == 22 | FILE << 32
            self.flying.append([int(word) for word in words])
            self.handed += 1
        self.most_flying = max(self.most_flying, len(self.flying))
        assert self.flying, "waits for nothing"
        for _ in range(self.rng.integers(1, len(self.flying) + 1)):
            words = self.flying.pop(self.rng.integers(len(self.flying)))
            given = int(self.ring.given[0])
            found = self.serve(words[2], words[3], words[1])
            self.ring.results[given & (RESULTS - 1)] = words[4], found & 0xFFFFFFFF | 5 << 32
            self.ring.given[0] = given + 1
        return handed


def read(disk, in_turn):
    """Some records, two hundred of them, and the error that reading them gave."""
    places = disk.rng.integers(0, SEGMENTS * BLOCKS.per_segment, 200)
    words = [np.empty(200 + extra, np.int64) for extra in (0, 0, 1, 0, 0)]
    out = np.zeros((200, BLOCKS.record_bytes), np.uint8)
    reads = Reads(*words, out)
    count = plan_reads(BLOCKS, sealed(places), np.argsort(places), np.zeros(SEGMENTS, np.int64), reads)
    memory = np.empty((DEPTH, BLOCKS.read_bytes), np.uint8)
    if in_turn:
        error = read_in_turn(disk.system, FILE, BLOCKS, reads, 0, count, memory[0])
    else:
        slots = np.empty((DEPTH, SLOT_WORDS), np.int64)
        error = read_at_once(disk.system, FILE, BLOCKS, reads, count, disk.ring, memory, slots)
        assert not disk.flying
    segment, number = np.divmod(places, BLOCKS.per_segment)
    block, inside = np.divmod(number, BLOCKS.per_block)
    starts = segment * BLOCKS.segment_bytes + block * BLOCKS.block_bytes + inside * BLOCKS.record_bytes
    expected = disk.file[starts[:, None] + np.arange(BLOCKS.record_bytes)]
    return error, np.array_equal(out, expected)


def sometimes(rng, size):
    """Half of the requests get less than all: some sectors, or nothing yet."""
    if rng.random() < 0.5:
        return size
    if size > 512 and rng.random() < 0.7:
        return int(rng.integers(512, size))
    return -int(rng.choice([errno.EINTR, errno.EAGAIN]))


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_short_reads_interrupts_and_refusals_are_asked_again(in_turn, seed):
    disk = Disk(seed, sometimes)
    assert read(disk, in_turn) == (0, True)
    assert disk.num_errors > 30
    if not in_turn:
        assert disk.most_flying > DEPTH // 2


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("found", [-errno.EIO, -errno.ENOMEM, 0, 100])
def test_an_error_and_the_end_of_the_file_are_told_when_nothing_is_on_its_way(in_turn, found):
    disk = Disk(9, lambda rng, size: found if rng.random() < 0.1 else size)
    assert read(disk, in_turn)[0] == (-found if found < 0 else errno.EIO)


def test_a_ring_that_fails_is_told():
    def refuse(*_):
        ctypes.set_errno(errno.EBADF)
        return -1

    disk, function = Disk(10), FUNCTION(refuse)
    disk.system = disk.system._replace(syscall=ctypes.cast(function, ctypes.c_void_p).value)
    assert read(disk, in_turn=False)[0] == errno.EBADF


def test_functions_of_the_library_are_called(tmp_path):
    """The real ``pread``, and the real ``errno``."""
    disk = Disk(11)
    (tmp_path / "file").write_bytes(disk.file.tobytes())
    words = [np.empty(1 + extra, np.int64) for extra in (0, 0, 1, 0, 0)]
    out, memory = np.zeros((1, BLOCKS.record_bytes), np.uint8), np.empty(BLOCKS.read_bytes, np.uint8)
    reads = Reads(*words, out)
    plan_reads(
        BLOCKS, sealed(np.zeros(1, np.int64)), np.zeros(1, np.int64), np.zeros(SEGMENTS, np.int64), reads
    )
    with (tmp_path / "file").open("rb") as file:
        descriptor = file.fileno()
        assert read_in_turn(c_library(), descriptor, BLOCKS, reads, 0, 1, memory) == 0
    np.testing.assert_array_equal(out[0], disk.file[: BLOCKS.record_bytes])
    assert read_in_turn(c_library(), -1, BLOCKS, reads, 0, 1, memory) == errno.EBADF
