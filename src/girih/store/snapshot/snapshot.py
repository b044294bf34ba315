"""The state of a store at one moment, read while verbs run. Rows are copied on write, chunk by chunk.

    rows 0 … R (chunks of up to 8 MB)              copied under the lock, one chunk at a time, in order
    ├── copied ──┼── not yet ──────────────┤
                        ▲ a verb writes here: it first copies the old record to the log, once
                        log (8 MB) ── full ──► a file without a name, grouped by chunk

The reader copies a chunk in its current state. Then it overwrites the copy with the old records from the log and the
file. At the start, a snapshot copies only the numbers of tables and the counters. The cost of the start does not grow
with the number of rows, except for one bit per row.

Memory: one bit per row, the log and up to 16 copies of it that wait to be written, and two chunks for the reader.

Shapes: V 32-bit words of a row, K rows of a chunk, T tables.
"""

from __future__ import annotations

import errno
import os
import queue
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, StorageFullError
from girih.kernels.cpu import layout, saving
from girih.store.snapshot.columns import Chunk, bloom_tensors, columns_of
from girih.store.snapshot.tensorfile import StoredTensor
from girih.store.spec import Description, Ints, Longs
from girih.store.values import Values

_MOST_BUFFERS = 16


class _Spill(NamedTuple):
    start: int
    ends: Longs
    written: Future[None]


class SpillFile:
    """A file for records that one thread spills. Another thread may read them back at the same time.

    Args:
        directory: the directory of the file. The file has no name.
        most_records: the maximum number of records per spill, L. num_words: the words of a row, V.
        num_bytes: the number of bytes spilled so far.
    """

    def __init__(self, directory: str | os.PathLike[str], most_records: int, num_words: int) -> None:
        self.num_bytes = 0
        self._directory = directory
        self._num_words = 1 + num_words
        self._spills: list[_Spill] = []
        self._file: IO[bytes] | None = None
        self._writer = ThreadPoolExecutor(1, "girih-spill")
        self._buffers: queue.LifoQueue[Ints] = queue.LifoQueue()  # the last buffer is in memory already
        for buffer in np.empty((_MOST_BUFFERS, most_records, 1 + num_words), np.int32):
            self._buffers.put(buffer)

    def add(self, gather: Callable[[Ints, Longs], int], num_chunks: int) -> None:
        """Spills the records that ``gather`` writes to int32[L, 1 + V], chunk by chunk.

        ``gather`` also sets the end of each chunk's records, int64[num_chunks].

        Waits only if :data:`_MOST_BUFFERS` earlier spills are not written yet.

        Raises:
            OSError: the file cannot be created. Later errors are raised in :meth:`of_chunk`.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        buffer, ends = self._buffers.get(), np.empty(num_chunks, np.int64)
        count = gather(buffer, ends)
        written = self._writer.submit(self._write, self._file.fileno(), buffer, count, self.num_bytes)
        self._spills.append(_Spill(self.num_bytes, ends, written))
        self.num_bytes += count * buffer.itemsize * buffer.shape[1]

    def of_chunk(self, chunk: int) -> Iterator[Ints]:
        """Yields the spilled records of a chunk, int32[·, 1 + V].

        Raises:
            OSError: the records could not be written or read back.
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
        """Releases the file."""
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


_CHUNK_BYTES = 8 << 20
_LOG_BYTES = 8 << 20


