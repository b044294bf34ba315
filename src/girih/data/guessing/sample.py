"""A sample of rows, as Arrow columns, from any format.

For text it also guesses encoding, separator, header, and the meaning of cells.

Shapes: R rows.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from girih.data.decode import columns
from girih.data.formats.delimited import BLANKS, DelimitedSource
from girih.data.formats.jsonl import JsonlSource
from girih.data.formats.parquet import ParquetSource
from girih.data.formats.text import SUFFIXES, head_of, look_at, read_head
from girih.data.from_memory import array_of
from girih.data.guessing.cells import Cells
from girih.data.paths import DataFile, find_files
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.readers import CRITEO_COLUMNS
from girih.errors import ConfigError, DataError
from girih.schema import Numeric, Schema

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
ROWS = 100_000
PARTS = 4
BLOCK_BYTES = 4 << 20
_PAIRS_BYTES, _PAIRS_ROWS = 1 << 20, 5000
_ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
GuessedOptions = dict[str, tuple[object, str]]


def with_encoding(files: tuple[DataFile, ...]) -> tuple[tuple[DataFile, ...], GuessedOptions]:
    """Returns the files with the encoding that their first bytes suggest, and the option for it."""
    head = head_of(files[0], HEAD_BYTES)
    name = _encoding(head)
    if name is None:
        return files, {}
    why = "not UTF-8; a guess: cp1252, cp1251, gbk, shift_jis and others are similar"
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
        return None  # UTF-8, cut within a letter
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
    """Returns the source of delimited files, and the options to read them. ``label`` is a column name of the header."""
    read_head(files[0])  # refuses an empty file
    text = head_of(files[0], HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff")
    lines = [line.rstrip("\r\n") for line in text.splitlines(keepends=True)[: LINES + 1] if line.strip()]
    lines = lines[:-1] if len(lines) > LINES or (len(text) > HEAD_BYTES // 2 and len(lines) > 1) else lines
    opens = any(line.count('"') % 2 for line in lines)
    runs = sorted(set(re.findall(_RUN, lines[0])) - {*_STRONG}, key=len, reverse=True)
    tried = {mark: _rows(lines, mark, opens) for mark in (*_STRONG, *_WEAK, *runs)}
    sizes = {mark: _size(rows) for mark, rows in tried.items()}
    if sizes[BLANKS] > 1 and not all(map(all, tried[" "])):
        sizes[" "] = 0  # several blanks are one separator, not empty cells between blanks
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
    """Splits lines into cells. Joins lines whose quotes continue on the next line."""
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
    """Returns the number of cells per row if the first row and nearly all other rows have this number.

    Otherwise returns 0.
    """
    sizes = list(map(len, rows))
    most = max(set(sizes), key=sizes.count, default=0)
    return most if sizes.count(most) >= _ALIKE * len(sizes) and sizes[:1] == [most] else 0


def _is_header(rows: Sequence[Sequence[str]], label: str | None) -> bool:
    """Returns whether the first row holds names.

    All names must differ. In addition, one column has a word above numbers, or the whole row has no number.
    """
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


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows, and the options of ``[data]`` to read them.

    Attributes:
        table: R rows. Text becomes integers, floats or times if a whole column has this kind, else strings.
        options: options of ``[data]``, each with its reason.
        num_rows: rows of all files, estimated if the rows are not counted.
        cells: options of the columns' features to read their cells.
        strings: columns that are strings in a format with types, regardless of their text.
    """

    table: pa.Table
    options: GuessedOptions
    num_rows: int
    cells: dict[str, dict[str, object]]
    strings: frozenset[str]


