"""Files of named tensors in the safetensors format, written piece by piece and read through a memory map.

The safetensors library writes whole dictionaries; a shard may be larger than memory. What is written here
loads with that library. Its checksums (CRC-32, one of the header and one of each tensor) are for whoever keeps the
file to remember: no byte of the file is written twice.

    u64 length of the header │ JSON header, padded with spaces │ tensors, back to back
"""

from __future__ import annotations

import errno
import itertools
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, StorageFullError
from girih.store.snapshot.sinks import Sink

HEADER = ""
"""The header's name among the checksums."""

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
}
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library


class Tensor(NamedTuple):
    """A tensor's name, dtype as the format spells it (16-bit floats are uint16 in memory), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


class TensorWriter:
    """Writes declared tensors, each from front to back, side by side.

    Args:
        sink: an empty file. Whoever opened it removes it where writing fails.
        where: its name in errors.
        tensors: all that will be written.
        metadata: strings for the header.

    Raises:
        StorageFullError: the disk is full.
    """

    def __init__(
        self, sink: Sink, where: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]
    ) -> None:
        self._sink, self._where = sink, where
        # Widest first, so that every tensor is aligned to its own size.
        tensors = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
        bounds = np.cumsum([0, *(t.num_bytes for t in tensors)]).tolist()
        content: dict[str, Any] = {"__metadata__": dict(metadata)}
        for tensor, offsets in zip(tensors, itertools.pairwise(bounds), strict=True):
            content[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
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
        """Has all of it where it stays; returns the CRC-32 of the header and of each tensor.

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
                    f"{self._where}: no space left on the disk for {self.num_bytes:,} bytes; free some and try again"
                ) from None
            raise


class TensorHeader:
    """Header of a tensor file: the first bytes, which describe the rest.

    Attributes:
        metadata: strings.
        tensors: in the order in which they lie.
        num_bytes: of the header itself. size: of the whole file.

    Raises:
        CheckpointError: damaged, or of another kind.
    """

    def __init__(self, text: bytes, where: str) -> None:
        self.num_bytes = self.size = 8 + len(text)
        self.metadata: dict[str, str] = {}
        self.tensors: list[Tensor] = []
        try:
            content = json.loads(text)
            self.metadata = dict(content.pop("__metadata__", {}))
            for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = Tensor(name, entry["dtype"], tuple(entry["shape"]))
                first, last = entry["data_offsets"]
                if not all(type(n) is int and n >= 0 for n in (first, last, *tensor.shape)):
                    raise ValueError(f"tensor {name!r} has a size that is no count")
                if self.num_bytes + first != self.size or last - first != tensor.num_bytes:
                    raise ValueError(f"tensor {name!r} does not lie where it should")
                self.size = self.num_bytes + last
                self.tensors.append(tensor)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise damaged(where, f"its header cannot be read: {error}") from None

    @staticmethod
    def length(start: bytes, size: int, where: str) -> int:
        """The length of a header, from the first eight bytes of a file of ``size`` bytes."""
        length: int = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise damaged(where, "its header is cut short")
        return length


def damaged(where: str, what: str) -> CheckpointError:
    """The error that says so."""
    return CheckpointError(f"{where}: damaged: {what}; use another checkpoint")


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
