"""Text files as blocks of whole lines, at known bytes; gzip is recognised by its first bytes.

A block is a function of the byte at which it starts, so that reading can go on from any of them.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.config import checks
from girih.data.paths import File, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import Unit
from girih.errors import DataError

BLOCK_BYTES = 8 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Whole lines of a file, blank ones included; ``byte`` (of the decompressed text) and ``line``, from 1,
    are where they begin.
    """

    data: bytes
    byte: int
    line: int
    num_lines: int


class Head(NamedTuple):
    """The first line of a file that is not blank, where it begins and where the rest does."""

    line: bytes
    byte: int
    number: int
    rest_byte: int
    rest_number: int
    has_rest: bool


def read_head(file: File) -> Head:
    """Finds a file's first line; a UTF-8 byte order mark before it is passed over.

    Raises:
        DataError: the file is empty, blank, not text, or damaged.
    """
    byte = number = 0
    with _Text(file) as text:
        first = text.line()
        if first.startswith(_BYTE_ORDER_MARK):
            byte, first = len(_BYTE_ORDER_MARK), first[len(_BYTE_ORDER_MARK) :]
        if b"\0" in first:
            raise DataError(
                f"{file.address}: holds zero bytes; expected UTF-8 text (is it UTF-16, or binary?)"
            )
        number = 1
        while first and not first.strip(b"\r\n"):
            byte, number, first = byte + len(first), number + 1, text.line()
        if not first:
            raise DataError(f"{file.address}: the file is empty; expected lines of text")
        rest = text.line()
        while rest and not rest.strip(b"\r\n"):
            rest = text.line()
    return Head(first.rstrip(b"\r\n"), byte, number, byte + len(first), number + 1, bool(rest))


class TextSource(ABC):
    """Text files of one format; a unit is a block of lines. See :class:`girih.data.unit.Source`.

    Args:
        starts: the byte and the line, from 1, where the rows of each file begin.
        block_bytes: size of a unit.
    """

    kind: ClassVar[str]

    def __init__(self, files: tuple[File, ...], starts: list[tuple[int, int]], block_bytes: int) -> None:
        checks.integer("block_bytes", block_bytes)
        self.files = files
        self.num_parts = len(files)
        self.num_rows: int | None = None  # nobody has counted the lines
        sizes = ",".join(str(file.size) for file in files)
        self.identity = f"{self.kind}/{block_bytes}/" + hashlib.sha256(sizes.encode()).hexdigest()[:16]
        self._starts = starts
        self._block_bytes = block_bytes

    @abstractmethod
    def check(self, plan: ReadPlan) -> None:
        """Refuses files that lack a column."""

    @abstractmethod
    def unit(self, number: int, block: Block, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block of file ``number`` into columns."""

    def read(self, plan: ReadPlan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields the blocks of the files in the order given, from ``start`` on."""
        for part in range(start.part, len(order)):
            number = int(order[part])
            byte, line = self._starts[number]
            if part == start.part and start.line > 0:
                byte, line = start.byte, start.line
            for block in read_blocks(self.files[number], byte, line, self._block_bytes):
                after = Cursor(part, block.byte + len(block.data), block.line + block.num_lines)
                yield self.unit(number, block, plan, after)


def read_blocks(file: File, byte: int, line: int, block_bytes: int) -> Iterator[Block]:
    """Yields the blocks of a file from a byte, which begins the line of that number.

    Raises:
        DataError: the file is damaged, or shorter than ``byte``.
    """
    with _Text(file) as text:
        text.skip(byte)
        data = text.read(block_bytes)
        while data:
            at_end = len(data) < block_bytes
            cut = len(data) if at_end else data.rfind(b"\n") + 1
            while not cut:  # a line longer than a block
                more = text.read(block_bytes)
                found = more.find(b"\n") + 1
                if found or not more:
                    cut = len(data) + found
                data += more
            num_lines = data.count(b"\n", 0, cut) + (data[cut - 1] != ord("\n"))
            yield Block(data[:cut], byte, line, num_lines)
            byte, line, data = byte + cut, line + num_lines, data[cut:]
            data += text.read(block_bytes - len(data))


class _Text:
    """A file's decompressed bytes; damage becomes one error that names the file."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._raw = file.open()
        magic = self._guarded(self._raw.read, 2)
        self._guarded(self._raw.seek, 0)
        self._is_gzip = magic == _GZIP_MAGIC
        if file.path.endswith(".gz") and not self._is_gzip:
            self._raw.close()
            trouble = "the file is empty" if not magic else "not gzip-compressed in spite of its name"
            raise DataError(f"{file.address}: {trouble}; compress it, or rename it")
        self._stream: Any = gzip.GzipFile(fileobj=self._raw) if self._is_gzip else self._raw

    def __enter__(self) -> _Text:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()

    def line(self) -> bytes:
        return bytes(self._guarded(self._stream.readline))

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer only at the end."""
        pieces = []
        while size > 0:
            piece = self._guarded(self._stream.read, size)
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def skip(self, byte: int) -> None:
        if byte and self._guarded(self._stream.seek, byte) != byte:
            raise DataError(
                f"{self._file.address}: ends before byte {byte}; has it changed since the checkpoint?"
            )

    def _guarded(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self._file.address}: the gzip data is damaged or cut short: {one_line(error)}"
            ) from None
        except OSError as error:
            raise DataError(f"{self._file.address}: cannot be read: {one_line(error)}") from None
