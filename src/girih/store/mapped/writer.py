"""Writes files of rows to be mapped, chunk by chunk: tables may be larger than memory.

Rows go to the file as they come, in large pieces: a file system that can then keeps them in memory in pages of 2 MiB, and whoever maps them
finds a row without a walk through page tables, which takes as long as to read it. So does the index, which is made in memory; where that would take a
quarter of all there is, it is made in the file's own mapped memory, which the system writes out as it sees fit.

Shapes: n rows, W columns of a row, K keys of a chunk.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from girih.errors import ConfigError
from girih.files.whole import disk_full
from girih.kernels.cpu import mapped
from girih.kernels.cpu.arrays import sealed
from girih.store.mapped.file import (
    INDEX,
    KIND,
    ROWS,
    MappedFile,
    MappedFileFacts,
    described,
    description_of,
    unknown,
)
from girih.store.snapshot.tensorfile import StoredTensor, header_of
from girih.store.spec import Bools, Floats, GroupSpec, Ints, Longs

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: the highest bit is the coefficient of x⁰


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces one behind the other, as ``zlib.crc32`` gives it.

    Args:
        first, second: the CRC-32 of each. second_bytes: the size of the second.
    """
    shift, power = _ONE, 3  # by x⁸ for each byte
    while second_bytes:
        if second_bytes & 1:
            shift = _product(_squared(power), shift)
        second_bytes, power = second_bytes >> 1, power + 1
    return _product(shift, first) ^ second


@cache
def _squared(times: int) -> int:
    """The polynomial x, squared so many times."""
    if times == 0:
        return _ONE >> 1
    half = _squared(times - 1)
    return _product(half, half)


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the checksum."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFF_FFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


_LOAD = 0.7  # of the index, at most
_LINE = 64
_PIECE = 64 << 20
_PAGE = 2 << 20
_ROWS_TOGETHER = 4 << 20
_UNFINISHED = ".unfinished"


