"""One shard's arrays in GPU memory, and their growth.

The memory of rows grows by additional chunks, so a row keeps its address. The index is rebuilt when it is half full.
Slots of removed keys count as full. The rebuild is one pass over the records, and makes the index twice as large if
necessary. Nothing else runs during the rebuild. The host knows upper bounds for the number of rows and index entries.
So it waits for the GPU only if memory might run out.

Shapes: V 32-bit words of a record, C slots of the index, T tables.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import counting, index, jit
from girih.kernels.gpu.layout import copy_words, stride_of
from girih.store.gpu.options import Gpu
from girih.store.memory.shard_memory import READS, TableCounts, counters_of
from girih.store.rows.record import RowLayout
from girih.store.spec import LAST_STEP, Longs


class RecordSave(Protocol):
    """A running save; see :class:`girih.store.gpu.gpu_save.GpuSave`."""

    is_copying: bool
    num_bytes: int

    def keep(self, rows: Tensor) -> None: ...
    def close(self) -> None: ...


_MOST_CHUNKS = 1 << 16
_MOST_ROWS = 1 << 31
_HEADROOM_BYTES = 1 << 30  # GPU memory that rows leave free for the other data of a step


class RecordChunks:
    """The memory of records.

    Args:
        num_words: the 32-bit words of a record, V. chunk_bytes: the approximate size of a chunk.
        most_rows: the maximum number of records, or None if only the memory limits it.
        device: the device for the memory.

    Attributes:
        device: the device of the memory.
        chunk_bits: a chunk has 2 to this power records. stride: the words from one record to the next.
        chunks: int64[·], the address of each chunk.
    """

    def __init__(self, num_words: int, chunk_bytes: int, most_rows: int | None, device: torch.device) -> None:
        self.device = device
        self.stride = stride_of(num_words)
        self.chunk_bits = max(6, (chunk_bytes // (4 * self.stride)).bit_length() - 1)
        self._records: list[Tensor] = []
        self._most = min(most_rows or _MOST_ROWS, _MOST_ROWS, _MOST_CHUNKS << self.chunk_bits)
        self.chunks = torch.zeros(_MOST_CHUNKS, dtype=torch.int64, device=self.device)

    @property
    def capacity(self) -> int:
        """The number of records that fit into the claimed memory."""
        return min(len(self._records) << self.chunk_bits, self._most)

    @property
    def record_bytes(self) -> int:
        """The distance from one record to the next in bytes."""
        return 4 * self.stride

    def claim(self, rows: int) -> None:
        """Claims chunks until ``rows`` records fit, or until only the memory that a step needs is left."""
        size = self.record_bytes << self.chunk_bits
        while self.capacity < min(rows, self._most):
            if self.device.type == "cuda" and _free_bytes(self.device) < size + _HEADROOM_BYTES:
                return  # memory may be free later
            try:
                chunk = torch.empty(1 << self.chunk_bits, self.stride, dtype=torch.int32, device=self.device)
            except torch.OutOfMemoryError:
                self._most = self.capacity
                return
            self.chunks[len(self._records)] = chunk.data_ptr()
            self._records.append(chunk)

    def copy(self, rows: Tensor, values: Tensor, *, fills: bool = False, numbered: bool = False) -> None:
        """Copies records on the current stream; see :func:`girih.kernels.gpu.layout.copy_words`."""
        num_words = values.shape[1] - numbered
        width = jit.columns_of(num_words)
        jit.launch(
            copy_words, len(rows), jit.rows_at_once(width), self.chunks, rows, values, len(rows), num_words, FILLS=fills,
            NUMBERED=int(numbered), CHUNK_BITS=self.chunk_bits, STRIDE=self.stride, WORDS=width,
        )  # fmt: skip

    def upto(self, rows_ever: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the first row number and the records, int32[·, V], of each chunk, for the first ``rows_ever`` rows."""
        for number, chunk in enumerate(self._records):
            first = number << self.chunk_bits
            if first < rows_ever:
                yield first, chunk[: rows_ever - first]

    def close(self) -> None:
        """Frees the memory as soon as no stream uses it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._records.clear()


def _free_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on the device, or reserved by torch but unused."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


_FIRST_SLOTS = 1 << 10


class GpuMemory(TableCounts):
    """The memory of one shard on a GPU.

    Attributes:
        device: the device of the memory.
        rows: the records.
        chunk_bits, stride, chunks: the attributes of ``rows``, for kernels.
        slots: int64[C + SPARE], the index.
        words: int64[4]: see :mod:`girih.kernels.gpu.counting`.
        tables: int64[T, 16], the counters of each table, in the same columns as on the CPU.
        cells: int32[·], the counting Bloom filters.
        free: int32[·], numbers of free rows; only the first ``words[NUM_FREE]`` are valid.
        calls: the number of calls that marked rows as used.
        peeks: int64[2], the number of keys that groups peeked at, and of those without a row.
        last_step: the largest step seen.
        lock: held while rows change.
        saving: keeps records for a running save, or None without a save.
    """

    def __init__(self, row_layout: RowLayout, num_tables: int, options: Gpu) -> None:
        self.options = options
        self.saving: RecordSave | None = None
        self.rows = RecordChunks(
            row_layout.num_words, options.chunk_bytes, options.reserve_rows, jit.device(options.device)
        )
        self.device, self.chunks = self.rows.device, self.rows.chunks
        self.chunk_bits, self.stride = self.rows.chunk_bits, self.rows.stride
        self.tables = torch.zeros(num_tables, at.TABLE_COLUMNS, dtype=torch.int64, device=self.device)
        self.cells = torch.zeros(max(1, row_layout.num_cells), dtype=torch.int32, device=self.device)
        # rows leave before new rows take their place, so all tables together never have more rows than this
        self._bounds: list[int] = row_layout.kernel.rules[:, at.MAX_ROWS].tolist()
        self._most_rows = sum(self._bounds)
        self.peeks = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.lock = threading.Lock()
        self._closed = False
        self.clear()

    def clear(self) -> None:
        """Forgets all rows, counters and Bloom filters. Keeps the memory of rows."""
        self.words = torch.zeros(4, dtype=torch.int64, device=self.device)
        self.slots = torch.zeros(_FIRST_SLOTS + jit.SPARE, dtype=torch.int64, device=self.device)
        self.free = torch.empty(0, dtype=torch.int32, device=self.device)
        self.tables.zero_()
        self.cells.zero_()
        self.calls, self.last_step = 0, 0
        self._ever, self._added = 0, 0  # upper bounds
        self._reports: deque[tuple[torch.cuda.Event | None, Tensor, int]] = deque()
        self._asked = 0  # keys that all calls may have added

    @property
    def capacity(self) -> int:
        """The number of rows that fit into the claimed memory."""
        return self.rows.capacity

    @property
    def num_slots(self) -> int:
        """The number of slots, C."""
        return len(self.slots) - jit.SPARE

    def known(self) -> Longs:
        """Returns the current ``words``, int64[4]. Waits for the GPU."""
        words: Longs = self.words.cpu().numpy()
        self._ever, self._added = int(words[counting.ROWS_EVER]), int(words[counting.ADDED])
        self._reports.clear()
        return words

    def make_room(self, more: int) -> int:
        """Makes room for ``more`` rows. Returns the number of rows that fit, which is lower if memory runs out."""
        self._read_reports()
        room, are_few = more, self.capacity < self._most_rows
        if (are_few and self._ever + more > self.capacity) or 2 * (self._added + more) > self.num_slots:
            words = self.known()
            free = int(words[counting.NUM_FREE])
            # Claim memory for the next calls too, because the GPU may report this call only after them.
            self.rows.claim(min(self._ever + 3 * more - free, self._most_rows))
            if self.capacity < self._most_rows:
                room = min(more, self.capacity - self._ever + free)
            if 2 * (self._added + more) > self.num_slots:
                self._rebuild_index(int(words[counting.NUM_ROWS]) + more)
        self._ever, self._added, self._asked = self._ever + more, self._added + more, self._asked + more
        return room

    def report_counts(self) -> None:
        """Asks the GPU to report the number of rows added so far."""
        if self.device.type == "cpu":
            self._reports.append((None, self.words.clone(), self._asked))
            return
        copy = torch.empty(4, dtype=torch.int64, pin_memory=True)
        copy.copy_(self.words, non_blocking=True)
        self._reports.append((reached(self.device), copy, self._asked))

    def meta_of(self, rows: Tensor | None) -> counting.Meta:
        """Returns the meta of some rows, int32[·], or of all rows ever made. Waits for the GPU."""
        chosen = int(self.words[counting.ROWS_EVER]) if rows is None else rows
        return counting.read_meta(self.chunks, chosen, self.chunk_bits, self.stride)

    def records(self, rows_ever: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the first row number and the records, int32[·, V], of each chunk, for all rows ever made."""
        return self.rows.upto(rows_ever)

    @property
    def is_copied(self) -> bool:
        """True if a save is copying records, so that writers must :meth:`keep` records before they change them."""
        return self.saving is not None and self.saving.is_copying

    def keep(self, rows: Tensor) -> None:
        """Copies rows, int32[·] (-1 for none), aside if a save is running. Waits for the GPU during a save.

        Call it while you hold the lock, before the rows change.
        """
        if self.saving is not None:
            self.saving.keep(rows)

    def fill(self, records: NDArray[np.int32], free: Tensor, num_rows: int) -> None:
        """Replaces all rows by records, int32[·, V], and builds their index.

        Args:
            free: int32[·], the numbers of the records without a key. num_rows: the number of records with a key.

        Raises:
            StorageFullError: there is no more memory.
        """
        rows_ever = len(records)
        self.rows.claim(rows_ever)
        if self.capacity < rows_ever:
            raise self.full()
        # A loaded table may have more rows than its limit.
        self._most_rows = sum(map(max, self._bounds, self.rows_of_tables()))
        for first, chunk in self.records(rows_ever):
            part = records[first : first + len(chunk)]
            chunk[:, : records.shape[1]] = to_device(part, self.device)
        self.free = free
        self.words.copy_(torch.tensor([len(free), rows_ever, num_rows, num_rows]))
        self._ever = rows_ever
        self._rebuild_index(num_rows)

    @contextlib.contextmanager
    def changing(self, step: int = 0) -> Iterator[None]:
        """Locks the shard while it changes, and stores the step. Only one thread changes a shard at a time."""
        self.last_step = max(self.last_step, step)
        with self.lock:
            yield

    @contextlib.contextmanager
    def setting(self) -> Iterator[int]:
        """Locks the shard like :meth:`changing` while rows are set. Yields the step of this change. Counts no reads."""
        with self.changing():
            before = self.tables[:, READS]
            yield min(self.last_step + 1, LAST_STEP)
            self.tables[:, READS] = before

    def check_open(self) -> None:
        """Refuses use after :meth:`close`."""
        if self._closed:
            raise ConfigError("GPU memory: the store was closed; open it again")

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return int(self.words[counting.NUM_ROWS])

    def table_counts(self) -> Longs:
        """Returns the counters by table, as in :class:`~girih.store.memory.shard_memory.TableCounts`. Waits for the GPU."""
        counts: Longs = self.tables.cpu().numpy()
        return counts

    def counts(self) -> Tensor:
        """Returns a copy of all counts on the device for :meth:`counters_of`, int64[16T + 6].

        Does not wait for the GPU.
        """
        return torch.cat([self.tables.reshape(-1), self.words, self.peeks])

    def counters_of(self, counts: Longs) -> dict[str, int]:
        """Returns :meth:`counters`, ``rows``, ``peeks`` and ``absent`` at the time of a copy."""
        of_tables, words, (peeks, absent) = np.split(
            counts, np.cumsum([self.tables.numel(), len(self.words)])
        )
        tables = of_tables.reshape(-1, at.TABLE_COLUMNS)
        return counters_of(tables) | {
            "rows": int(words[counting.NUM_ROWS]),
            "peeks": int(peeks),
            "absent": int(absent),
        }

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part."""
        rows = 4 * self.stride * self.capacity
        parts = {
            "rows": (4 * self.stride * int(self.words[counting.ROWS_EVER]), rows),
            "index": (8 * self.num_slots, 8 * self.num_slots),
            "bloom": (4 * len(self.cells), 4 * len(self.cells)),
            "free_rows": (4 * len(self.free), 4 * len(self.free)),
            "saving": (0, 0) if self.saving is None else (self.saving.num_bytes,) * 2,
        }
        return {part: {"used": used, "reserved": reserved} for part, (used, reserved) in parts.items()}

    def close(self) -> None:
        """Releases the memory. Ends a save that is still copying."""
        if self.saving is not None:
            self.saving.close()
        self._closed = True
        self.rows.close()
        self.slots = torch.zeros(jit.SPARE + 1, dtype=torch.int64, device=self.device)

    def _read_reports(self) -> None:
        """Reads the reports that have arrived from the GPU."""
        while self._reports and (self._reports[0][0] is None or self._reports[0][0].query()):  # type: ignore[no-untyped-call]
            _, counts, num_asked = self._reports.popleft()
            words, since = counts.numpy(), self._asked - num_asked
            self._ever = int(words[counting.ROWS_EVER]) + since
            self._added = int(words[counting.ADDED]) + since

    def full(self) -> StorageFullError:
        """Returns the error to raise if GPU memory is full."""
        return StorageFullError(
            f"GPU memory: no room for more than {self.capacity:,} rows of {4 * self.stride} bytes in this shard; bound the"
            " tables by max_rows, or use tiers = ['dram']"
        )

    def _rebuild_index(self, num_rows: int) -> None:
        """Builds the index from the records, with room for ``num_rows`` at a load of 1/4 to 1/2.

        Raises:
            StorageFullError: there is no memory for the index. The index is unchanged.
        """
        num_slots = max(_FIRST_SLOTS, 1 << (4 * num_rows - 1).bit_length())
        try:
            self.slots = index.rebuild(num_slots, self.chunks, self._ever, self.chunk_bits, self.stride)
        except torch.OutOfMemoryError:
            raise self.full() from None
        words = self.words.cpu()
        self.words[counting.ADDED] = words[counting.NUM_ROWS]
        self._added = int(words[counting.NUM_ROWS])
        self._reports.clear()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Returns a copy of an array on a device. Does not wait for the copy."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def reached(device: torch.device) -> torch.cuda.Event | None:
    """Records an event on the current stream of a device; returns None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Returns an array on the host, after waiting for all work on the current stream."""
    if tensor.device.type == "cpu":
        array: NDArray[Any] = tensor.numpy()
        return array
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    event.synchronize()
    copy: NDArray[Any] = pinned.numpy()
    return copy
