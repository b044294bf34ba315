"""Files of named tensors in the safetensors format, written piece by piece and read through a memory map.

The safetensors library writes whole dictionaries; a shard may be larger than memory. What is written here
loads with that library. A checksum of each tensor (CRC-32) lies in the file's metadata.

    u64 length of the header │ JSON header, padded with spaces │ tensors, back to back
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, ConfigError, MissingFileError, StorageFullError

_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
}
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library
_UNKNOWN = "-" * 8
_PIECE = 64 << 20


class Tensor(NamedTuple):
    """A tensor's name, dtype as the format spells it (16-bit floats are uint16 in memory), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return _DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


class TensorWriter:
    """Writes declared tensors, each from front to back; the file appears under its name when all is written.

    Args:
        path: where to; a ``.partial`` beside it holds what is not complete.
        tensors: all that will be written.
        metadata: strings for the header; ``crc32`` is added.

    Raises:
        StorageFullError: the disk is full; nothing is left behind.
        MissingFileError, ConfigError: the directory is missing, or cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Sequence[Tensor], metadata: Mapping[str, str]
    ) -> None:
        self.path = Path(path)
        # Widest first, so that every tensor is aligned to its own size.
        self._tensors = sorted(tensors, key=lambda t: (-_DTYPES[t.dtype].itemsize, t.name))
        self._metadata = dict(metadata)
        self._crc = dict.fromkeys((t.name for t in self._tensors), 0)
        self._left = {t.name: t.num_bytes for t in self._tensors}
        header = self._header(_UNKNOWN)
        self._at, position = {}, len(header)
        for tensor in self._tensors:
            self._at[tensor.name] = position
            position += tensor.num_bytes
        self.num_bytes = position
        self._partial = self.path.with_name(self.path.name + ".partial")
        try:
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            raise MissingFileError(f"{self.path}: no such directory; make it first") from None
        except PermissionError:
            raise ConfigError(f"{self.path}: cannot be written; give a directory that can") from None
        self._flusher = ThreadPoolExecutor(1, "girih-flush")
        self._flushed: Future[None] | None = None
        self._unflushed_bytes = 0
        try:
            self._write(header, 0)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def write(self, name: str, rows: NDArray[Any]) -> None:
        """Appends rows to one tensor."""
        data = _bytes_of(rows)
        self._write(data, self._at[name])
        self._at[name] += len(data)
        self._left[name] -= len(data)
        self._crc[name] = zlib.crc32(data, self._crc[name])

    def finish(self) -> dict[str, int]:
        """Completes the file and gives it its name; returns the CRC-32 of each tensor.

        Raises:
            CheckpointError: fewer or more rows were written than declared.
        """
        wrong = [name for name, left in self._left.items() if left]
        if wrong:
            raise CheckpointError(
                f"{self.path}: tensors {wrong} were not written as declared; the rows changed meanwhile"
            )
        self._write(self._header(None), 0)
        self._flusher.shutdown()
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        os.replace(self._partial, self.path)
        return dict(self._crc)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flusher.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._partial.unlink(missing_ok=True)

    def _header(self, checksum: str | None) -> bytes:
        checksums = {t.name: checksum or f"{self._crc[t.name]:08x}" for t in self._tensors}
        content: dict[str, Any] = {"__metadata__": {**self._metadata, "crc32": json.dumps(checksums)}}
        position = 0
        for tensor in self._tensors:
            offsets = [position, position + tensor.num_bytes]
            content[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            position = offsets[1]
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _write(self, data: bytes | memoryview, position: int) -> None:
        try:
            view = memoryview(data)
            while len(view):
                written = os.pwrite(self._file, view[:_PIECE], position)
                view, position = view[written:], position + written
                self._flush_early(written)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    f"{self.path}: no room for {self.num_bytes:,} bytes ({error.strerror}); free space"
                ) from None
            raise

    def _flush_early(self, num_bytes: int) -> None:
        """Has the disk begin with what is written, so that little is left for the end."""
        self._unflushed_bytes += num_bytes
        if self._unflushed_bytes >= _PIECE and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed = self._flusher.submit(_sync_data, self._file)
            self._unflushed_bytes = 0


def header_checksum(path: str | os.PathLike[str]) -> int:
    """CRC-32 of a file's header, which holds the checksums of its tensors."""
    with open(path, "rb") as file:
        length = min(struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0], _LARGEST_HEADER)
        return zlib.crc32(file.read(length))


class TensorFile:
    """The tensors of a file, mapped into memory.

    Attributes:
        path: the file.
        metadata: strings of the header.
        arrays: by name; 16-bit floats are uint16.
        dtypes: as the format spells them, by name.

    Raises:
        MissingFileError: no such file.
        CheckpointError: damaged, cut short or of another kind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise MissingFileError(f"{self.path}: no such file")
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise self._damaged("its header is cut short")
            text = file.read(length)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, str] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        self.dtypes: dict[str, str] = {}
        try:
            content = json.loads(text)
            self.metadata = dict(content.pop("__metadata__", {}))
            self._checksums: dict[str, str] = json.loads(self.metadata.get("crc32", "{}"))
            end = self._read_arrays(content, 8 + length)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"its header cannot be read: {error}") from None
        if end != size:
            raise self._damaged(f"{size:,} bytes, expected {end:,}")

    def verify(self) -> None:
        """Reads everything and compares checksums.

        Raises:
            CheckpointError: a tensor is not what was written.
        """
        for name, array in self.arrays.items():
            crc = 0
            data = _bytes_of(array)
            for start in range(0, len(data), _PIECE):
                crc = zlib.crc32(data[start : start + _PIECE], crc)
            if self._checksums.get(name) != f"{crc:08x}":
                raise self._damaged(
                    f"tensor {name!r} has checksum {crc:08x}, expected {self._checksums.get(name)}"
                )

    def _read_arrays(self, content: dict[str, Any], start: int) -> int:
        end = start
        for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
            tensor = Tensor(name, entry["dtype"], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            if start + first != end or last - first != tensor.num_bytes or min(tensor.shape, default=0) < 0:
                raise ValueError(f"tensor {name!r} does not lie where it should")
            end = start + last
            if end > len(self._map):
                raise ValueError(f"tensor {name!r} is cut short")
            dtype = _DTYPES[tensor.dtype]
            flat = np.frombuffer(self._map, dtype, tensor.num_bytes // dtype.itemsize, start + first)
            self.arrays[name] = flat.reshape(tensor.shape)
            self.dtypes[name] = tensor.dtype
        return end

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged: {what}; use another checkpoint")


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
