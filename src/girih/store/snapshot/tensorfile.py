"""Files of named tensors in the safetensors format, written piece by piece and read through a memory map.

The safetensors library can load these files. It cannot write them, because it writes whole dictionaries, and a shard
may be larger than memory. The file does not contain its checksums, because no byte of the file is written twice. The
caller keeps the checksums: the CRC-32 of the header and of each tensor.

    u64 length of the header │ JSON header, padded with spaces │ tensors, back to back
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.config import build
from girih.config.bounds import Bounds
from girih.errors import CheckpointError, StorageFullError
from girih.files.sealed import parse, refusing

_PIECE = 64 << 20


class Sink(Protocol):
    """A file that several writers fill at different positions."""

    def begin(self, num_bytes: int) -> None:
        """Receives the size of the whole file before the first write."""

    def write_at(self, data: memoryview, position: int) -> None:
        """Writes bytes, uint8[·], starting at a position."""

    def finish(self) -> None:
        """Waits until the whole file is stored durably."""

    def abandon(self) -> None:
        """Ends pending work after a failure. No more writes follow."""


class DiskFile:
    """A file on this machine.

    Args:
        file: an empty file. This class does not close it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file.fileno()
        self._flusher: ThreadPoolExecutor | None = None
        self._flushed: Future[None] | None = None
        self._unflushed_bytes = 0

    def begin(self, num_bytes: int) -> None:
        """Does nothing."""

    def write_at(self, data: memoryview, position: int) -> None:
        """See :class:`Sink`."""
        while len(data):
            written = os.pwrite(self._file, data[:_PIECE], position)
            data, position = data[written:], position + written
            self._flush_early(written)

    def finish(self) -> None:
        """See :class:`Sink`."""
        self.abandon()
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file)

    def abandon(self) -> None:
        """Ends pending work; see :class:`Sink`. The file may be closed afterwards."""
        if self._flusher is not None:
            self._flusher.shutdown()

    def _flush_early(self, num_bytes: int) -> None:
        """Starts to flush written data to disk, so that :meth:`finish` has little to flush."""
        self._unflushed_bytes += num_bytes
        if self._unflushed_bytes >= _PIECE and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flusher = self._flusher or ThreadPoolExecutor(1, "girih-flush")
            self._flushed = self._flusher.submit(_sync_data, self._file)
            self._unflushed_bytes = 0


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync


HEADER = ""
"""The key of the header among the checksums."""

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("i8"), "I32": np.dtype("i4"), "I16": np.dtype("i2"), "I8": np.dtype("i1"), "BOOL": np.dtype("u1"),
    "U64": np.dtype("u8"), "U32": np.dtype("u4"), "U16": np.dtype("u2"), "U8": np.dtype("u1"), "C64": np.dtype("c8"),
    "F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("u2"), "BF16": np.dtype("u2"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"),
}  # fmt: skip
_LARGEST_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7E, "F8_E5M2": 0x7C}
"""Bits of infinity, or of the largest number, in 8-bit and 16-bit floats without sign. Larger bits are NaN."""
_BLOCK = 1 << 20
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library
_MOST_DIMS, _MOST_BYTES = 8, (1 << 62) - 1


_FIX = "use another checkpoint"
_Size = Annotated[int, Bounds(0, (1 << 63) - 1)]


class StoredTensor(NamedTuple):
    """A tensor's name, dtype as the format spells it (16-bit floats are uint16 in memory), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The tensor's size in bytes."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


def header_of(tensors: Iterable[StoredTensor], metadata: Mapping[str, str], multiple: int = 8) -> bytes:
    """Returns the header of a file that stores these tensors back to back. Its length is a multiple of ``multiple``."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        end = start + StoredTensor(name, dtype, shape).num_bytes
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    return struct.pack("<Q", len(text)) + text


class TensorWriter:
    """Writes declared tensors piece by piece, each from front to back. Pieces of different tensors may alternate.

    Args:
        sink: an empty file. If writing fails, the code that opened the file removes it.
        where: the file's name in errors.
        tensors: all tensors that will be written.
        metadata: strings for the header.

    Raises:
        StorageFullError: the disk is full.
    """

    def __init__(
        self, sink: Sink, where: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]
    ) -> None:
        self._sink, self._where = sink, where
        # The widest dtype is first, so that every tensor is aligned to its item size.
        tensors = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
        bounds = list(itertools.accumulate((t.num_bytes for t in tensors), initial=0))
        header = header_of(tensors, metadata)
        self.num_bytes = len(header) + bounds[-1]
        self._at = {t.name: len(header) + start for t, start in zip(tensors, bounds[:-1], strict=True)}
        self._ends = {t.name: len(header) + end for t, end in zip(tensors, bounds[1:], strict=True)}
        self._crc = {HEADER: zlib.crc32(header), **dict.fromkeys(self._at, 0)}
        sink.begin(self.num_bytes)
        self._write(header, 0)

    def write(self, name: str, rows: NDArray[Any]) -> None:
        """Appends rows to one tensor."""
        data = _bytes_of(rows)
        self._write(data, self._at[name])
        self._at[name] += len(data)
        self._crc[name] = zlib.crc32(data, self._crc[name])

    def finish(self) -> dict[str, int]:
        """Finishes the file, and returns the CRC-32 of the header and of each tensor.

        Raises:
            CheckpointError: fewer or more rows were written than declared.
        """
        wrong = [name for name, end in self._ends.items() if self._at[name] != end]
        if wrong:
            raise CheckpointError(
                f"{self._where}: tensors {wrong} were not written as declared; the rows changed meanwhile"
            )
        self._sink.finish()
        return dict(self._crc)

    def _write(self, data: bytes | memoryview, position: int) -> None:
        try:
            self._sink.write_at(memoryview(data), position)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    f"{self._where}: no space left on the disk for {self.num_bytes:,} bytes; free some space and try again"
                ) from None
            raise


