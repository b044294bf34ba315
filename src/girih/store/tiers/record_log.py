"""Records of one size, appended to a file in segments. A thread writes the segments later.

    places of records   0 … N      N … 2N     2N … 3N
    file                segment 0  segment 1  segment 2  …   each: blocks of records, then their owners
                        on disk    written    filled         the last two are in memory too

Shapes: n records, R bytes of a record, N records of a segment.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu import disk
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.disk import NOBODY, Blocks
from girih.store.spec import Ints, Longs
from girih.store.tiers.direct_file import BLOCK_BYTES, DirectFile, aligned_memory

Bytes = NDArray[np.uint8]


_GROWTH = 8  # the file grows by 1/8 of its size, so that its space has few large parts
_MOST_GROWTH_BYTES = 256 << 20
_LEAST_SPARE = 4


class FileSegments:
    """The segments of a file, and the number of live records in each.

    A read may still use a segment without live records. So each read takes a *ticket* and gives it back at the end. A
    segment is reused only after all tickets that existed when the segment was given up have been given back.

    Args:
        segment_bytes: the size of a segment.

    Attributes:
        num_live: int64[·], the live records of each segment. Only the first :attr:`num_segments` numbers are valid.
        memory: int64[·], the address of each segment's memory, or 0 if the segment is on the disk.
    """

    def __init__(self, file: DirectFile, segment_bytes: int) -> None:
        self._file, self._segment_bytes = file, segment_bytes
        self.num_segments = 0
        self.num_live: Longs = np.zeros(16, np.int64)
        self.memory: Longs = np.zeros(16, np.int64)
        self._free: list[int] = []  # heaps: low segments are used first
        self._holes: list[int] = []
        self._given_up: deque[tuple[int, int]] = deque()
        self._tickets: dict[int, Callable[[], object] | None] = {}
        self._num_tickets = 0
        self._has_holes = True

    @property
    def num_used(self) -> int:
        """The number of segments with records, live or dead."""
        return self.num_segments - len(self._free) - len(self._holes) - len(self._given_up)

    @property
    def num_bytes(self) -> int:
        """The space that the file takes, in bytes."""
        return (self.num_segments - len(self._holes)) * self._segment_bytes

    def reserve(self, count: int, *, wait: bool = False) -> None:
        """Makes sure that ``count`` segments can be taken.

        Args:
            wait: True waits for reads of segments that were given up.

        Raises:
            StorageFullError: the disk is full.
        """
        self._settle(wait=wait)
        while len(self._free) < count and self._holes:
            start = self._holes[0] * self._segment_bytes
            self._file.claim(start, start + self._segment_bytes)
            heapq.heappush(self._free, heapq.heappop(self._holes))
        if len(self._free) < count:
            self._grow(count - len(self._free))

    def take(self) -> int:
        """Returns the number of a reserved segment, and marks the segment as used."""
        return heapq.heappop(self._free)

    def give_up(self, segment: int) -> None:
        """Gives up a segment without live records, so that it can be reused."""
        self._given_up.append((self._num_tickets, segment))

    def ticket(self, wait: Callable[[], object] | None = None) -> int:
        """Returns a ticket. Segments that are given up later stay unchanged until the ticket is given back.

        Args:
            wait: a function that waits until the ticket is given back, if another thread gives it back.
        """
        self._num_tickets += 1
        self._tickets[self._num_tickets - 1] = wait
        return self._num_tickets - 1

    def give_back(self, ticket: int) -> None:
        """Gives a ticket back. Any thread may call it."""
        self._tickets.pop(ticket, None)

    def _settle(self, *, wait: bool) -> None:
        """Frees the segments that were given up and are not read. Returns surplus space to the file system."""
        while self._given_up and self.memory[self._given_up[0][1]] == 0:
            number, segment = self._given_up[0]
            if not self._are_back(number, wait):
                break
            self._given_up.popleft()
            heapq.heappush(self._free, segment)
        spare = max(_LEAST_SPARE, self.num_used // _GROWTH)
        if len(self._free) > 2 * spare and self._has_holes:
            self._free.sort()
            while len(self._free) > spare and self._has_holes:
                start = self._free[-1] * self._segment_bytes
                self._has_holes = self._file.let_go(start, start + self._segment_bytes)
                if self._has_holes:
                    heapq.heappush(self._holes, self._free.pop())

    def _are_back(self, number: int, wait: bool) -> bool:
        """Returns whether all tickets below ``number`` were given back."""
        for ticket in list(self._tickets):
            if ticket >= number:
                break
            until = self._tickets.get(ticket)
            if ticket not in self._tickets:  # another thread has just given it back
                continue
            if not wait or until is None:
                return False
            until()
            self.give_back(ticket)
        return True

    def _grow(self, count: int) -> None:
        most = max(count, min(self.num_segments // _GROWTH, _MOST_GROWTH_BYTES // self._segment_bytes))
        try:
            self._file.grow(most * self._segment_bytes)
        except StorageFullError:
            if most == count:
                raise
            most = count
            self._file.grow(most * self._segment_bytes)
        first, self.num_segments = self.num_segments, self.num_segments + most
        while len(self.num_live) < self.num_segments:
            self.num_live = np.append(self.num_live, np.zeros_like(self.num_live))
            self.memory = np.append(self.memory, np.zeros_like(self.memory))
        for segment in range(first, self.num_segments):
            heapq.heappush(self._free, segment)


class _Write(NamedTuple):
    segment: int
    memory: Bytes
    done: Future[None]


class WriteBehind:
    """Writes segments to the file in order, in a thread. Only one thread calls the methods of this object.

    Args:
        segment_bytes: the size of a segment. Segments are adjacent in the file.
        most: the maximum number of segments that wait to be written.
    """

    def __init__(self, file: DirectFile, segment_bytes: int, most: int) -> None:
        self._file, self._segment_bytes = file, segment_bytes
        self._left = most + 1  # buffers that may still be made; one is filled during writes
        self._free: list[Bytes] = []
        self._writes: deque[_Write] = deque()
        self._thread = ThreadPoolExecutor(1, "girih-cold-write")

    def take(self, written: list[int]) -> Bytes:
        """Returns memory for a segment, uint8[segment_bytes]. Waits if all memory waits to be written.

        Args:
            written: this call appends the segments that were written since the last call. Their memory is reused.
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
        """Starts to write a segment. Do not change its memory until the write is done."""
        done = self._thread.submit(self._file.write, memory, segment * self._segment_bytes)
        self._writes.append(_Write(segment, memory, done))

    def settle(self, *, wait: bool = False) -> list[int]:
        """Returns the segments that were written since the last call. With ``wait``, first waits for all segments.

        Raises:
            StorageFullError: the disk is full. Later calls raise it too.
            OSError: a write failed. Later calls raise it too.
        """
        written = []
        while self._writes and (wait or self._writes[0].done.done()):
            self._writes[0].done.result()
            write = self._writes.popleft()
            self._free.append(write.memory)
            written.append(write.segment)
        return written

    def run(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Runs a function in the thread, after the segments that wait to be written."""
        return self._thread.submit(work, *arguments)

    def close(self) -> None:
        """Ends the thread after its current work, and drops the rest."""
        self._thread.shutdown(cancel_futures=True)


_MOST_READ_BYTES = 16 << 10


@dataclass(slots=True)
class ColdCounters:
    """Counts of a file's reads and writes since its creation.

    Attributes:
        bytes_read, bytes_written: bytes that the disk read and wrote, in whole blocks.
        device_reads: the number of reads. A read is of one block, or of several adjacent blocks.
        records_read: records that :meth:`ColdFile.begin_read` read. ``records_in_memory`` of them needed no disk.
        records_appended: all appended records. Collection moved ``records_moved`` of them.
        segments_collected: segments whose live records were moved.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    device_reads: int = 0
    records_read: int = 0
    records_in_memory: int = 0
    records_appended: int = 0
    records_moved: int = 0
    segments_collected: int = 0


class RecordLog:
    """The segments of a file. New records are appended at the end.

    Args:
        write_behind: the maximum number of segments that wait to be written.

    Attributes:
        num_live: the number of live records.
    """

    def __init__(self, file: DirectFile, blocks: Blocks, write_behind: int) -> None:
        self.file, self.blocks = file, blocks
        self.segments = FileSegments(file, blocks.segment_bytes)
        self.writer = WriteBehind(file, blocks.segment_bytes, write_behind)
        self.counters = ColdCounters()
        self.num_live = 0
        self._open: tuple[int, Bytes] | None = None
        self._num_filled = blocks.per_segment  # records of the open segment

    @property
    def end_place(self) -> int:
        """The first place after the last possible record."""
        return self.segments.num_segments * self.blocks.per_segment

    @property
    def dead_share(self) -> float:
        """The share of dead records among all records in segments that are not free."""
        room = self.segments.num_used * self.blocks.per_segment
        written = room - (self.blocks.per_segment - self._num_filled)
        return 1 - self.num_live / written if written else 0.0

    def append(self, records: Bytes, owners: Ints) -> Longs:
        """Adds records, uint8[n, R], of owners, int32[n]. Returns the records' places, int64[n].

        Call :meth:`reserve` before, so that there is room.
        """
        places = np.empty(len(owners), np.int64)
        done, per_segment = 0, self.blocks.per_segment
        while done < len(owners):
            segment, memory = self._open_segment()
            stop = min(len(owners), done + per_segment - self._num_filled)
            disk.put_records(
                self.blocks, memory, self._num_filled, sealed(records), sealed(owners), done, stop
            )
            first = segment * per_segment + self._num_filled
            places[done:stop] = np.arange(first, first + stop - done)
            self._num_filled += stop - done
            self.segments.num_live[segment] += stop - done
            self.num_live += stop - done
            done = stop
        self.counters.records_appended += len(owners)
        return places

    def free(self, places: Longs, busy: Collection[int]) -> None:
        """Frees the records at places, int64[n], without duplicates. ``busy`` segments are not given up yet."""
        segments = places // self.blocks.per_segment
        np.subtract.at(self.segments.num_live, segments, 1)
        self.num_live -= len(places)
        touched = np.unique(segments)
        if (self.segments.num_live[touched] < 0).any():
            raise RuntimeError(f"{self.file.where}: more records were freed than are alive")
        filled = None if self._open is None else self._open[0]
        for segment in touched[self.segments.num_live[touched] == 0]:
            if int(segment) != filled and int(segment) not in busy:
                self.segments.give_up(int(segment))

    def retire(self, segment: int) -> None:
        """Gives up a segment whose live records were moved."""
        self.num_live -= int(self.segments.num_live[segment])
        self.segments.num_live[segment] = 0
        self.segments.give_up(segment)

    def settle(self, *, wait: bool = False) -> None:
        """Records the finished writes. With ``wait``, waits for all pending writes.

        Raises:
            StorageFullError, OSError: a segment could not be written.
        """
        self._settled(self.writer.settle(wait=wait))

    def reserve(self, count: int, spare: int) -> None:
        """Makes room for ``count`` records and ``spare`` additional segments.

        Raises:
            StorageFullError: the disk is full.
        """
        missing = count - (self.blocks.per_segment - self._num_filled)
        needed = max(0, -(-missing // self.blocks.per_segment)) + spare
        try:
            self.segments.reserve(needed)
        except StorageFullError:  # given-up segments may still be written or read
            self.settle(wait=True)
            self.segments.reserve(needed, wait=True)

    def _settled(self, written: list[int]) -> None:
        self.segments.memory[written] = 0
        self.counters.bytes_written += len(written) * self.blocks.segment_bytes

    def _open_segment(self) -> tuple[int, Bytes]:
        """Returns the segment that is being filled, with room for a record."""
        if self._open is not None and self._num_filled < self.blocks.per_segment:
            return self._open
        if self._open is not None:
            segment, memory = self._open
            self._open = None
            self.writer.submit(segment, memory)
            if self.segments.num_live[segment] == 0:
                self.segments.give_up(segment)
        written: list[int] = []
        memory = self.writer.take(written)
        self._settled(written)
        memory[self.blocks.per_segment // self.blocks.per_block * self.blocks.block_bytes :] = NOBODY & 0xFF
        segment = self.segments.take()
        self.segments.memory[segment] = memory.ctypes.data
        self._open, self._num_filled = (segment, memory), 0
        return self._open


def blocks_of(record_bytes: int, segment_bytes: int) -> Blocks:
    """Returns the layout of a segment for records of some size.

    A block has the smallest allowed size that holds a record. A segment has the largest number of blocks that fits into
    it together with the numbers of the records' owners.

    Raises:
        ConfigError: a segment would hold no record, or its size is not a multiple of 4096 bytes.
    """
    block_bytes = -(-record_bytes // BLOCK_BYTES) * BLOCK_BYTES
    per_block = block_bytes // record_bytes
    num_blocks = segment_bytes // block_bytes
    while num_blocks > 0:
        owners = -(-4 * num_blocks * per_block // BLOCK_BYTES) * BLOCK_BYTES
        if num_blocks * block_bytes + owners <= segment_bytes:
            break
        num_blocks -= 1
    if num_blocks <= 0 or segment_bytes % BLOCK_BYTES:
        raise ConfigError(
            f"segment_bytes = {segment_bytes}: expected a multiple of {BLOCK_BYTES} that holds a record of"
            f" {record_bytes} bytes"
        )
    read_bytes = max(1, _MOST_READ_BYTES // block_bytes) * block_bytes
    return Blocks(record_bytes, block_bytes, read_bytes, per_block, num_blocks * per_block, segment_bytes)
