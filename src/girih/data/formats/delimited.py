"""CSV and its kin: Arrow splits lines into cells, all of them strings, and one rule reads their values.

Values do not contain line breaks. Blank lines are passed over.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from girih.data.formats.recognizing import is_object, to_set
from girih.data.formats.text import Block, Start, TextSource, read_head
from girih.data.paths import File, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import ConfigError, DataError

_NO_LINE_END = re.compile(rb"[^\r\n]")
_LINE = re.compile(rb"[^\r\n][^\n]*\n?")  # not a blank one


def split_cells(
    data: bytes,
    names: Sequence[str],
    columns: Mapping[str, Any],
    separator: str,
    quote: str,
    address: str,
    *,
    until_bad: bool = False,
) -> tuple[Any, list[Any]]:
    """Splits lines into cells: some columns as a table, null where empty, and the lines with more or fewer cells.

    Args:
        columns: those to read, and their Arrow types.
        until_bad: the first line with more or fewer cells ends it; there is no table then.

    Raises:
        DataError: lines that Arrow cannot split, or cells of another type, with the file's address.
    """
    broken: list[Any] = []

    def note(row: Any) -> str:
        broken.append(row)
        return "error" if until_bad else "skip"

    # Arrow tells columns apart by name; those that nobody reads may share one
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
        files: each with a header line, unless ``columns`` is given.
        separator: one character.
        quote: the character around cells that hold the separator, or "" for none.
        columns: lists of column names, for files without a header; a file takes the first list that is as
            long as its first line, and else the first.
        block_bytes: size of a unit.

    Raises:
        ConfigError: a separator or quote that is not one character.
        DataError: a file that is empty, damaged, or without a header; no rows at all.
    """

    kind = "text"

    def __init__(
        self,
        files: tuple[File, ...],
        separator: str,
        quote: str,
        columns: Sequence[Sequence[str]] | None,
        block_bytes: int,
    ) -> None:
        if len(separator) != 1 or not separator.isascii() or separator in '\r\n"':
            raise ConfigError(
                f"separator = {separator!r}: expected one ASCII character, such as ',' or '\\t'"
            )
        if quote and (len(quote) != 1 or not quote.isascii() or quote in "\r\n" or quote == separator):
            raise ConfigError(
                f"quote = {quote!r}: expected one ASCII character other than the separator, or ''"
            )
        self._separator = separator
        self._quote = quote
        self._has_rows = False
        super().__init__(files, [self._start(file, columns) for file in files], block_bytes)
        if not self._has_rows:
            raise DataError(f"{files[0].address}: no rows; expected at least one below the header")

    def _start(self, file: File, columns: Sequence[Sequence[str]] | None) -> Start:
        head = read_head(file)
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
        if cells == names:  # a header, maybe in spite of what was said
            self._has_rows |= head.has_rest
            return Start(head.rest_byte, head.rest_number, names)
        self._has_rows = True
        return Start(head.byte, head.number, names)

    def _cells(self, line: str) -> tuple[str, ...]:
        if not self._quote:
            return tuple(line.split(self._separator))
        return tuple(next(csv.reader([line], delimiter=self._separator, quotechar=self._quote)))

    def unit(self, number: int, block: Block, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into cells; lines that cannot be split are bad rows."""
        address, names = self.files[number].address, self.starts[number].names
        columns = dict.fromkeys(self.own_columns(plan, number), pa.binary())
        splitting = (names, columns, self._separator, self._quote, address)
        table, broken = split_cells(block.data, *splitting, until_bad=plan.until_bad)
        if table is None:
            block = _up_to_line(block, broken[0].number)
            table, broken = split_cells(block.data, *splitting)
        numbers: range | NDArray[np.int64] = range(block.line, block.line + block.num_lines)
        bad: list[BadRow] = []
        if broken or table.num_rows != block.num_lines:
            data, lines, bad = self._without_open_quotes(block)
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
        return Unit(table, address, after, numbers, is_text=True, bad=bad)

    def _without_open_quotes(self, block: Block) -> tuple[bytes, NDArray[np.int64], list[BadRow]]:
        """The lines that are not blank and close their quotes, the number of each, and those that do not."""
        lines, bad, kept = [], [], []
        quote = self._quote.encode()
        for number, line in enumerate(block.data.split(b"\n"), start=block.line):
            if not line.strip(b"\r"):
                continue
            if quote and line.count(quote) % 2:
                message = f"a quote {self._quote} is not closed on its line"
                bad.append(BadRow(number, "a quote left open", message))
            else:
                lines.append(number)
                kept.append(line)
        return b"\n".join(kept) + b"\n", np.array(lines, dtype=np.int64), bad


def _up_to_line(block: Block, number: int) -> Block:
    """The lines of a block up to one of those that are not blank, counted from 1, as far as there are so many."""
    *_, last = itertools.islice(_LINE.finditer(block.data), number)
    data = block.data[: last.end()]
    return block._replace(data=data, num_lines=data.count(b"\n") + (not data.endswith(b"\n")))
