"""Delimited text such as CSV: Arrow splits lines into cells of strings, and one rule reads their values.

Cells may contain line breaks only with ``quoted_line_breaks``. girih replaces these line breaks by another byte until
the lines are split. It also replaces a separator of several characters by one byte. Blank lines are skipped.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from girih.config import build
from girih.data.formats.recognizing import is_object, to_set
from girih.data.formats.text import LineBlock, RowsStart, TextSource, read_head
from girih.data.paths import DataFile, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import ConfigError, DataError
from girih.kernels.cpu.arrays import I64

_NO_LINE_END = re.compile(rb"[^\r\n]")
_LINE = re.compile(rb"[^\r\n][^\n]*\n?")  # not a blank line
BLANKS = r"\s+"
"""The separator that stands for one or more blanks and tabs, as in pandas."""
_BLANKS = re.compile(rb"[ \t]+(?=\r?\n|\r?\Z)|(?<=\n)[ \t]+|\A[ \t]+"), re.compile(rb"[ \t]+")
_SEPARATOR, _LINE_BREAK = b"\x1f", b"\x1e"
"""The bytes that replace a separator of several characters, and a line break within quotes."""


def split_cells(
    data: bytes,
    names: Sequence[str],
    columns: Mapping[str, pa.DataType],
    separator: str,
    quote: str,
    address: str,
    *,
    until_bad: bool = False,
) -> tuple[pa.Table | None, list[pacsv.InvalidRow]]:
    """Splits lines into cells: a table of some columns, null if empty, and the lines with a wrong number of cells.

    Args:
        columns: the columns to read, and their Arrow types.
        until_bad: stop at the first line with a wrong number of cells, and return no table.

    Raises:
        DataError: lines that Arrow cannot split, or cells of another type, with the file's address.
    """
    broken: list[pacsv.InvalidRow] = []

    def note(row: pacsv.InvalidRow) -> str:
        broken.append(row)
        return "error" if until_bad else "skip"

    # Arrow needs unique names; columns that are not read may share one
    unique = [name if name in columns else f"{name}\0{place}" for place, name in enumerate(names)]
    if not _NO_LINE_END.search(data):
        return pa.schema(columns.items()).empty_table(), []
    try:
        table = pacsv.read_csv(
            pa.BufferReader(data),
            read_options=pacsv.ReadOptions(
                column_names=unique, use_threads=False, block_size=max(len(data) + 1, 64)
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=separator, quote_char=quote or False, invalid_row_handler=note
            ),
            convert_options=pacsv.ConvertOptions(
                include_columns=list(columns),
                column_types=columns,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException as error:
        if until_bad and broken:
            return None, broken
        raise DataError(f"{address}: cannot be split into cells: {one_line(error)}") from None
    return table, broken


class DelimitedSource(TextSource):
    """Text files whose lines are cells between separators.

    Args:
        files: each has a header line, unless ``columns`` is given.
        separator: one or more characters; :data:`BLANKS` for any number of blanks and tabs.
        quote: the character around cells that hold the separator, or "" for none.
        line_breaks: cells within quotes may hold line breaks.
        columns: lists of column names, for files without a header. A file takes the first list that is as long as its
            first line, or else the first list.
        block_bytes: size of a unit.

    Raises:
        ConfigError: an unusable separator or quote.
        DataError: a file that is empty, damaged, or without a header; no rows at all.
    """

    kind = "text"

    def __init__(
        self,
        files: tuple[DataFile, ...],
        separator: str,
        quote: str,
        columns: Sequence[Sequence[str]] | None,
        block_bytes: int,
        *,
        line_breaks: bool = False,
    ) -> None:
        build(str, separator, "separator")
        build(bool, line_breaks, "quoted_line_breaks")
        if not separator or set(separator) & set('\r\n"'):
            raise ConfigError(
                f"separator = {separator!r}: expected text without quotes and line breaks, such as ',', '\\t' or '::'"
            )
        if quote and (len(quote) != 1 or not quote.isascii() or quote in "\r\n" or quote in separator):
            raise ConfigError(
                f"quote = {quote!r}: expected one ASCII character other than the separator, or ''"
            )
        if line_breaks and (not quote or separator == BLANKS):
            raise ConfigError(
                "quoted_line_breaks = true: expected a quote, and a separator other than '\\s+'"
            )
        self._separator = separator
        self._is_one = len(separator) == 1 and separator.isascii()
        self._quote = quote
        self._has_rows = False
        self._quoted: re.Pattern[bytes] | None = None
        if line_breaks:
            begin, mark = re.escape(separator.encode()), re.escape(quote.encode())
            cell = rb"(?:(?<=%b)|(?<=\n)|\A)%b(?:[^%b]|%b%b)*+(?:%b|\Z)" % (begin, *[mark] * 5)
            self._quoted = re.compile(cell)
        super().__init__(files, [self._start(file, columns) for file in files], block_bytes)
        self.identity += "/quoted" if line_breaks else ""
        if not self._has_rows:
            raise DataError(f"{files[0].address}: no rows; expected at least one below the header")

    def _start(self, file: DataFile, columns: Sequence[Sequence[str]] | None) -> RowsStart:
        head = read_head(file, b"" if self._quoted is None else self._quote.encode())
        if columns is None and is_object(head.line):
            raise DataError(f"{file.address}: looks like JSON lines, expected a header; {to_set('jsonl')}")
        try:
            text = head.line.decode("utf-8")
        except UnicodeDecodeError:
            if columns is None:
                mend = "set data.encoding, as in encoding = 'cp1252'"
                raise DataError(f"{file.address}: the header is not UTF-8 text; {mend}") from None
            text = head.line.decode("latin-1")
        try:
            cells = self._cells(text)
        except csv.Error:
            trouble = "the first line cannot be split; lines end in \\n or \\r\\n"
            raise DataError(f"{file.address}: {trouble}") from None
        lists = [cells] if columns is None else [tuple(names) for names in columns]
        names = next((names for names in lists if len(names) == len(cells)), lists[0])
        if cells == names:  # a header, perhaps although columns are given
            self._has_rows |= head.has_rest
            return RowsStart(head.rest_byte, head.rest_number, names)
        self._has_rows = True
        return RowsStart(head.byte, head.number, names)

    @property
    def mask(self) -> Callable[[bytes], bytes] | None:
        """See :attr:`TextSource.mask`."""
        return None if self._quoted is None else self._masked

    def _masked(self, data: bytes) -> bytes:
        self._refuse(data, _LINE_BREAK, self.files[0].address)
        pattern = self._quoted or re.compile(b"")
        return pattern.sub(lambda match: match[0].replace(b"\n", _LINE_BREAK), data)

    def _cells(self, line: str) -> tuple[str, ...]:
        mark = self._separator
        if not self._is_one:
            mark = _SEPARATOR.decode()
            line = self._with_one(line.encode(), "the first line").decode()
        if not self._quote:
            return tuple(line.split(mark))
        cells = next(csv.reader([line], delimiter=mark, quotechar=self._quote))
        return tuple(cell.replace(mark, self._separator) for cell in cells)

    def _with_one(self, data: bytes, where: str) -> bytes:
        """Replaces each separator by a single character."""
        if self._is_one:
            return data
        self._refuse(data, _SEPARATOR, where)
        if self._separator != BLANKS:
            return data.replace(self._separator.encode(), _SEPARATOR)
        return _BLANKS[1].sub(_SEPARATOR, _BLANKS[0].sub(b"", data))

    @staticmethod
    def _refuse(data: bytes, mark: bytes, where: str) -> None:
        if mark in data:
            raise DataError(
                f"{where}: holds the byte {mark[0]:#04x}, which girih needs to split these lines; remove it"
            )

    def _as_written(self, table: pa.Table, data: bytes) -> pa.Table:
        """Restores the separators and line breaks in cells."""
        written = b" " if self._separator == BLANKS else self._separator.encode()
        marks = [(_LINE_BREAK, b"\n")] if self.mask is not None and _LINE_BREAK in data else []
        if not self._is_one and self._quote.encode() in data:
            marks.append((_SEPARATOR, written))
        for mark, text in marks:
            for place, name in enumerate(table.column_names):
                table = table.set_column(place, name, pc.replace_substring(table[name], mark, text))
        return table

    def unit(self, number: int, block: LineBlock, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into cells. Lines that cannot be split are bad rows."""
        address, names = self.files[number].address, self.starts[number].names
        columns = dict.fromkeys(self.own_columns(plan, number), pa.binary())
        separator = self._separator if self._is_one else _SEPARATOR.decode()
        splitting = (names, columns, separator, self._quote, address)
        block = block._replace(data=self._with_one(block.data, address))
        table: pa.Table  # None if a bad line came first
        table, broken = split_cells(block.data, *splitting, until_bad=plan.until_bad)
        if table is None:
            block = _up_to_line(block, broken[0].number)
            table, broken = split_cells(block.data, *splitting)
        numbers: range | I64 = range(block.line, block.line + block.num_lines)
        bad: list[BadRow] = []
        if broken or table.num_rows != block.num_lines:
            lines, kept = self._filled_lines(block)
            if self.mask is None or broken or table.num_rows != len(lines):
                data, lines, bad = self._without_open_quotes(lines, kept)
                if bad or table.num_rows + len(broken) != len(lines):
                    table, broken = split_cells(data, *splitting)
            if table.num_rows + len(broken) != len(lines):
                raise DataError(
                    f"{address}: lines {block.line} to {block.line + block.num_lines - 1} do not all end in \\n or \\r\\n"
                )
            places = np.array([row.number for row in broken], dtype=np.int64) - 1
            for place, row in zip(places, broken, strict=True):
                message = (
                    f"{row.actual_columns} cells: expected {len(names)}, separated by {self._separator!r}"
                )
                bad.append(BadRow(int(lines[place]), "wrong number of cells", message))
            numbers = np.delete(lines, places)
        return Unit(self._as_written(table, block.data), address, after, numbers, is_text=True, bad=bad)

    @staticmethod
    def _filled_lines(block: LineBlock) -> tuple[I64, list[bytes]]:
        """Returns the lines that are not blank, and their numbers."""
        numbers, lines, number = [], [], block.line
        for line in block.data.split(b"\n"):
            if line.strip(b"\r"):
                numbers.append(number)
                lines.append(line)
            number += 1 + line.count(_LINE_BREAK)
        return np.array(numbers, dtype=np.int64), lines

    def _without_open_quotes(self, numbers: I64, lines: list[bytes]) -> tuple[bytes, I64, list[BadRow]]:
        """Returns the lines that close their quotes, the numbers of these lines, and the other lines as bad rows."""
        quote = self._quote.encode()
        is_open = np.array([bool(quote) and line.count(quote) % 2 == 1 for line in lines], np.bool_)
        mend = "; set quoted_line_breaks = true if cells hold line breaks" if self.mask is None else ""
        message = f"a quote {self._quote} is not closed{' on its line' if mend else ''}{mend}"
        bad = [BadRow(int(number), "a quote left open", message) for number in numbers[is_open]]
        kept = [line for line, opens in zip(lines, is_open, strict=True) if not opens]
        return b"\n".join(kept) + b"\n", numbers[~is_open], bad


def _up_to_line(block: LineBlock, number: int) -> LineBlock:
    """Cuts a block after the given non-blank line, counted from 1, or after its last line."""
    *_, last = itertools.islice(_LINE.finditer(block.data), number)
    data = block.data[: last.end()]
    return block._replace(data=data, num_lines=data.count(b"\n") + (not data.endswith(b"\n")))