def take_sample(paths: Sequence[str], label: str | None = None) -> Sample:
    """Reads some rows from up to four places of the data. ``label`` is an existing column.

    Raises:
        MissingFileError, DataError: no data, or no readable data.
        ConfigError: a format that girih does not read.
    """
    train, files = _files(paths[0]) if len(paths) == 1 else (list(paths), find_files(list(paths)))
    form, files, encoding = _format(files)
    by = "name" if _ENDINGS.get(_ending(files[0].path) or "") == form else "first line"
    options: GuessedOptions = {"format": (form, f"by the file's {by}"), "train": (train, ""), **encoding}
    size = sum(file.size for file in files)  # compressed files are smaller than their text: a low estimate
    if form in ("libsvm", "libffm"):
        table = _pairs(files, form)
        num_rows = round(table.num_rows * max(1.0, size / max(1, min(size, _PAIRS_BYTES))))
        return Sample(table, options, num_rows, {}, frozenset())
    source: Any
    if form == "parquet":
        source = ParquetSource(files)
        names = source.column_names
    elif form == "jsonl":
        source = JsonlSource(files, BLOCK_BYTES)
        names = [name for start in source.starts for name in start.names]
    else:
        source, more = (
            (DelimitedSource(files, "\t", "", [CRITEO_COLUMNS], BLOCK_BYTES), {})
            if form == "criteo"
            else open_delimited(files, BLOCK_BYTES, label)
        )
        options |= more
        names = source.starts[0].names
    names = list(dict.fromkeys([*names, *source.partitions.types]))
    if "" in names:
        names.remove("")
        options["train"] = (train, "a column has no name, and is left out")
    plan = ReadPlan(Schema([Numeric(name=names[0])], "\0"), keep=tuple(names))
    tables, num_rows, num_bytes, bad = [], 0, 0, ""
    parts = sorted({place * (source.num_parts - 1) // (PARTS - 1) for place in range(PARTS)})
    for part in parts:
        unit = next(source.read(plan, np.array([part]), Cursor()), None)
        bad = bad or (f", as {unit.locate(unit.bad[0])}" if unit is not None and unit.bad else "")
        if unit is not None and unit.table.num_rows:
            num_rows, num_bytes = num_rows + unit.table.num_rows, num_bytes + unit.after.byte
            tables.append(unit.table.select(names).slice(0, ROWS // len(parts)))
    if not tables:
        raise DataError(f"{files[0].address}: no rows that can be read{bad}")
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    strings = frozenset(f.name for f in table.schema if columns.is_string(columns.value_type(f.type)))
    cells = Cells(table.select(names), is_text=form in ("csv", "criteo"))
    estimated = max(num_rows, round(num_rows / num_bytes * size)) if num_bytes else num_rows
    of_types = frozenset() if form in ("csv", "criteo") else strings
    return Sample(cells.table, options | cells.data, source.num_rows or estimated, cells.features, of_types)


def _files(path: str) -> tuple[str | list[str], tuple[DataFile, ...]]:
    """Returns the files, and their name in a config. A directory stands for the files with its most frequent ending."""
    if not os.path.isdir(path):
        return path, find_files(path)
    found: dict[str, Counter[str]] = {}
    for _, _, names in os.walk(path):
        for name in names:
            if ending := _ending(name):
                found.setdefault(ending, Counter())[name[name.rindex(ending) :]] += 1  # with compression
    most = max(found, key=lambda ending: found[ending].total(), default=".parquet")
    if most == ".parquet":
        return path, find_files(path, suffix=most)
    patterns = [f"{path.rstrip('/')}/**/*{ending}" for ending in sorted(found[most])]
    return patterns[0] if len(patterns) == 1 else patterns, find_files(patterns)


def _ending(name: str) -> str | None:
    """Returns the ending that shows a file's format, without the ending of its compression."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    ending = os.path.splitext(name)[1]
    return ending if ending in _ENDINGS else None


def _format(files: tuple[DataFile, ...]) -> tuple[str, tuple[DataFile, ...], GuessedOptions]:
    """Returns the format of files, the files with their encoding, and the option for the encoding.

    Raises:
        ConfigError: a format that girih does not read; names it.
    """
    look = look_at(files[0])
    options: GuessedOptions = {}
    if look is None or look.form == "csv":
        files, options = with_encoding(files)
        look = look_at(files[0]) if options else look
    if look is not None and look.form is None:
        raise ConfigError(
            f"{files[0].address}: looks like {look.name}, which girih does not read: {look.mend}"
        )
    ending = _ending(files[0].path)
    form = "csv" if look is None or look.form is None else look.form
    form = _ENDINGS[ending] if ending and form == "csv" else form
    return form, files, options


def _pairs(files: tuple[DataFile, ...], form: str) -> pa.Table:
    """Returns the table of libsvm, or of each field of libffm."""
    labels: list[float | None] = []
    fields: dict[str, list[list[int]]] = {}
    numbers: dict[str, list[float]] = {}
    for line in head_of(files[0], _PAIRS_BYTES).split(b"\n")[:_PAIRS_ROWS]:
        words = line.partition(b"#")[0].decode("utf-8", "replace").split()
        if not words:
            continue
        labels.append(float(words.pop(0)) if words and ":" not in words[0] else None)
        for word in words:
            *field, index, value = word.split(":")
            ids = fields.setdefault(field[0] if field else "features", [])
            ids += ([] for _ in range(len(labels) - len(ids)))
            ids[-1].append(int(index))
            numbers.setdefault(field[0] if field else "features", []).append(float(value))
    columns: dict[str, Sequence[object]] = {"label": labels}
    for name, ids in sorted(fields.items(), key=lambda each: (len(each[0]), each[0])):
        ids += ([] for _ in range(len(labels) - len(ids)))
        one = form == "libffm" and all(len(row) <= 1 for row in ids)
        if one and len({*itertools.chain(*ids)}) == 1 and len(set(numbers[name])) > 1:
            values = iter(numbers[name])
            columns[name] = [next(values) if row else None for row in ids]
        else:
            columns[name] = [row[0] if row else None for row in ids] if one else ids
    return pa.table({name: array_of(values) for name, values in columns.items()})