class MappedWriter(contextlib.AbstractContextManager["MappedWriter"]):
    """One file on its way, which takes its name when it is whole.

    A key counts as it was first said, with a row or buried; later ones are left out. So newer rows are added before older ones.

    Args:
        path: of the file; replaced where it is there.
        spec: the group: its tables by number, and segments.
        most_keys: keys that will be added or buried, at most: the index is made for so many.
        most_rows: those of them that get rows, at most; all where None.
        durable: waits until the disk has it all. Else a machine that loses its power may leave a file that its checksum tells.

    Raises:
        StorageFullError: the disk has no room for so many.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: GroupSpec,
        most_keys: int,
        most_rows: int | None = None,
        *,
        durable: bool = True,
    ) -> None:
        self.path, self.spec, self._durable = Path(path), spec, durable
        self._most_keys = most_keys
        self._most_rows = most_keys if most_rows is None else most_rows
        self._num_rows = self._num_buried = 0
        num_slots = -(-(1 + int(most_keys / _LOAD)) // mapped.BLOCK) * mapped.BLOCK
        self._num_slots = num_slots
        self._length = len(self._header(self._most_rows, most_keys))
        self._rows_at = self._length + 16 * num_slots
        self._unfinished = self.path.with_name(f".{self.path.name}{_UNFINISHED}")
        self._file = self._unfinished.open("w+b")
        try:
            size = self._rows_at + 4 * spec.dim * self._most_rows
            os.posix_fallocate(self._file.fileno(), 0, size)  # a full disk is told here, not by a signal
            self._in_file = 4 * self._rows_at > _memory_bytes()
            memory = (
                mmap.mmap(self._file.fileno(), self._rows_at)
                if self._in_file
                else mmap.mmap(-1, self._rows_at, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            )
        except OSError as error:
            self._abandon()
            raise disk_full(error, path) or error from None
        if not self._in_file and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        self._row_bytes = 4 * spec.dim
        self._waiting = np.empty(max(_ROWS_TOGETHER, self._row_bytes), np.uint8)
        self._num_waiting = 0  # bytes of rows that are not written yet
        self._written, self._rows_crc = self._rows_at, 0  # where they go, and the checksum of those before
        self._index = np.ndarray((num_slots, 2), np.int64, memory, self._length)

    def add(self, ids: Longs, tables: Ints, rows: Floats) -> int:
        """Adds keys with rows.

        Args:
            ids, tables: int64[K], int32[K], the keys.
            rows: float32[K, W].

        Returns:
            How many of the keys are new.

        Raises:
            ConfigError: arrays of other shapes, a table that the group has not, or more keys than were announced.
        """
        if rows.shape != (len(ids), self.spec.dim) or rows.dtype != np.float32:
            raise ConfigError(
                f"{self.path}: rows: received {rows.dtype}{list(rows.shape)}; expected float32[{len(ids)}, {self.spec.dim}]"
            )
        taken = self._insert(ids, tables, self._num_rows)
        new = rows if taken.all() else rows[taken]
        if self._num_rows + len(new) > self._most_rows:
            raise ConfigError(f"{self.path}: more rows than the {self._most_rows:,} that were announced")
        data = np.ascontiguousarray(new).reshape(-1).view(np.uint8)
        while len(data):
            piece = data[: self._room()]
            self._waiting[self._num_waiting : self._num_waiting + len(piece)] = piece
            self._num_waiting += len(piece)
            data = data[len(piece) :]
        self._num_rows += len(new)
        return len(new)

    def take(self, file: MappedFile, newer: Longs) -> None:
        """Adds the keys with rows of a file that no newer file knows, nor this one: as :meth:`add`, in one pass.

        Args:
            newer: those files, int64[S, 3]: see :func:`~girih.store.mapped.file.described`.
        """
        at = np.array([0, self._num_rows], np.int64)  # the slot, and the row, that come next
        while at[0] < len(file.index):
            room = self._room(self._row_bytes) // self._row_bytes
            most = min(self._num_rows + room, self._most_rows)
            target = self._waiting.ctypes.data + self._num_waiting
            mapped.take_unknown(newer, file.index, file.rows, self._index, at, most, target)
            if at[0] < len(file.index) and at[1] == self._most_rows:
                raise ConfigError(f"{self.path}: more rows than the {self._most_rows:,} that were announced")
            self._num_waiting += (int(at[1]) - self._num_rows) * self._row_bytes
            self._num_rows = int(at[1])

    def bury(self, ids: Longs, tables: Ints) -> int:
        """Adds keys that have no row any more, whatever older files say; see :meth:`add`."""
        taken = self._insert(ids, tables, -1)
        self._num_buried += int(taken.sum())
        return int(taken.sum())

    def finish(self) -> MappedFileFacts:
        """Has the file where it stays, whole, under its name; returns its facts.

        Raises:
            StorageFullError: the disk is full.
        """
        try:
            self._write_rows(self._num_waiting)
            size = self._rows_at + 4 * self.spec.dim * self._num_rows
            self._file.truncate(size)
            self._memory[: self._length] = self._header(self._num_rows, self._num_buried)
            if self._in_file:
                self._memory.flush()
            else:
                self._write(memoryview(self._memory), 0)
            if self._durable:
                os.fsync(self._file.fileno())
            with memoryview(self._memory) as data:
                crc = joined(zlib.crc32(data), self._rows_crc, size - self._rows_at)
            os.replace(self._unfinished, self.path)
            self._file.close()
        except OSError as error:
            raise disk_full(error, self.path) or error from None
        return MappedFileFacts(size, crc, self._num_rows, self._num_buried)

    def __exit__(self, *error: object) -> None:
        """Leaves nothing of a file that was not finished."""
        if not self._file.closed:
            self._abandon()

    def _insert(self, ids: Longs, tables: Ints, first: int) -> Bools:
        """Which of the keys are new, bool[K]; they are in the index then."""
        if ids.dtype != np.int64 or tables.dtype != np.int32 or ids.shape != tables.shape or ids.ndim != 1:
            raise ConfigError(
                f"{self.path}: keys: received {ids.dtype}{list(ids.shape)} and {tables.dtype}{list(tables.shape)};"
                " expected int64[K] and int32[K]"
            )
        if len(tables) and not 0 <= tables.min() <= tables.max() < len(self.spec.tables):
            raise ConfigError(
                f"{self.path}: table numbers from {tables.min()} to {tables.max()}; expected 0 to {len(self.spec.tables) - 1}"
            )
        if self._num_rows + self._num_buried + len(ids) >= len(self._index):
            raise ConfigError(f"{self.path}: more keys than the {self._most_keys:,} that were announced")
        taken = np.empty(len(ids), np.uint8)
        mapped.insert(
            self._index, sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), first, taken
        )
        return taken.view(np.bool_)

    def _room(self, least: int = 1) -> int:
        """The bytes that the rows that wait leave free, at least so many: what fills pages of the file is written before."""
        if len(self._waiting) - self._num_waiting < least:
            end = (self._written + self._num_waiting) // _PAGE * _PAGE
            self._write_rows(end - self._written if end > self._written else self._num_waiting)
        return len(self._waiting) - self._num_waiting

    def _write_rows(self, size: int) -> None:
        """Writes the first bytes of the rows that wait."""
        data = self._waiting.data[:size]
        self._rows_crc = zlib.crc32(data, self._rows_crc)
        self._write(data, self._written)
        self._num_waiting -= size
        self._waiting[: self._num_waiting] = self._waiting[size : size + self._num_waiting]
        self._written += size

    def _write(self, data: memoryview, position: int) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data[:_PIECE], position)
            data, position = data[written:], position + written

    def _header(self, num_rows: int, num_buried: int) -> bytes:
        """The file's first bytes, of the same length whatever the numbers are."""
        tensors = (
            StoredTensor(INDEX, "I64", (self._num_slots, 2)),
            StoredTensor(ROWS, "F32", (num_rows, self.spec.dim)),
        )
        metadata = {"kind": KIND, "girih": json.dumps(description_of(self.spec, num_buried))}
        return header_of(tensors, metadata, getattr(self, "_length", _LINE))

    def _abandon(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def merge(
    path: str | os.PathLike[str],
    spec: GroupSpec,
    files: Iterable[MappedFile],
    *,
    keep_buried: bool = False,
    durable: bool = True,
) -> MappedFileFacts:
    """Writes a stack of files as one; reads as they do.

    Args:
        files: newest first.
        keep_buried: keeps the keys that have no row any more, for there are older files than these.
        durable: see :class:`MappedWriter`.
    """
    files = list(files)
    for file in files:
        file.expect(spec)
    most_rows = sum(file.num_rows for file in files)
    most_keys = most_rows + keep_buried * sum(file.num_buried for file in files)
    with MappedWriter(path, spec, most_keys, most_rows, durable=durable) as writer:
        for number, file in enumerate(files):
            newer = described(files[:number])
            if keep_buried:
                for ids, tables in file.buried():
                    new = unknown(newer, ids, tables)
                    writer.bury(ids[new], tables[new])
            writer.take(file, newer)
        return writer.finish()
