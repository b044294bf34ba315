"""Records of one size on a disk: appended in segments (``record_log``), read by place, collected where few are left alive.

Whoever asks keeps the place of each record and gives up what it does not refer to any more. A log on a disk keeps
dead records until the segment that holds them is used again; :meth:`ColdFile.collect` moves the live ones out of the
segments with the fewest.

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
    """Whoever refers to records, as collection asks."""

    def alive(self, owners: Ints, places: Longs) -> Bytes:
        """Whether the record at each place is what its owner refers to: uint8[n]; owners below 0 are nobody's.

        Args:
            owners: int32[n]. places: int64[n].
        """
        ...

    def moved(self, owners: Ints, places: Longs) -> None:
        """Owners, int32[n], refer to these places from now on, int64[n]."""
        ...


class _Victim(NamedTuple):
    segment: int
    memory: Bytes
    read: Future[None]


class ColdFile:
    """A file without a name, private to the process. One thread at a time calls its methods.

    Args:
        directory: where the file lies; made if it is missing.
        record_bytes: R.
        segment_bytes: about how much is written at a time, a multiple of 4096.
        write_behind: segments that may be on their way to the disk.
        most_dead: the share of its space that dead records may take before :meth:`collect` moves live ones.
        engine: ``"io_uring"``, ``"threads"``, or ``"auto"``: threads where the system does not offer io_uring.
        direct: False goes through the page cache.

    Attributes:
        direct: whether the page cache is out of play; some file systems refuse that.
        engine: which one reads.
        counters: what it did.

    Raises:
        ConfigError: the directory cannot be written.
        StorageFullError: its disk is full.
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
        """Records that somebody refers to."""
        return self._log.num_live

    @property
    def num_bytes(self) -> int:
        """The space that the file takes on the disk."""
        return self._log.segments.num_bytes

    @property
    def dead_share(self) -> float:
        """Which share of the records that were written, and whose space is not free, nobody refers to."""
        return self._log.dead_share

    @property
    def memory_bytes(self) -> int:
        """Memory that it may come to hold: segments that are filled, written, read and moved, and reads on their way."""
        segments = 1 + self._write_behind + _MOST_VICTIMS + 1
        return segments * self._blocks.segment_bytes + self._reader.memory_bytes

    def append(self, records: Bytes, owners: Ints) -> Longs:
        """Adds records; they can be read at once, and are written behind.

        Waits only where ``write_behind`` segments are being written already.

        Args:
            records: uint8[n, R]. owners: int32[n], not negative; :meth:`collect` asks by them.

        Returns:
            int64[n]: the place of each.

        Raises:
            StorageFullError: the disk is full; nothing was added.
            OSError: an earlier segment could not be written.
        """
        self._log.reserve(len(owners), spare=1)  # one is left for collection, by which room is made
        return self._log.append(records, owners)

    def begin_read(self, places: Longs, out: Bytes) -> Future[None]:
        """Asks the disk for records, for all at once.

        Blocks with several of them are read once, and blocks that follow each other together.

        Places may be given up before the read is done, and their records moved.

        Args:
            places: int64[n], of records that are alive now.
            out: uint8[n, R], C-contiguous; nobody touches it until the read is done.

        Returns:
            The read; its result raises OSError if a block could not be read.

        Raises:
            IndexError: a place that was never given.
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
        """Gives up records: nobody refers to these int64[n] places any more, each of which is named once."""
        self._log.free(places, {victim.segment for victim in self._victims})

    def hold(self) -> int:
        """Keeps all that is alive now readable, whatever is given up or moved, until the ticket is let go of."""
        return self._log.segments.ticket()

    def let_go(self, ticket: int) -> None:
        """Ends what :meth:`hold` began; called by any thread."""
        self._log.segments.give_back(ticket)

    def collect(self, owners: Owners, *, wait: bool = False) -> int:
        """Moves live records out of the segments with the fewest, where dead ones take more than ``most_dead``.

        Segments are read in the background and moved by a later call, so that this is to be called often, at each
        step. It waits for the disk only where dead records take far more than that, half-way to all.

        Args:
            owners: know which records are alive, and are told their new places.
            wait: until dead records take no more than ``most_dead``.

        Returns:
            How many records were moved.

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
        """Lets go of the file and of all that it holds; reads that were begun are finished."""
        self._reading.shutdown()
        self._log.writer.close()
        self._reader.close()
        self._file.close()

    def _choose_victims(self) -> None:
        """Has the segments with the fewest live records read, where there are too many dead ones."""
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
        except OSError as error:  # forbidden in many containers, and unknown to old systems
            if engine == "io_uring":
                raise ConfigError(
                    f"engine 'io_uring': this system does not offer it ({error.strerror}); use 'auto'"
                ) from None
    return ThreadedReader(file, blocks)
