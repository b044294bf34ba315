"""Records of one size on a disk.

Records are appended in segments (``record_log``) and read by place. The caller stores the place of each record, and
frees places that it no longer needs. The file keeps dead records until their segment is used again.
:meth:`ColdFile.collect` moves live records out of the segments with the fewest live records.

Shapes: n records, R bytes of a record, N records of a segment.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError
from girih.kernels.cpu import disk
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.disk import Blocks, Reads
from girih.store.spec import Ints, Longs
from girih.store.tiers.block_reader import BlockReader, RingReader, ThreadedReader
from girih.store.tiers.direct_file import DirectFile, aligned_memory
from girih.store.tiers.record_log import RecordLog, blocks_of

Bytes = NDArray[np.uint8]
_MOST_VICTIMS = 2


class Owners(Protocol):
    """The object that stores the places of records. Collection asks it for live records, and reports new places."""

    def alive(self, owners: Ints, places: Longs) -> Bytes:
        """Returns whether the owner of the record at each place still refers to it, uint8[n].

        An owner below 0 means that the record has no owner.

        Args:
            owners: int32[n]. places: int64[n].
        """
        ...

    def moved(self, owners: Ints, places: Longs) -> None:
        """Receives the new places, int64[n], of the records of owners, int32[n]."""
        ...


class _Victim(NamedTuple):
    segment: int
    memory: Bytes
    read: Future[None]


class ColdFile:
    """A file without a name, private to the process. One thread at a time calls its methods.

    Args:
        directory: the directory of the file, created if missing.
        record_bytes: R.
        segment_bytes: the approximate size of a write, a multiple of 4096.
        write_behind: the maximum number of segments that wait to be written.
        most_dead: the share of space that dead records may take before :meth:`collect` moves live records.
        engine: ``"io_uring"``, ``"threads"``, or ``"auto"``, which uses threads if the system has no io_uring.
        direct: False uses the page cache.

    Attributes:
        direct: True if the page cache is bypassed. Some file systems do not support this.
        engine: the engine that reads.
        counters: counts of reads and writes.

    Raises:
        ConfigError: the directory cannot be written.
        StorageFullError: the disk is full.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        record_bytes: int,
        *,
        segment_bytes: int = 4 << 20,
        write_behind: int = 4,
        most_dead: float = 0.25,
        engine: str = "auto",
        direct: bool = True,
    ) -> None:
        self._blocks = blocks_of(record_bytes, segment_bytes)
        self._write_behind = write_behind
        self._most_dead, self._too_dead = most_dead, (1 + most_dead) / 2
        self._file = DirectFile(directory, direct=direct)
        self.direct = self._file.direct
        self._log = RecordLog(self._file, self._blocks, write_behind)
        self.counters = self._log.counters
        try:
            self._reader = _reader(engine, self._file, self._blocks)
        except ConfigError:
            self._file.close()
            raise
        self.engine = self._reader.name
        self._reading = ThreadPoolExecutor(1, "girih-cold-read")
        self._victims: deque[_Victim] = deque()
        self._victim_memory = [np.empty(0, np.uint8)] * _MOST_VICTIMS
        self._moved: tuple[Ints, Bytes] | None = None

    @property
    def num_records(self) -> int:
        """The number of live records."""
        return self._log.num_live

    @property
    def num_bytes(self) -> int:
        """The space that the file takes on the disk, in bytes."""
        return self._log.segments.num_bytes

    @property
    def dead_share(self) -> float:
        """The share of dead records among all records in segments that are not free."""
        return self._log.dead_share

    @property
    def memory_bytes(self) -> int:
        """The maximum memory in bytes, for segments that are filled, written or collected, and for pending reads."""
        segments = 1 + self._write_behind + _MOST_VICTIMS + 1
        return segments * self._blocks.segment_bytes + self._reader.memory_bytes

    def append(self, records: Bytes, owners: Ints) -> Longs:
        """Adds records. They can be read immediately. A thread writes them to the disk later.

        Waits only if ``write_behind`` segments are being written already.

        Args:
            records: uint8[n, R]. owners: int32[n], not negative. :meth:`collect` asks for live records by owner.

        Returns:
            int64[n]: the place of each record.

        Raises:
            StorageFullError: the disk is full. No record was added.
            OSError: an earlier segment could not be written.
        """
        self._log.reserve(len(owners), spare=1)  # one is left for collection, which makes room
        return self._log.append(records, owners)

    def begin_read(self, places: Longs, out: Bytes) -> Future[None]:
        """Starts to read all given records together.

        A block with several of the records is read once. Adjacent blocks are read together. While the read runs, places
        may be freed and records may be moved.

        Args:
            places: int64[n], the places of live records.
            out: uint8[n, R], C-contiguous. Do not touch it until the read is done.

        Returns:
            A future that ends when all records are read. Its result raises OSError if a block could not be read.

        Raises:
            IndexError: a place was never returned by :meth:`append`.
            StorageFullError, OSError: an earlier segment could not be written.
        """
        self._log.settle()
        count, counters = len(places), self.counters
        offsets, sizes, rows, inside = np.empty((4, count), np.int64)
        reads = Reads(offsets, sizes, np.empty(count + 1, np.int64), rows, inside, out)
        memory = self._log.segments.memory[: self._log.segments.num_segments]
        num_reads = disk.plan_reads(self._blocks, sealed(places), np.argsort(places), memory, reads)
        if num_reads < 0:
            raise IndexError(f"{self._file.where}: a place below 0 or above {self._log.end_place - 1}")
        counters.records_read += count
        counters.records_in_memory += count - int(reads.starts[num_reads])
        counters.device_reads += num_reads
        counters.bytes_read += int(reads.sizes[:num_reads].sum())
        if num_reads == 0:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        read = self._reading.submit(self._reader.read, reads, num_reads)
        ticket = self._log.segments.ticket(read.exception)
        read.add_done_callback(lambda _: self._log.segments.give_back(ticket))
        return read

    def free(self, places: Longs) -> None:
        """Frees the records at places, int64[n], without duplicates."""
        self._log.free(places, {victim.segment for victim in self._victims})

    def hold(self) -> int:
        """Keeps all live records readable until :meth:`let_go`, even if they are freed or moved. Returns a ticket."""
        return self._log.segments.ticket()

    def let_go(self, ticket: int) -> None:
        """Ends a :meth:`hold`. Any thread may call it."""
        self._log.segments.give_back(ticket)

    def collect(self, owners: Owners, *, wait: bool = False) -> int:
        """Moves live records out of the segments with the fewest, if the share of dead records is above ``most_dead``.

        A call starts to read segments in the background, and a later call moves their records. So call this method at
        each step. It waits for the disk only if the share is above the mean of ``most_dead`` and 1.

        Args:
            owners: the object that knows which records are alive, and receives new places.
            wait: True waits until the share of dead records is at most ``most_dead``.

        Returns:
            The number of moved records.

        Raises:
            StorageFullError: the disk is full.
            OSError: a segment could not be read or written.
        """
        self._log.settle()
        moved = 0
        self._choose_victims()
        while self._victims and (
            wait or self._victims[0].read.done() or self._log.dead_share > self._too_dead
        ):
            moved += self._move(owners)
            self._choose_victims()
        return moved

    def close(self) -> None:
        """Releases the file and all memory. Pending reads are completed."""
        self._reading.shutdown()
        self._log.writer.close()
        self._reader.close()
        self._file.close()

    def _choose_victims(self) -> None:
        """Starts to read the segments with the fewest live records, if the share of dead records is too large."""
        while len(self._victims) < _MOST_VICTIMS and self._log.dead_share > self._most_dead:
            segments = self._log.segments
            num_live = segments.num_live[: segments.num_segments].copy()
            num_live[segments.memory[: segments.num_segments] != 0] = self._blocks.per_segment
            num_live[[victim.segment for victim in self._victims]] = self._blocks.per_segment
            num_live[num_live == 0] = self._blocks.per_segment  # free already
            segment = int(num_live.argmin())
            if num_live[segment] > (1 - self._most_dead) * self._blocks.per_segment:
                return
            memory = self._victim_memory.pop()
            if len(memory) == 0:
                memory = aligned_memory(self._blocks.segment_bytes)
            read = self._log.writer.run(self._file.read, memory, segment * self._blocks.segment_bytes)
            self.counters.bytes_read += len(memory)
            self._victims.append(_Victim(segment, memory, read))

    def _move(self, asked: Owners) -> int:
        segment, memory, read = self._victims[0]
        read.result()
        blocks, segments = self._blocks, self._log.segments
        if self._moved is None:
            self._moved = (
                np.empty(blocks.per_segment, np.int32),
                np.empty((blocks.per_segment, blocks.record_bytes), np.uint8),
            )
        owners, records = self._moved
        owned = memory[blocks.per_segment // blocks.per_block * blocks.block_bytes :].view(np.int32)
        first = segment * blocks.per_segment
        alive = asked.alive(owned[: blocks.per_segment], np.arange(first, first + blocks.per_segment))
        count = disk.take_live(blocks, memory, alive, owners, records)
        if count != segments.num_live[segment]:
            raise RuntimeError(
                f"{self._file.where}: {segments.num_live[segment]} records of segment {segment} were not freed,"
                f" but places name {count}"
            )
        self._log.reserve(count, spare=0)
        asked.moved(owners[:count], self._log.append(records[:count], owners[:count]))
        self._victims.popleft()
        self._victim_memory.append(memory)
        self._log.retire(segment)
        self.counters.records_moved += count
        self.counters.segments_collected += 1
        return count


def _reader(engine: str, file: DirectFile, blocks: Blocks) -> BlockReader:
    if engine not in ("auto", "io_uring", "threads"):
        raise ConfigError(f"engine {engine!r}: expected 'auto', 'io_uring' or 'threads'")
    if engine != "threads":
        try:
            return RingReader(file, blocks)
        except OSError as error:  # many containers forbid it, and old systems lack it
            if engine == "io_uring":
                raise ConfigError(
                    f"engine 'io_uring': this system does not offer it ({error.strerror}); use 'auto'"
                ) from None
    return ThreadedReader(file, blocks)
