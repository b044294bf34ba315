"""Copies the records of a shard at one moment from GPU memory to the host, while verbs run.

    rows 0 … R (pieces of 16 MB)                  copied by a thread, on a separate stream, in order
    ├── copied ──┼── not yet ──────────────┤
                        ▲ a verb writes here: it first copies the old record aside, once, in GPU memory
                        8 pieces of 16 MB ──► the thread puts them over its copies

A step may change a record while its piece is being copied, so the copy may mix old and new values. But each verb copies
a record aside before it changes the record, unless the record's piece has already arrived on the host. A record that
was copied aside always replaces the copy from its piece, in any order of arrival. So steps do not wait for copies, and
copies do not wait for steps. A verb waits only if all pieces for records aside are in use, until the thread has emptied
one piece.

GPU memory: one byte per row, one byte per Bloom cell, and 128 MB. Host memory: a second copy of the rows, one byte per
row, and 16 MB of pinned memory.

Shapes: R rows ever made, V 32-bit words of a record, K rows of a piece.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from girih.errors import CheckpointError, StorageFullError
from girih.kernels.cpu import layout as at
from girih.kernels.cpu import saving, update
from girih.kernels.gpu import counting
from girih.kernels.gpu.layout import STAMP
from girih.store.gpu.gpu_memory import GpuMemory, reached
from girih.store.values import Values

_PIECE_BYTES = 16 << 20
_PIECES_ASIDE = 8


class _Aside(NamedTuple):
    """Records that were copied aside: ``rows`` of int32[K, 1 + V]; each row has a record's number and the record.

    The content is valid after the event.
    """

    records: Tensor
    rows: int
    ready: torch.cuda.Event | None


class GpuSave:
    """The state of a shard at the moment when this object was created, being copied to the host.

    Create the object while you hold the lock of the memory, on the stream of the verbs.

    Args:
        host: an empty shard on the host. This object owns the shard and fills it.

    Attributes:
        num_bytes: the GPU memory that the save takes.

    Raises:
        StorageFullError: there is not enough GPU memory.
    """

    def __init__(self, memory: GpuMemory, host: Values) -> None:
        self._memory, self._host = memory, host
        self._device, self._num_words = memory.device, host.layout.num_words
        words = memory.known()
        self._rows_ever = int(words[counting.ROWS_EVER])
        self._records = list(memory.records(self._rows_ever))  # chunks keep their addresses
        self._most = max(1, _PIECE_BYTES // (4 * memory.stride))
        num_cells = host.layout.num_cells
        aside = (self._most, 1 + self._num_words)
        self.num_bytes = self._rows_ever + num_cells + 4 * _PIECES_ASIDE * aside[0] * aside[1]
        on_gpu = self._device.type == "cuda"
        try:
            self._kept = torch.zeros(self._rows_ever, dtype=torch.bool, device=self._device)
            self._cells = _as_bytes(memory.cells[:num_cells])
            pieces = [
                torch.empty(aside, dtype=torch.int32, device=self._device) for _ in range(_PIECES_ASIDE)
            ]
        except torch.OutOfMemoryError:
            host.close()
            raise StorageFullError(
                f"GPU memory: no room for the {self.num_bytes:,} bytes that a save of {self._rows_ever:,} rows takes;"
                " bound the tables by max_rows"
            ) from None
        self._pinned = torch.empty(
            self._most * max(memory.stride, aside[1]), dtype=torch.int32, pin_memory=on_gpu
        )
        self._begin_host(int(words[counting.NUM_ROWS]))
        self._kept_there = np.zeros(self._rows_ever, np.bool_)
        self._num_copied = 0  # rows of pieces that have arrived
        self._room: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._asides: queue.SimpleQueue[_Aside] = queue.SimpleQueue()
        for piece in pieces:
            self._room.put(piece)
        self.is_copying = True
        self._is_closed = False
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread = ThreadPoolExecutor(1, "girih-gpu-save")
        self._arrived: Future[None] = self._thread.submit(self._copy)

    def keep(self, rows: Tensor) -> None:
        """Copies rows aside, int32[·] (-1 for none), unless they were copied already. Waits for the GPU.

        Call it before the rows change, while you hold the lock of the memory, on the stream that will change them.
        """
        copied = self._num_copied
        if not self.is_copying or copied >= self._rows_ever or not len(rows):
            return
        if self._stream is not None:
            self._kept.record_stream(torch.cuda.current_stream(self._device))
        places = rows.clamp(0, self._rows_ever - 1).long()
        wanted = (rows >= copied) & (rows < self._rows_ever) & ~self._kept[places]
        chosen = rows[wanted]
        self._kept[chosen.long()] = True
        for start in range(0, len(chosen), self._most):
            piece = self._room.get()
            if piece is None:  # all rows have arrived, or the save was closed
                self._room.put(None)
                return
            self._copy_aside(chosen[start : start + self._most], piece)

    def wait(self) -> Values:
        """Waits until all rows are on the host.

        Raises:
            CheckpointError: the save was closed before.
        """
        self._arrived.result()
        return self._host

    def close(self) -> None:
        """Ends the save and frees its memory. Do not hold the lock of the memory."""
        self._is_closed = True
        self._thread.shutdown()
        if self._memory.saving is self:
            self._memory.saving = None
            self._host.close()

    def _begin_host(self, num_rows: int) -> None:
        """Copies the parts of the shard whose size does not grow with the number of rows."""
        memory, host = self._memory, self._host.memory
        host.grow_rows(self._rows_ever)
        arrays = host.arrays
        arrays.tables[:] = memory.tables.cpu().numpy()
        arrays.tables[:, [at.NEWEST, at.OLDEST]] = at.NO_ROW
        arrays.state[at.LAST_STEP] = memory.last_step
        arrays.state[[at.ROWS_EVER, at.NUM_ROWS]] = self._rows_ever, num_rows

    def _copy_aside(self, rows: Tensor, piece: Tensor) -> None:
        self._memory.rows.copy(rows, piece[: len(rows)], numbered=True)
        self._asides.put(_Aside(piece, len(rows), reached(self._device)))

    def _copy(self) -> None:
        """Copies all records to the host. The thread runs this method."""
        on_stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with on_stream:
            try:
                if len(self._cells):
                    self._host.memory.arrays.cells[:] = self._cells.cpu().numpy()
                for first, piece in self._pieces():
                    self._take_piece(first, piece)
                    self._take_asides()
            finally:
                self._end_copying()
        self._link()

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        for first, chunk in self._records:
            for start in range(0, len(chunk), self._most):
                if self._is_closed:
                    raise CheckpointError(
                        "snapshot of a store: was closed before it was read to the end; take another one"
                    )
                yield first + start, chunk[start : start + self._most]

    def _take_piece(self, first: int, piece: Tensor) -> None:
        """Copies a piece to the host, except records that were kept aside and are on the host already."""
        records = self._staged(piece)[:, : self._num_words]
        meta = self._host.memory.arrays.meta[first : first + len(piece)]
        self._num_copied = first + len(piece)
        kept = np.flatnonzero(self._kept_there[first : first + len(piece)])
        records[kept] = meta[kept]
        meta[:] = records

    def _take_asides(self) -> None:
        """Writes the records that were copied aside until now over earlier copies. Later copies skip these records."""
        for _ in range(self._asides.qsize()):
            piece, num_rows, ready = self._asides.get()
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            records = self._staged(piece[:num_rows])
            self._room.put(piece)
            saving.put_spilled(records, 0, self._host.memory.arrays.meta)
            self._kept_there[records[:, 0]] = True

    def _staged(self, there: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Returns a copy of int32[K, ·] on the host. The next call overwrites the copy."""
        staged = self._pinned[: there.numel()].view(there.shape)
        staged.copy_(there, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return staged.numpy()

    def _end_copying(self) -> None:
        """Stops verbs from copying records aside. Waits until no stream uses the memory of these records."""
        self.is_copying = False
        self._room.put(None)
        with self._memory.lock:
            pass  # a verb that was about to keep a record has finished
        self._take_asides()
        self._kept = self._cells = torch.empty(0)
        self._records, self._room = [], queue.SimpleQueue()
        self._room.put(None)
        self.num_bytes = 0

    def _link(self) -> None:
        """Builds the lists of tables from the rows' stamps, which are in the record words for list neighbours."""
        arrays, listed = self._host.memory.arrays, np.flatnonzero(self._host.layout.listed)
        meta = arrays.meta[: self._rows_ever]
        stamps, tables = arrays.keys[: self._rows_ever, STAMP.value // 2], meta[:, at.TABLE]
        orders = []
        for table in listed:
            rows = np.flatnonzero(tables == table).astype(np.int32)
            orders.append(rows[np.argsort(stamps[rows], kind="stable")])
        meta[:, [at.NEWER, at.OLDER]] = at.NO_ROW
        for table, rows in zip(listed, orders, strict=True):
            update.relink(arrays, int(table), rows)


def _as_bytes(cells: Tensor) -> Tensor:
    """Returns a copy of cells, int32[·], as uint8[·], the format on the host. Converts in parts to save memory."""
    out = torch.empty(len(cells), dtype=torch.uint8, device=cells.device)
    for start in range(0, len(cells), _PIECE_BYTES):
        part = slice(start, start + _PIECE_BYTES)
        out[part] = cells[part].clamp(0, 255)
    return out
