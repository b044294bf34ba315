"""Text files as blocks of whole lines.

The position of each block is known in bytes. The first bytes of a file show its compression.

A block depends only on its first byte, so reading can resume at any block.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, ClassVar, NamedTuple

import pyarrow as pa

from girih.config import build
from girih.config.bounds import Count
from girih.data.formats.recognizing import HEAD_BYTES, PARQUET, Look, begins_with, recognized
from girih.data.paths import DataFile, Partitions, Paths, find_files, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import Source, Unit
from girih.errors import ConfigError, DataError, UserError, nearest
from girih.files.sealed import digest
from girih.kernels.cpu.arrays import I64

BLOCK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20  # transcoded at once
MOST_ROW_BYTES = 64 << 20  # limit for a row whose cells have line breaks
_MAGIC = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def find_text_files(paths: Paths, encoding: str = "utf-8") -> tuple[DataFile, ...]:
    """Lists text files. They are read as UTF-8, converted from their ``encoding``, which is a Python codec.

    Raises:
        ConfigError: not a text codec. MissingFileError, DataError: see :func:`girih.data.paths.find_files`.
    """
    build(str, encoding, "encoding")
    try:
        codec = codecs.lookup(encoding)
    except (LookupError, ValueError):
        known = ("utf-8", "latin-1", "cp1252", "utf-16", "gbk", "shift_jis", "big5", "euc_kr", "koi8_r")
        raise ConfigError(
            f"encoding = {encoding!r}: Python has no such codec{nearest(encoding, known)}"
        ) from None
    if not codec._is_text_encoding:
        raise ConfigError(f"encoding = {encoding!r}: is not a text encoding; expected one such as 'cp1252'")
    files = find_files(paths)
    if codec.name in ("utf-8", "utf-8-sig"):
        return files
    return tuple(replace(file, encoding=codec.name) for file in files)


class LineBlock(NamedTuple):
    """Whole lines of a file, blank lines included.

    They begin at ``byte`` of the decompressed text and at ``line``, which counts from 1.
    """

    data: bytes
    byte: int
    line: int
    num_lines: int


class HeaderLine(NamedTuple):
    """The first line of a file that is not blank, with its position and the position of the next line."""

    line: bytes
    byte: int
    number: int
    rest_byte: int
    rest_number: int
    has_rest: bool


def read_head(file: DataFile, quote: bytes = b"") -> HeaderLine:
    """Finds a file's first line that is not blank, after a UTF-8 byte order mark.

    A line that opens a ``quote`` continues to the line that closes it.

    Raises:
        DataError: the file is empty, blank, not text, or damaged.
    """
    byte, number = 0, 1
    with _opened(file) as text:
        first = text.readline()
        if first.startswith(_BYTE_ORDER_MARK):
            byte, first = len(_BYTE_ORDER_MARK), first[len(_BYTE_ORDER_MARK) :]
        if b"\0" in first or begins_with(PARQUET, first):
            look = recognized(first)
            raise DataError(
                f"{file.address}: holds zero bytes; expected UTF-8 text"
                if look is None
                else f"{file.address}: looks like {look.name}, expected UTF-8 text; {look.mend}"
            )
        while first and not first.strip(b"\r\n"):
            byte, number, first = byte + len(first), number + 1, text.readline()
        if not first:
            raise DataError(f"{file.address}: the file is empty; expected lines of text")
        while quote and first.count(quote) % 2 and len(first) < BLOCK_BYTES and (more := text.readline()):
            first += more
        rest = text.readline()
        while rest and not rest.strip(b"\r\n"):
            rest = text.readline()
    rest_number = number + max(1, first.count(b"\n"))
    return HeaderLine(first.rstrip(b"\r\n"), byte, number, byte + len(first), rest_number, bool(rest))


def head_of(file: DataFile, size: int = HEAD_BYTES) -> bytes:
    """Returns the first bytes of a file, decompressed, and as UTF-8 if the file has an encoding.

    Raises:
        DataError: the file is damaged.
    """
    with _opened(file) as text:
        return _read(text, size)


def look_at(file: DataFile) -> Look | None:
    """Returns the recognized format of a file, compressed or not. Returns None if it is unknown or unreadable."""
    try:
        with file.open() as raw:
            return recognized(head_of(file), _compression(raw.read(6)))
    except UserError:
        return None


class RowsStart(NamedTuple):
    """The byte and the line, from 1, at which the rows of a file begin, and the names of their columns."""

    byte: int
    line: int
    names: Sequence[str]


class TextSource(Source):
    """Text files of one format. A unit is a block of lines. See :class:`girih.data.unit.Source`.

    Args:
        starts: one per file.
        block_bytes: size of a unit.
    """

    kind: ClassVar[str]

    def __init__(self, files: tuple[DataFile, ...], starts: list[RowsStart], block_bytes: int) -> None:
        build(Count, block_bytes, "block_bytes")
        self.files = files
        self.num_parts = len(files)
        self.num_rows = None  # the lines are not counted
        sizes = ",".join(f"{file.size}{file.encoding or ''}" for file in files)
        self.identity = f"{self.kind}/{block_bytes}/" + digest(sizes)
        self.starts = starts
        self.partitions = Partitions(files)
        self._block_bytes = block_bytes

    @property
    def mask(self) -> Callable[[bytes], bytes] | None:
        """A function that replaces each line break that does not end a row by another byte.

        None if there are no such line breaks.
        """
        return None

    def check(self, plan: ReadPlan) -> None:
        """Refuses files that lack a column."""
        for number, (file, start) in enumerate(zip(self.files, self.starts, strict=True)):
            plan.check_names([*start.names, *self.partitions.names(number, start.names)], file.address)

    def own_columns(self, plan: ReadPlan, number: int) -> list[str]:
        """Returns the columns to read that are in the lines of file ``number``, not in its path."""
        added = self.partitions.names(number, self.starts[number].names)
        return [name for name in plan.columns if name not in added]

    @abstractmethod
    def unit(self, number: int, block: LineBlock, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block of file ``number`` into columns."""

    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields the blocks of the files in the given order, from ``start`` on."""
        for part in range(start.part, len(order)):
            number = int(order[part])
            byte, line, _ = self.starts[number]
            if part == start.part and start.line > 0:
                byte, line = start.byte, start.line
            for block in read_blocks(self.files[number], byte, line, self._block_bytes, self.mask):
                after = Cursor(part, block.byte + len(block.data), block.line + block.num_lines)
                unit = self.unit(number, block, plan, after)
                yield replace(
                    unit,
                    table=self.partitions.added(unit.table, number, list(plan.columns), as_text=unit.is_text),
                )


def read_blocks(
    file: DataFile, byte: int, line: int, block_bytes: int, mask: Callable[[bytes], bytes] | None = None
) -> Iterator[LineBlock]:
    """Yields the blocks of a file from ``byte`` on, which is the start of the given line.

    Args:
        mask: see :attr:`TextSource.mask`.

    Raises:
        DataError: the file is damaged, or shorter than ``byte``, or has a row above :data:`MOST_ROW_BYTES` with a mask.
    """
    with _opened(file) as text:
        if byte and text.seek(byte) != byte:
            raise DataError(f"{file.address}: ends before byte {byte}; has it changed since the checkpoint?")
        data = _read(text, block_bytes)
        while data:
            at_end = len(data) < block_bytes
            masked = data if mask is None else mask(data)
            cut = len(data) if at_end else masked.rfind(b"\n") + 1
            while not cut:  # a line longer than a block
                more, size = _read(text, block_bytes), len(data)
                data += more
                masked = data if mask is None else mask(data)
                cut = masked.find(b"\n", size) + 1 if more else size
                if mask is not None and not cut and size > MOST_ROW_BYTES:
                    raise DataError(
                        f"{file.address}, line {line}: a quote opens a cell of more than {MOST_ROW_BYTES >> 20} MiB; close it, or drop"
                        " quoted_line_breaks"
                    )
            num_lines = data.count(b"\n", 0, cut) + (data[cut - 1] != ord("\n"))
            yield LineBlock(masked[:cut], byte, line, num_lines)
            del masked  # the next block reuses its memory
            byte, line, data = byte + cut, line + num_lines, data[cut:]
            data += _read(text, block_bytes - len(data))


@contextmanager
def _opened(file: DataFile) -> Iterator[IO[bytes] | io.BufferedIOBase]:
    """Opens the decompressed bytes of a file. If the file is damaged, reading raises one error that names the file."""
    kind = None
    with ExitStack() as stack:
        text = stack.enter_context(file.open())
        try:
            first = text.read(6)
            text.seek(0)
            kind = _compression(first)
            named = next((kind for suffix, kind in SUFFIXES.items() if file.path.endswith(suffix)), None)
            if named and kind is None:
                trouble = f"not {named}-compressed, despite its name" if first else "the file is empty"
                raise DataError(f"{file.address}: {trouble}; compress it, or rename it")
            data = text if kind is None else stack.enter_context(_decompressed(kind, text))
            yield data if file.encoding is None else io.BufferedReader(_Forward(_Transcoder(data, file).read))
        except UserError:
            raise
        except (OSError, *_DAMAGED) as error:
            if kind is None or not (isinstance(error, _DAMAGED) or error.errno is None):
                raise DataError(f"{file.address}: cannot be read: {one_line(error)}") from None
            trouble = f"the {kind} data is damaged or cut short: {one_line(error)}"
            raise DataError(f"{file.address}: {trouble}") from None


def _compression(first: bytes) -> str | None:
    return next((kind for kind, magic in _MAGIC.items() if first.startswith(magic)), None)


def _decompressed(kind: str, file: IO[bytes]) -> io.BufferedIOBase:
    """Returns the decompressed bytes. Seeking forward reads the bytes in between."""
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)
    if kind == "bzip2":
        return bz2.BZ2File(file)
    if kind == "xz":
        return lzma.LZMAFile(file)
    return io.BufferedReader(_Forward(pa.CompressedInputStream(file, "zstd").read))


class _Transcoder:
    """Converts text of another encoding to UTF-8, piece by piece."""

    def __init__(self, text: IO[bytes] | io.BufferedIOBase, file: DataFile) -> None:
        self._text, self._file = text, file
        self._decoder = codecs.getincrementaldecoder(file.encoding or "utf-8")()
        self._buffered, self._line, self._at_end = memoryview(b""), 1, False

    def read(self, size: int) -> memoryview:
        """Returns at most ``size`` bytes, and none at the end.

        Raises:
            DataError: bytes that are invalid in the encoding; names the line.
        """
        while not self._buffered and not self._at_end:
            data = self._text.read(_PIECE_BYTES)
            self._at_end = not data
            try:
                read = self._decoder.decode(data, self._at_end).encode()
            except UnicodeError as error:
                name, line, before = self._file.encoding or "", self._line, b""
                if isinstance(error, UnicodeDecodeError):
                    before = error.object[: error.start]
                line += before.decode(name, "replace").count("\n")
                raise DataError(
                    f"{self._file.address}, line {line}: not text in {name}: {one_line(error)}; set another data.encoding"
                ) from None
            self._line += read.count(b"\n")
            self._buffered = memoryview(read)
        found, self._buffered = self._buffered[:size], self._buffered[size:]
        return found


class _Forward(io.RawIOBase):
    """Bytes that are read in one direction. Seeking reads forward."""

    def __init__(self, read: Callable[[int], bytes | memoryview]) -> None:
        self._read = read
        self._byte = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        found = self._read(len(buffer))
        buffer[: len(found)] = found
        self._byte += len(found)
        return len(found)

    def tell(self) -> int:
        return self._byte

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Reads forward to a later byte, or to the end if the stream is shorter."""
        if whence != io.SEEK_SET or offset < self._byte:
            raise io.UnsupportedOperation("this stream only goes forward")
        while self._byte < offset and (found := self._read(min(offset - self._byte, 1 << 20))):
            self._byte += len(found)
        return self._byte


def _read(text: IO[bytes] | io.BufferedIOBase, size: int) -> bytes:
    """Reads ``size`` bytes, or fewer at the end."""
    pieces = []
    while size > 0 and (piece := text.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