class TensorHeader:
    """The header at the start of a tensor file, which describes the rest.

    Attributes:
        metadata: the strings of the header, by name.
        tensors: the tensors in the order of the file.
        num_bytes: the size of the header itself. size: the size of the whole file.

    Raises:
        CheckpointError: the file is damaged, or is not a tensor file.
    """

    def __init__(self, text: bytes, where: str) -> None:
        self.num_bytes = self.size = 8 + len(text)
        self.metadata: dict[str, str] = {}
        self.tensors: list[StoredTensor] = []
        with refusing(where, _FIX, fault="damaged: its header cannot be read"):
            content = parse(text)
            self.metadata = build(dict[str, str], content.pop("__metadata__", {}), "metadata")
            entries = {
                name: build(_HeaderEntry, entry, f"tensor {name!r}") for name, entry in content.items()
            }
            for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
                tensor = StoredTensor(name, entry.dtype, entry.shape)
                first, last = (self.num_bytes + offset for offset in entry.data_offsets)
                if first != self.size or last - first != tensor.num_bytes:
                    raise ValueError(f"tensor {name!r} is at the wrong position")
                item_bytes = DTYPES[tensor.dtype].itemsize
                span = item_bytes * math.prod(size for size in tensor.shape if size)  # as in numpy
                if first % item_bytes or len(tensor.shape) > _MOST_DIMS or span > _MOST_BYTES:
                    raise ValueError(
                        f"tensor {name!r} of {list(tensor.shape)} at byte {first} cannot be mapped"
                    )
                self.size = last
                self.tensors.append(tensor)

    @staticmethod
    def length(start: bytes, size: int, where: str) -> int:
        """Returns the length of a header, from the first eight bytes of a file of ``size`` bytes."""
        length: int = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise damaged(where, "its header is cut short")
        return length


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The description in the metadata ``girih`` of files of rows, except files of checkpoints.

    Attributes:
        tables: the names of the tables, by number. segments: the name and dim of each segment.
        num_buried, dtype, shard, num_shards: see the modules that define the file formats.
    """

    version: int
    group: str
    tables: list[str]
    segments: list[tuple[str, _Size]]
    num_buried: _Size = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shard: _Size = 0
    num_shards: Annotated[int, Bounds(1, (1 << 31) - 1)] = 1

    @classmethod
    def of(cls, header: TensorHeader, kind: str, version: int) -> Described:
        """Returns the description in a header.

        Raises:
            ValueError: the file has another kind or version, or its description is damaged.
        """
        if header.metadata.get("kind") != kind:
            raise ValueError(f"it is not a file of {kind}")
        described: Described = build(cls, parse(header.metadata["girih"]), "its description")
        if described.version != version:
            raise ValueError(f"format {described.version}, expected {version}; update girih")
        if len(set(described.tables)) != len(described.tables):
            raise ValueError(f"a duplicate table: {described.tables}")
        return described


class TensorFile:
    """A file of tensors, mapped into memory.

    Args:
        file: the file. The caller may close it afterwards. where: the file's name in errors.

    Attributes:
        header: the parsed header. header_crc32: the checksum of the header's bytes.
        memory: the mapped file. arrays: the tensors by name, read-only.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, file: IO[bytes], where: str) -> None:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        text = file.read(TensorHeader.length(start, size, where))
        self.header = TensorHeader(text, where)
        if self.header.size != size:
            raise damaged(where, f"{size:,} bytes, expected {self.header.size:,}")
        self.header_crc32 = zlib.crc32(start + text)
        with refusing(where, _FIX):
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.arrays: dict[str, NDArray[Any]] = {}
            position = self.header.num_bytes
            for name, dtype, shape in self.header.tensors:
                self.arrays[name] = np.ndarray(shape, DTYPES[dtype], self.memory, position)
                position += self.arrays[name].nbytes


def check_tensors(content: bytes, where: str, fix: str = _FIX) -> list[StoredTensor]:
    """Checks a whole safetensors file, for example a file of parameters.

    Returns the name, dtype and shape of each tensor, sorted by name.

    Args:
        fix: the advice if a tensor holds NaN.

    Raises:
        CheckpointError: the header or the size is wrong, or a tensor holds NaN. The message names the tensor.
    """
    header = TensorHeader(content[8 : 8 + TensorHeader.length(content[:8], len(content), where)], where)
    if header.size != len(content):
        raise damaged(where, f"{len(content):,} bytes, expected {header.size:,}")
    position = header.num_bytes
    for tensor in header.tensors:
        count = math.prod(tensor.shape)
        if any_nan(np.frombuffer(content, DTYPES[tensor.dtype], count, position), tensor.dtype):
            raise CheckpointError(f"{where}: tensor {tensor.name!r} holds NaN; {fix}")
        position += tensor.num_bytes
    return sorted(header.tensors)


def any_nan(array: NDArray[Any], dtype: str) -> bool:
    """Returns whether a tensor holds NaN. ``dtype`` is spelled as in the format."""
    if dtype not in _LARGEST_BITS:
        return bool(array.size and array.dtype.kind in "fc" and np.isnan(array.min()))
    bits, sign = array.reshape(-1), 1 << 8 * array.itemsize - 1
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return any((block & (sign - 1)).max() > _LARGEST_BITS[dtype] for block in blocks)


def damaged(where: str, fault: str) -> CheckpointError:
    """Returns the error for a damaged file."""
    return CheckpointError(f"{where}: damaged: {fault}; {_FIX}")


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
