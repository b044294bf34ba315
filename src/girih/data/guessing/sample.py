"""Some rows of some data, as Arrow columns of any format; of text, what its cells seem to be.

Shapes: R rows.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from girih.data.decode import columns
from girih.data.formats.delimited import DelimitedSource
from girih.data.formats.jsonl import JsonlSource
from girih.data.formats.objects import array_of
from girih.data.formats.parquet import ParquetSource
from girih.data.formats.text import SUFFIXES, head_of, look_at
from girih.data.guessing.cells import Cells
from girih.data.guessing.dialect import GuessedOptions, open_delimited, with_encoding
from girih.data.paths import DataFile, find_files
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.readers import CRITEO_COLUMNS
from girih.errors import ConfigError, DataError
from girih.schema import Numeric, Schema

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


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows, and what the section ``[data]`` has to say to read them.

    Attributes:
        table: R rows; cells of text as integers, floats or times where all of a column's are such, else strings.
        options: of ``[data]``, each with the reason for it.
        num_rows: of all files, estimated where nobody has counted them.
        cells: options of columns' features by which their cells are read.
        strings: columns that are strings in a format with types, whatever these spell.
    """

    table: pa.Table
    options: GuessedOptions
    num_rows: int
    cells: dict[str, dict[str, object]]
    strings: frozenset[str]


def take_sample(paths: Sequence[str], label: str | None = None) -> Sample:
    """Reads some rows from up to four places of the data; ``label`` is a column that it has.

    Raises:
        MissingFileError, DataError: nothing there, or nothing that can be read.
        ConfigError: a format that girih does not read.
    """
    train, files = _files(paths[0]) if len(paths) == 1 else (list(paths), find_files(list(paths)))
    form, files, encoding = _format(files)
    by = "name" if _ENDINGS.get(_ending(files[0].path) or "") == form else "first line"
    options: GuessedOptions = {"format": (form, f"by the file's {by}"), "train": (train, ""), **encoding}
    if form in ("libsvm", "libffm"):
        table = _pairs(files, form)
        size = sum(file.size for file in files)
        num_rows = round(table.num_rows * max(1.0, size / max(1, min(size, _PAIRS_BYTES))))
        return Sample(table, options, num_rows, {}, frozenset())
    source: Any
    if form == "parquet":
        source = ParquetSource(files)
        names = list(dict.fromkeys([*source.column_names, *source.partitions.types]))
    elif form == "jsonl":
        source = JsonlSource(files, BLOCK_BYTES)
        names = list(dict.fromkeys(name for start in source.starts for name in start.names))
        names += [name for name in source.partitions.types if name not in names]
    else:
        source, more = (
            (DelimitedSource(files, "\t", "", [CRITEO_COLUMNS], BLOCK_BYTES), {})
            if form == "criteo"
            else open_delimited(files, BLOCK_BYTES, label)
        )
        options |= more
        names = list(dict.fromkeys([*source.starts[0].names, *source.partitions.types]))
    if "" in names:
        names = [name for name in names if name]
        options["train"] = (train, "a column has no name, and is left out")
    plan = ReadPlan(
        schema=Schema([Numeric(name=names[0])], "\0"), labels=(), weight=None, conditions={}, masks={}, label_weights={}, keep=tuple(names),
    )  # fmt: skip
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
    strings = frozenset(
        field.name for field in table.schema if columns.is_string(columns.value_type(field.type))
    )
    cells = Cells(table.select(names), is_text=form in ("csv", "criteo"))
    size = sum(file.size for file in files)  # of compressed files, less than their text: there are more rows
    estimated = max(num_rows, round(num_rows / num_bytes * size)) if num_bytes else num_rows
    of_types = frozenset() if form in ("csv", "criteo") else strings
    return Sample(cells.table, options | cells.data, source.num_rows or estimated, cells.features, of_types)


def _files(path: str) -> tuple[str | list[str], tuple[DataFile, ...]]:
    """The files, and what names them in a config: of a directory those of its most frequent ending."""
    if not os.path.isdir(path):
        return path, find_files(path)
    found: dict[str, Counter[str]] = {}
    for _, _, names in os.walk(path):
        for name in names:
            if ending := _ending(name):
                found.setdefault(ending, Counter())[name[name.rindex(ending) :]] += 1  # compression included
    most = max(found, key=lambda ending: found[ending].total(), default=".parquet")
    if most == ".parquet":
        return path, find_files(path, suffix=most)
    patterns = [f"{path.rstrip('/')}/**/*{ending}" for ending in sorted(found[most])]
    return patterns[0] if len(patterns) == 1 else patterns, find_files(patterns)


def _ending(name: str) -> str | None:
    """The ending that tells a file's format, compression left out."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    ending = os.path.splitext(name)[1]
    return ending if ending in _ENDINGS else None


def _format(files: tuple[DataFile, ...]) -> tuple[str, tuple[DataFile, ...], GuessedOptions]:
    """The format of files, these with their encoding, and the option for that.

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
    """The table of libsvm, or of each field of libffm."""
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
