"""Some rows of some data, as Arrow columns of any format; of text, what its cells seem to be.

Shapes: R rows.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, times
from girih.data.formats.delimited import DelimitedSource
from girih.data.formats.jsonl import JsonlSource
from girih.data.formats.parquet import ParquetSource
from girih.data.formats.recognizing import HEAD_BYTES, PARQUET, begins_with, format_of, separator_of
from girih.data.formats.text import SUFFIXES, read_head
from girih.data.paths import File, find_files
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.readers import CRITEO_COLUMNS
from girih.errors import ConfigError, DataError
from girih.schema import Numeric, Schema

ROWS = 100_000
PARTS = 4
BLOCK_BYTES = 4 << 20
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
    """

    table: Any
    options: dict[str, tuple[Any, str]]
    num_rows: int


def take_sample(paths: Sequence[str]) -> Sample:
    """Reads some rows from up to four places of the data.

    Raises:
        MissingFileError, DataError: nothing there, or nothing that can be read.
        ConfigError: a format that names no columns.
    """
    train, files = _files(paths[0]) if len(paths) == 1 else (list(paths), find_files(list(paths)))
    form = _format(files[0])
    options: dict[str, tuple[Any, str]] = {
        "format": (form, "by the file's name" if _ending(files[0].path) else "by its first line")
    }
    source: Any
    if form == "parquet":
        source = ParquetSource(files)
        names = list(dict.fromkeys([*source.column_names, *source.partitions.types]))
    elif form == "jsonl":
        source = JsonlSource(files, BLOCK_BYTES)
        names = list(dict.fromkeys(name for start in source.starts for name in start.names))
        names += [name for name in source.partitions.types if name not in names]
    else:
        source, more = _delimited(files, form)
        options |= more
        names = list(dict.fromkeys([*source.starts[0].names, *source.partitions.types]))
    options["train"] = (train, "")
    plan = ReadPlan(
        schema=Schema([Numeric(name=names[0])], "\0"), labels=(), weight=None, conditions={}, masks={}, label_weights={}, keep=tuple(names),
    )  # fmt: skip
    tables, num_rows, num_bytes = [], 0, 0
    parts = sorted({place * (source.num_parts - 1) // (PARTS - 1) for place in range(PARTS)})
    for part in parts:
        unit = next(source.read(plan, np.array([part]), Cursor()), None)
        if unit is not None and unit.table.num_rows:
            num_rows, num_bytes = num_rows + unit.table.num_rows, num_bytes + unit.after.byte
            tables.append(unit.table.select(names).slice(0, ROWS // len(parts)))
    if not tables:
        raise DataError(f"{files[0].address}: no rows that can be read")
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    read = {name: typed(columns.flat(table[name])) for name in names}
    size = sum(file.size for file in files)  # of compressed files, less than their text: there are more rows
    estimated = max(num_rows, round(num_rows / num_bytes * size)) if num_bytes else num_rows
    return Sample(pa.table(read), options, source.num_rows or estimated)


def typed(array: Any) -> Any:
    """A column; cells of text, and strings that all are such, as integers, floats or times."""
    array = columns.plain(array)
    if not columns.is_string(array.type) or array.null_count == len(array):
        return array
    words = columns.string_values(array)
    for kind in (pa.int64(), pa.uint64(), pa.float64()):
        try:
            return pc.ascii_trim_whitespace(words.cast(pa.large_string())).cast(kind)
        except pa.ArrowInvalid:
            continue
    found, read = times.text_times(words)
    if read.all() and pc.min(pc.binary_length(words)).as_py() >= len("2024-05-01"):
        return pa.array(found, mask=columns.null_mask(array)).cast(pa.timestamp("us"))
    return words.cast(pa.large_string(), safe=False)


def _files(path: str) -> tuple[str | list[str], tuple[File, ...]]:
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


def _format(file: File) -> str:
    ending = _ending(file.path)
    if ending and _ENDINGS[ending] != "csv":
        return _ENDINGS[ending]
    with file.open() as opened:
        if begins_with(PARQUET, opened.read(HEAD_BYTES)):
            return "parquet"
    line = read_head(file).line
    form = format_of(line)
    if form == "libsvm":
        raise ConfigError(
            f"{file.address}: is libsvm, whose columns have no names to guess by; write a [[features]] for each pair of a line by hand"
        )
    return form


def _delimited(files: tuple[File, ...], form: str) -> tuple[DelimitedSource, dict[str, tuple[Any, str]]]:
    """The source of text files of cells, and how they are to be read."""
    if form == "criteo":
        return DelimitedSource(files, "\t", "", [CRITEO_COLUMNS], BLOCK_BYTES), {}
    line = read_head(files[0]).line.decode("utf-8", "replace")
    separator = separator_of(line)
    cells = next(csv.reader([line], delimiter=separator))
    options: dict[str, tuple[Any, str]] = {}
    if separator != ",":
        options["separator"] = (separator, f"{len(cells)} cells in the first line")
    lists = None
    if any(columns.number_of(cell.strip().encode()) is not None for cell in cells) or len(set(cells)) < len(
        cells
    ):
        lists = [tuple(f"column{place}" for place in range(1, len(cells) + 1))]
        options["columns"] = (
            list(lists[0]),
            "the first line holds values, not names: give columns their own",
        )
    return DelimitedSource(files, separator, '"', lists, BLOCK_BYTES), options
