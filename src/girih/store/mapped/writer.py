"""Writes files of rows for mapping, chunk by chunk, because tables may be larger than memory.

Rows go to the file in large pieces as they arrive. Some file systems then keep them in memory pages of 2 MiB. A
reader finds a row in such a page without a walk through page tables, which takes as long as reading the row.

The index is also written in large pieces, because it is built in memory first. If it would take more than a quarter
of the machine's memory, it is built in the file's mapped memory instead. The system then decides when it writes this
memory out.

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
    """Returns the CRC-32 of two consecutive pieces, equal to ``zlib.crc32`` of the whole.

    Args:
        first, second: the CRC-32 of each piece. second_bytes: the size of the second piece.
    """
    shift, power = _ONE, 3  # multiply by x⁸ for each byte
    while second_bytes:
        if second_bytes & 1:
            shift = _product(_squared(power), shift)
        second_bytes, power = second_bytes >> 1, power + 1
    return _product(shift, first) ^ second


@cache
def _squared(times: int) -> int:
    """Returns the polynomial x, squared ``times`` times."""
    if times == 0:
        return _ONE >> 1
    half = _squared(times - 1)
    return _product(half, half)


def _product(a: int, b: int) -> int:
    """Returns the product of two polynomials, modulo the checksum's polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFF_FFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


_LOAD = 0.7  # maximum load of the index
_LINE = 64
_PIECE = 64 << 20
_PAGE = 2 << 20
_ROWS_TOGETHER = 4 << 20
_UNFINISHED = ".unfinished"


class MappedWriter(contextlib.AbstractContextManager["MappedWriter"]):
    """Writes a file of rows for mapping. The file gets its name when it is complete.

    The first entry of a key counts, with a row or buried. Later entries of the key are ignored, so add newer rows
    before older rows.

    Args:
        path: the path of the file. An existing file is replaced.
        spec: the group: its tables by number, and segments.
        most_keys: the maximum number of keys that will be added or buried. It sets the size of the index.
        most_rows: the maximum number of keys that get rows. None means ``most_keys``.
        durable: True waits until the whole file is on the disk. With False, a power loss may leave a damaged file.
            The checksum detects the damage.

    Raises:
        StorageFullError: the disk has no room for this number of rows.
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
            os.posix_fallocate(self._file.fileno(), 0, size)  # raises if the disk is full
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
        self._num_waiting = 0  # bytes of rows that wait to be written
        self._written, self._rows_crc = self._rows_at, 0  # position of waiting rows, checksum of written rows
        self._index = np.ndarray((num_slots, 2), np.int64, memory, self._length)

    def add(self, ids: Longs, tables: Ints, rows: Floats) -> int:
        """Adds keys with rows.

        Args:
            ids, tables: int64[K], int32[K], the keys.
            rows: float32[K, W].

        Returns:
            The number of new keys.

        Raises:
            ConfigError: an array has a wrong shape, a table is unknown, or there are more than ``most_keys`` keys.
        """
        if rows.shape != (len(ids), self.spec.dim) or rows.dtype != np.float32:
            raise ConfigError(
                f"{self.path}: rows: received {rows.dtype}{list(rows.shape)}; expected float32[{len(ids)}, {self.spec.dim}]"
            )
        taken = self._insert(ids, tables, self._num_rows)
        new = rows if taken.all() else rows[taken]
        if self._num_rows + len(new) > self._most_rows:
            raise ConfigError(f"{self.path}: more rows than most_rows = {self._most_rows:,}")
        data = np.ascontiguousarray(new).reshape(-1).view(np.uint8)
        while len(data):
            piece = data[: self._room()]
            self._waiting[self._num_waiting : self._num_waiting + len(piece)] = piece
            self._num_waiting += len(piece)
            data = data[len(piece) :]
        self._num_rows += len(new)
        return len(new)

    def take(self, file: MappedFile, newer: Longs) -> None:
        """Adds all keys with rows of a mapped file in one pass. The result is the same as from :meth:`add`.

        Skips keys that a newer file has, or that were added before.

        Args:
            newer: the newer files, int64[S, 3], from :func:`~girih.store.mapped.file.described`.
        """
        at = np.array([0, self._num_rows], np.int64)  # the next slot, and the next row
        while at[0] < len(file.index):
            room = self._room(self._row_bytes) // self._row_bytes
            most = min(self._num_rows + room, self._most_rows)
            target = self._waiting.ctypes.data + self._num_waiting
            mapped.take_unknown(newer, file.index, file.rows, self._index, at, most, target)
            if at[0] < len(file.index) and at[1] == self._most_rows:
                raise ConfigError(f"{self.path}: more rows than most_rows = {self._most_rows:,}")
            self._num_waiting += (int(at[1]) - self._num_rows) * self._row_bytes
            self._num_rows = int(at[1])

    def bury(self, ids: Longs, tables: Ints) -> int:
        """Adds keys that have no row any more, regardless of older files; see :meth:`add`."""
        taken = self._insert(ids, tables, -1)
        self._num_buried += int(taken.sum())
        return int(taken.sum())

    def finish(self) -> MappedFileFacts:
        """Completes the file, gives it its name, and returns its facts.

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
        """Removes a file that was not finished."""
        if not self._file.closed:
            self._abandon()

    def _insert(self, ids: Longs, tables: Ints, first: int) -> Bools:
        """Inserts keys into the index, and returns which of them are new, bool[K]."""
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
            raise ConfigError(f"{self.path}: more keys than most_keys = {self._most_keys:,}")
        taken = np.empty(len(ids), np.uint8)
        mapped.insert(
            self._index, sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), first, taken
        )
        return taken.view(np.bool_)

    def _room(self, least: int = 1) -> int:
        """Returns the free bytes of the buffer, at least ``least``. Writes full pages first if necessary."""
        if len(self._waiting) - self._num_waiting < least:
            end = (self._written + self._num_waiting) // _PAGE * _PAGE
            self._write_rows(end - self._written if end > self._written else self._num_waiting)
        return len(self._waiting) - self._num_waiting

    def _write_rows(self, size: int) -> None:
        """Writes the first bytes of the waiting rows."""
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
        """Returns the file's header. Its length does not depend on the numbers."""
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
    """Merges a stack of files into one file that returns the same rows.

    Args:
        files: the files, newest first.
        keep_buried: True keeps buried keys. They are needed if there are files that are older than ``files``.
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