class Snapshot:
    """The state of a shard at the moment when this object was created.

    :meth:`Store.snapshot` creates it, and the caller of that method closes it. One thread reads the snapshot while
    another uses the store. Rows are in the order of their numbers, without free rows. If tables keep lists, the columns
    ``rows`` and ``newer`` give the number of each row and of the next newer row.

    Args:
        directory: the directory for records that do not fit into the log; by default the system's directory for
            temporary files.

    Attributes:
        where: the snapshot's name in errors.
        description: the layout, tables, counters (one mapping per table) and last step, as plain values. ``oldest``
            is the first row of each table's list. ``rows_ever`` is larger than all row numbers.
        num_rows: the number of rows, n.
        most_records: the capacity of the log.
    """

    def __init__(self, values: Values, directory: str | os.PathLike[str] | None = None) -> None:
        memory, row_layout = values.memory, values.layout
        words, num_words = memory.arrays.state, memory.arrays.meta.shape[1]
        self.where = "snapshot of a store"
        self._memory, self._layout = memory, row_layout
        self._directory = directory or tempfile.gettempdir()
        self._rows_ever = int(words[layout.ROWS_EVER])
        self.num_rows = memory.num_rows
        self._chunk_bits = max(0, (_CHUNK_BYTES // (4 * row_layout.num_words)).bit_length() - 1)
        chunk = 1 << self._chunk_bits
        self._row_chunks = -(-self._rows_ever // chunk)
        num_pages = -(-row_layout.num_cells // (4 * num_words))
        self._num_chunks = self._row_chunks + -(-num_pages // chunk)
        self.most_records = max(64, _LOG_BYTES // (4 * (num_words + saving.LINKS)))
        self.description: Description = {
            **row_layout.description,
            "num_rows": self.num_rows,
            "last_step": memory.last_step,
            "counters": [memory.counters(table) for table in range(len(row_layout.description["tables"]))],
            "linked": bool(row_layout.listed.any()),
            "oldest": memory.arrays.tables[:, layout.OLDEST].tolist(),
            "rows_ever": self._rows_ever,
        }
        self._spills = SpillFile(self._directory, self.most_records, num_words)
        self._error: Exception | None = None
        with memory.lock:
            memory.begin_saving(self, self._num_chunks, chunk * self._num_chunks, self.most_records)
            self._words = words = memory.arrays.saving
            words[layout.SAVE_ROWS], words[layout.SAVE_PAGES] = self._rows_ever, num_pages
            words[layout.FIRST_PAGE], words[layout.CHUNK_BITS] = chunk * self._row_chunks, self._chunk_bits
            try:
                self._frozen = values.freeze()
            except BaseException:
                memory.end_saving()
                raise

    def tensors(self) -> list[StoredTensor]:
        """Returns the names and shapes of all columns and Bloom filters."""
        return [
            *(column.tensor(self.num_rows) for column in columns_of(self.description)),
            *bloom_tensors(self._layout),
        ]

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of some rows at a time. The next chunk overwrites the arrays.

        Raises:
            StorageFullError: there is no room for the old records of rows that verbs changed.
        """
        num_words, size = self._memory.arrays.meta.shape[1], 1 << self._chunk_bits
        records = np.empty((min(size, self._rows_ever), num_words), np.int32)
        halves = self.description["dtype"] != "float32"
        unit, split = (np.uint16, saving.split_halves) if halves else (np.float32, saving.split_words)
        columns = columns_of(self.description)
        places = np.array([(c.first_byte, c.num_bytes) for c in columns], np.int64) // np.dtype(unit).itemsize
        out = np.empty((1, len(records) * int(places[:, 1].sum())), unit)
        for chunk in range(self._row_chunks):
            start = chunk * size
            part = records[: min(size, self._rows_ever - start)]
            self._copy(chunk, self._memory.arrays.meta[start : start + len(part)], part, part)
            live = np.flatnonzero(part[:, layout.TABLE] >= 0).astype(np.int32)
            part[:, layout.OLDER] = np.arange(start, start + len(part))
            starts = len(live) * (np.cumsum(places[:, 1]) - places[:, 1])
            whole, numbers = self._frozen.whole(part, live)
            split(whole.view(unit), numbers, places, starts, out)
            yield {
                column.name: out[0, first : first + len(live) * width]
                .view(column.dtype)
                .reshape(column.tensor(len(live)).shape)
                for column, first, width in zip(columns, starts, places[:, 1], strict=True)
            }

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yields (table's name, its next Bloom cells) for all cells of all tables."""
        num_words, size = self._memory.arrays.meta.shape[1], 1 << self._chunk_bits
        pages = np.empty((size if self._layout.num_cells else 0, num_words), np.int32)
        copies = pages.reshape(-1).view(np.uint8)
        for number in range(self._num_chunks - self._row_chunks):
            start = number * len(copies)
            part = copies[: min(len(copies), self._layout.num_cells - start)]
            self._copy(
                self._row_chunks + number, self._memory.arrays.cells[start : start + len(part)], part, pages
            )
            for table, name in enumerate(t["name"] for t in self.description["tables"]):
                cells_of_table = self._layout.cells_of(table)
                low, high = max(cells_of_table.start - start, 0), min(cells_of_table.stop - start, len(part))
                if low < high:
                    yield name, part[low:high]

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """Returns a table's Bloom cells, or None if it has none."""
        parts = [part.copy() for name, part in self.blooms() if name == table]
        return np.concatenate(parts) if parts else None

    def verify(self) -> None:
        """Does nothing, because rows in memory were checked when they were loaded."""

    def close(self) -> None:
        """Ends the snapshot. From now on, verbs keep no old records."""
        with self._memory.lock:
            if self._memory.saving is self:
                self._memory.end_saving()
                self._frozen.thaw()
        self._spills.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def make_room(self, num_records: int) -> None:
        """Makes room for ``num_records`` old records. If necessary, writes the log to the file and empties it.

        Verbs call this method. If the file cannot be written, the reader gets the error, and the verb continues.
        """
        if self._error is not None or self._words[layout.NUM_KEPT] + num_records <= self.most_records:
            return
        try:
            self._spills.add(self._empty_log, self._num_chunks)
        except OSError as error:
            self._error = error
            self._words[[layout.SAVE_ROWS, layout.SAVE_PAGES]] = 0

    def _copy(self, chunk: int, source: NDArray[Any], target: NDArray[Any], records: Ints) -> None:
        """Copies a chunk as it was at the start. ``records`` is a view of the target's memory, one record per row."""
        first = chunk << self._chunk_bits
        with self._memory.lock:
            if self._memory.saving is not self or self._error is not None or self._words[layout.LOST]:
                raise self._failed()
            np.copyto(target, source)
            saving.put_logged(self._memory.arrays, chunk, first, records)
            self._words[layout.SAVED] = first + (1 << self._chunk_bits)
        try:  # from here on, verbs keep no records of this chunk
            for spilled in self._spills.of_chunk(chunk):
                saving.put_spilled(spilled, first, records)
        except OSError as error:
            self._error = error
            raise self._failed() from None

    def _empty_log(self, out: Ints, ends: Longs) -> int:
        done = int(self._words[layout.SAVED]) >> self._chunk_bits
        return int(saving.empty_log(self._memory.arrays, done, out, ends))

    def _failed(self) -> Exception:
        error = self._error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StorageFullError(
                f"{os.fspath(self._directory)}: no room for rows that changed while they were saved"
                f" ({error.strerror}); free space"
            )
        return error or CheckpointError(
            f"{self.where}: was closed before it was read to the end; take another one"
        )


class Arriving(Protocol):
    """The state of a shard at one moment, which is being copied to the host."""

    def wait(self) -> Values:
        """Waits until the whole shard is on the host. Its values do not change after that.

        Raises:
            CheckpointError: the shard was closed before the copy was complete.
        """

    def close(self) -> None:
        """Ends the transfer, even if it is not complete, and frees its memory."""


class ArrivingSnapshot:
    """A :class:`Snapshot` of a shard that is being copied to the host. Each access waits for the whole shard."""

    where = "snapshot of a store"

    def __init__(self, arriving: Arriving, directory: str | os.PathLike[str] | None = None) -> None:
        self._arriving, self._directory = arriving, directory
        self._opened: Snapshot | None = None

    @property
    def description(self) -> Description:
        """The description of the shard; see :class:`Snapshot`."""
        return self._snapshot().description

    @property
    def num_rows(self) -> int:
        """The number of rows, n."""
        return self._snapshot().num_rows

    def tensors(self) -> list[StoredTensor]:
        """Returns the names and shapes of all columns and Bloom filters."""
        return self._snapshot().tensors()

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of some rows at a time. The next chunk overwrites the arrays."""
        return self._snapshot().chunks()

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yields (table's name, its next Bloom cells) for all cells of all tables."""
        return self._snapshot().blooms()

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """Returns a table's Bloom cells, or None if it has none."""
        return self._snapshot().bloom(table)

    def verify(self) -> None:
        """Does nothing, because rows in memory were checked when they were loaded."""

    def close(self) -> None:
        """Ends the snapshot. From now on, verbs keep no old records."""
        if self._opened is not None:
            self._opened.close()
        self._arriving.close()

    def __enter__(self) -> ArrivingSnapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _snapshot(self) -> Snapshot:
        if self._opened is None:
            self._opened = Snapshot(self._arriving.wait(), self._directory)
        return self._opened


LiveSnapshot = Snapshot | ArrivingSnapshot
"""A snapshot that is read while verbs run."""
