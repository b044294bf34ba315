"""JSON lines: one object per line, whose keys are columns.

The first lines of all files determine the types of columns, and Arrow reads a block with these types. This fails if a
block does not fit, for example if a column has integers and strings, or a line is not an object. Then girih reads the
block line by line. It finds the bad rows, and gets the same ids and numbers. It also reads messages of a stream line by
line.

Shapes: R rows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from girih.data.formats.text import LineBlock, RowsStart, TextSource, look_at, read_blocks, read_head
from girih.data.from_memory import REFUSED, array_of, preview
from girih.data.paths import DataFile, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import DataError
from girih.kernels.cpu.arrays import I64

_LOOK_LINES = 1000
"""Lines of a file that determine its columns and their types."""
_LOOK_BYTES = 1 << 20
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string(), dict: pa.struct([])}
_LARGE = {pa.int64(): pa.uint64(), pa.list_(pa.int64()): pa.list_(pa.uint64())}
_WIDER = {
    kind: pa.list_(pa.float64()) if pa.types.is_list(kind) else pa.float64()
    for kind in (*_LARGE, *_LARGE.values())
}


class ObjectRows(NamedTuple):
    """Objects as a ``pyarrow.Table`` of R rows, the number of each row, int64[R], and the bad rows."""

    table: pa.Table
    numbers: I64
    bad: list[BadRow]


def objects_to_rows(
    objects: Sequence[tuple[int, bytes]],
    names: Sequence[str],
    plan: ReadPlan,
    noun: str,
    known: Mapping[str, pa.DataType],
) -> ObjectRows:
    """Returns one row per object. A column that an object lacks is missing. An object that cannot be used is a bad row.

    Args:
        objects: the number and the text of each object.
        names: the columns to read.
        noun: the word for an object in errors, such as ``message``.
        known: types of columns. They are needed for columns whose values are all missing here.
    """
    numbers, rows, bad = [], [], []
    for number, text in objects:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            bad.append(BadRow(number, f"not a JSON {noun}", f"not a JSON {noun}: {one_line(error)}"))
            continue
        if not isinstance(row, dict):
            bad.append(BadRow(number, "not a JSON object", f"expected a JSON object, not {preview(row)}"))
            continue
        numbers.append(number)
        rows.append(row)

    def table(rows: Sequence[Mapping[str, object]]) -> pa.Table:
        made = pa.table({name: array_of([row.get(name) for row in rows], plan.null_values) for name in names})
        types = {**known, **dict(zip(names, made.schema.types, strict=True))}
        for place, name in enumerate(names):
            if pa.types.is_null(types[name]) and name in known:
                types[name] = known[name]  # a missing list has no ids, but a missing id is an id
                made = made.set_column(place, name, made[name].cast(known[name]))
        plan.check_types(types, f"the {noun}")
        return made

    try:
        made = table(rows)
    except (DataError, *REFUSED):  # some value has a type that its column does not take: find the row
        good = []
        for place, row in enumerate(rows):
            try:
                table([row])
                good.append(place)
            except (DataError, *REFUSED) as error:
                bad.append(BadRow(numbers[place], "a value of another type", one_line(error)))
        numbers, rows = [numbers[place] for place in good], [rows[place] for place in good]
        made = table(rows)
    return ObjectRows(made, np.array(numbers, np.int64), bad)


class JsonlSource(TextSource):
    """Files of JSON objects, one per line.

    Args:
        null_values: texts that do not determine the type of a column.

    Raises:
        DataError: a file that is empty, damaged, or has no object in its first lines.
    """

    kind = "jsonl"

    def __init__(
        self, files: tuple[DataFile, ...], block_bytes: int, null_values: Collection[str] = ()
    ) -> None:
        self._types: dict[str, pa.DataType] = {}
        self._null_values = frozenset(null_values)
        starts = []
        for file in files:
            head = read_head(file)
            rows = list(_first_objects(file, head.byte, head.number))
            for name, value in itertools.chain.from_iterable(row.items() for row in rows):
                self._learn(name, value)
            starts.append(RowsStart(head.byte, head.number, list(dict.fromkeys(itertools.chain(*rows)))))
        super().__init__(files, starts, block_bytes)

    def check(self, plan: ReadPlan) -> None:
        """Refuses files if all their first lines lack a column, or if a column has an unusable type."""
        super().check(plan)
        plan.check_types(self.partitions.types | self._types_of(plan), self.files[0].address)

    def unit(self, number: int, block: LineBlock, plan: ReadPlan, after: Cursor) -> Unit:
        """Reads a block. Lines that are not objects, or hold values of another type, are bad rows."""
        address, names = self.files[number].address, self.own_columns(plan, number)
        table = self._by_arrow(block, names, plan)
        if table is not None and table.num_rows == block.num_lines:  # no blank lines
            numbers = range(block.line, block.line + block.num_lines)
            return Unit(table, address, after, numbers, place="line")
        lines = enumerate(block.data.split(b"\n"), block.line)
        filled = [(number, line) for number, line in lines if line.strip()]
        if table is not None and table.num_rows == len(filled):
            return Unit(table, address, after, np.array([number for number, _ in filled]), place="line")
        rows = objects_to_rows(filled, names, plan, "line", self.partitions.types | self._types_of(plan))
        return Unit(rows.table, address, after, rows.numbers, place="line", bad=rows.bad)

    def _by_arrow(self, block: LineBlock, names: list[str], plan: ReadPlan) -> pa.Table | None:
        """Reads the columns of a block with the known types. Returns None if the block does not fit them."""
        types = self._types_of(plan)
        try:
            return pajson.read_json(
                pa.BufferReader(block.data),
                read_options=pajson.ReadOptions(use_threads=False, block_size=max(len(block.data) + 1, 64)),
                parse_options=pajson.ParseOptions(
                    explicit_schema=pa.schema([(name, types[name]) for name in names]),
                    unexpected_field_behavior="ignore",
                ),
            ).select(names)
        except pa.ArrowException:
            return None

    def _types_of(self, plan: ReadPlan) -> dict[str, pa.DataType]:
        """Returns the types of the plan's columns.

        Integers that are only read as numbers become floats, because floats may follow.
        """
        types = {
            name: self._types.get(name, pa.null())
            for name in plan.columns
            if name not in self.partitions.types
        }
        return types | {name: _WIDER.get(types[name], types[name]) for name in plan.numbers if name in types}

    def _learn(self, name: str, value: object) -> None:
        """Learns a column's type from the first value that has a type."""
        for item in value if isinstance(value, list) else [value]:
            kind = _TYPES.get(type(item))
            if kind is not None and not (kind == pa.string() and item in self._null_values):
                known = self._types.setdefault(name, pa.list_(kind) if isinstance(value, list) else kind)
                if isinstance(item, int) and kind == pa.int64() and item >= 1 << 63:
                    self._types[name] = _LARGE.get(known, known)


def _first_objects(file: DataFile, byte: int, line: int) -> Iterator[dict[str, object]]:
    """Yields the objects among the first lines of a file.

    Raises:
        DataError: there is none.
    """
    block = next(read_blocks(file, byte, line, _LOOK_BYTES))
    trouble, found = None, False
    for number, text in enumerate(block.data.split(b"\n")[:_LOOK_LINES], block.line):
        try:
            row = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            trouble = trouble or f"line {number}: not a JSON line: {one_line(error)}"
            continue
        if isinstance(row, dict):
            found = found or bool(row)
            yield row
        else:
            trouble = trouble or f"line {number}: expected a JSON object, not {preview(row)}"
    if not found:
        look = look_at(file) if trouble else None
        mend = (
            "" if look is None or "JSON lines" in look.name else f"; it looks like {look.name}: {look.mend}"
        )
        raise DataError(f"{file.address}, {trouble or 'its first lines have no object with columns'}{mend}")
