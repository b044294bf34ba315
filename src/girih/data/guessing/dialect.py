"""The encoding, separator and header of text files, guessed from their first lines."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from girih.data.decode import columns
from girih.data.formats.delimited import BLANKS, DelimitedSource
from girih.data.formats.text import head_of, read_head
from girih.data.paths import DataFile

HEAD_BYTES = 1 << 20
LINES = 500
_STRONG, _WEAK = ("\t", ",", ";", "|", "::", "\x01", "^"), (" ", BLANKS)
_LETTERS = {
    "shift_jis": rb"(?:[\x81-\x9f].)*[\x82\x83][\x40-\xf1](?:[\x81-\x9f].)*",
    "gbk": rb"[\xb0-\xd7][\xa1-\xfe]",
    "cp1251": rb"[\xc0-\xff]{3,}",
    "cp1252": rb"[\x80-\xff]",
}
"""Encodings, and the bytes of their frequent letters."""
_RUN = r"[^\w\s\"'.+-]+|\t+"
_ALIKE = 0.9
GuessedOptions = dict[str, tuple[object, str]]


def with_encoding(files: tuple[DataFile, ...]) -> tuple[tuple[DataFile, ...], GuessedOptions]:
    """The files with the encoding that their first bytes tell of, and the option for it."""
    head = head_of(files[0], HEAD_BYTES)
    name = _encoding(head)
    if name is None:
        return files, {}
    why = "no UTF-8; a guess: cp1252, cp1251, gbk, shift_jis and others look alike"
    why = "by its first bytes" if name.startswith("utf-16") else why
    return tuple(replace(file, encoding=name) for file in files), {"encoding": (name, why)}


def _encoding(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    for name, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if 2 * zeros.count(0) > len(zeros):
            return name
    head = head[: head.rfind(b"\n") + 1] or head
    text, high = head.decode("utf-8", "replace"), len(re.findall(rb"[\x80-\xff]", head))
    if text.count("\ufffd") <= 0.1 * sum(not mark.isascii() for mark in text):
        return None  # UTF-8, some of it cut within a letter
    for name, letters in _LETTERS.items():
        try:
            if sum(map(len, re.findall(letters, head))) >= 0.6 * high and head.decode(name):
                return name
        except UnicodeDecodeError:
            continue
    return "latin-1"


def open_delimited(
    files: tuple[DataFile, ...], block_bytes: int, label: str | None = None
) -> tuple[DelimitedSource, GuessedOptions]:
    """The source of files of cells, and how they are to be read; ``label`` is a name that a header has."""
    read_head(files[0])  # which refuses an empty file
    text = head_of(files[0], HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff")
    lines = [line.rstrip("\r\n") for line in text.splitlines(keepends=True)[: LINES + 1] if line.strip()]
    lines = lines[:-1] if len(lines) > LINES or (len(text) > HEAD_BYTES // 2 and len(lines) > 1) else lines
    opens = any(line.count('"') % 2 for line in lines)
    runs = sorted(set(re.findall(_RUN, lines[0])) - {*_STRONG}, key=len, reverse=True)
    tried = {mark: _rows(lines, mark, opens) for mark in (*_STRONG, *_WEAK, *runs)}
    sizes = {mark: _size(rows) for mark, rows in tried.items()}
    if sizes[BLANKS] > 1 and not all(map(all, tried[" "])):
        sizes[" "] = 0  # several blanks are one separator, rather than empty cells between blanks
    kinds = (sorted(kind, key=sizes.__getitem__, reverse=True) for kind in (_STRONG, _WEAK, runs))
    separator = next((mark for kind in kinds for mark in kind if sizes[mark] > 1), ",")
    whole = (
        run
        for run in runs
        if separator in run and not any(separator in line.replace(run, "") for line in lines)
    )
    separator = next((run for run in whole if sizes[run] > 1), separator)
    best, rows = sizes[separator], tried[separator]
    options: GuessedOptions = {}
    if separator not in _WEAK and all(row[1:] and all(c.startswith(" ") for c in row[1:]) for row in rows):
        separator, rows = f"{separator} ", [[cell.strip() for cell in row] for row in rows]
    quote, unquoted = '"', [line.split(separator) for line in lines]
    if opens and separator != BLANKS and best > 1 and {*map(len, unquoted)} == {len(unquoted[0])}:
        opens, rows, quote = False, unquoted, ""
        options["quote"] = ("", "quotes are left open, and are a part of cells")
    if separator != ",":
        options["separator"] = (separator, f"{best} cells in the first line")
    breaks = opens and any("\n" in cell for row in rows for cell in row)
    if breaks:
        options["quoted_line_breaks"] = (True, "cells within quotes have them")
    names = None
    if not _is_header(rows, label):
        names = [tuple(f"column{place}" for place in range(1, len(rows[0]) + 1))]
        why = "the first line holds values, not names: give columns their own"
        options["columns"] = (list(names[0]), why)
    return DelimitedSource(files, separator, quote, names, block_bytes, line_breaks=breaks), options


def _rows(lines: Sequence[str], separator: str, opens: bool) -> list[list[str]]:
    """Lines as cells; those whose quotes go on in the next line are joined."""
    if separator == BLANKS:
        return [line.split() for line in lines]
    mark = separator if len(separator) == 1 else "\x1f"
    marked = (line.replace(separator, mark) for line in lines)
    try:
        if opens:
            return list(csv.reader([line + "\n" for line in marked], delimiter=mark))
        return [next(csv.reader([line], delimiter=mark)) for line in marked]
    except csv.Error:
        return []


def _size(rows: Iterable[Sequence[str]]) -> int:
    """The cells of a row, if nearly all rows, and the first one, have as many; else 0."""
    sizes = list(map(len, rows))
    most = max(set(sizes), key=sizes.count, default=0)
    return most if sizes.count(most) >= _ALIKE * len(sizes) and sizes[:1] == [most] else 0


def _is_header(rows: Sequence[Sequence[str]], label: str | None) -> bool:
    """Whether the first row has names: different ones, and in a column of numbers a word, or no number at all."""
    first, *others = rows
    below = [
        [cell for cell in column if cell.strip()] for column in itertools.zip_longest(*others, fillvalue="")
    ]
    if label in first or [cell for cell in first if cell] == list(map(str, range(sum(map(bool, first))))):
        return True
    if not any(map(_is_number, first)) and len({*filter(None, first)}) == sum(map(bool, first)):
        return 2 * sum(cell in values for cell, values in zip(first, below, strict=False)) < len(first)
    return any(
        cell.strip()
        and cell not in columns.NULL_WORDS
        and not _is_number(cell)
        and values
        and all(map(_is_number, values))
        for cell, values in zip(first, below, strict=False)
    )


def _is_number(cell: str) -> bool:
    return columns.number_of(cell.strip().encode("utf-8", "replace")) is not None
