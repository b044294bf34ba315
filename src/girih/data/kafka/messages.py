"""Messages to columns: a JSON object is a row, an Arrow IPC stream any number of rows.

Shapes: R rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.paths import one_line
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow
from girih.errors import DataError

_TOP = 1 << 63
_REFUSED = (pa.ArrowException, TypeError, ValueError, OverflowError)


class Message(NamedTuple):
    """A record: its offset in the partition, and its value; None is a tombstone."""

    offset: int
    value: bytes | None


class Rows(NamedTuple):
    """Messages as a ``pyarrow.Table`` of R rows, the offset of each row int64[R], and those that are not rows."""

    table: Any
    offsets: NDArray[np.int64]
    bad: list[BadRow]


def json_rows(messages: Sequence[Message], plan: ReadPlan) -> Rows:
    """One row per message. What a message lacks is missing; whole messages that do not serve are bad."""
    offsets, rows, bad = [], [], []
    for message in messages:
        try:
            row = json.loads(message.value or b"")
        except (ValueError, RecursionError) as error:
            bad.append(_bad(message, "not a JSON message", f"not a JSON message: {one_line(error)}"))
            continue
        if not isinstance(row, dict):
            bad.append(_bad(message, "not a JSON object", f"expected a JSON object, not {_shown(row)}"))
            continue
        offsets.append(message.offset)
        rows.append(row)
    try:
        table = _table(rows, plan)
    except (DataError, *_REFUSED):  # some value has a type that its column does not take: which?
        good = []
        for place, row in enumerate(rows):
            try:
                _table([row], plan)
                good.append(place)
            except (DataError, *_REFUSED) as error:
                text = one_line(error)
                bad.append(BadRow(offsets[place], "a value of another type", text))
        offsets, rows = [offsets[place] for place in good], [rows[place] for place in good]
        table = _table(rows, plan)
    return Rows(table, np.array(offsets, np.int64), bad)


def arrow_rows(messages: Sequence[Message], plan: ReadPlan) -> Rows:
    """The rows of each message's record batches, one below the other."""
    names = list(plan.columns)
    tables: list[Any] = []
    offsets: list[int] = []
    bad = []
    for message in messages:
        try:
            table = pa.ipc.open_stream(message.value or b"").read_all()
            table.validate(full=True)
        except (OSError, *_REFUSED) as error:
            bad.append(_bad(message, "not an Arrow message", f"not an Arrow IPC stream: {one_line(error)}"))
            continue
        try:
            plan.check_names(table.column_names, "the message")
            table = table.select(names).replace_schema_metadata(None)
            if not tables or not table.schema.equals(tables[0].schema):
                plan.check_types(dict(zip(names, table.schema.types, strict=True)), "the message")
                table = table.cast(tables[0].schema) if tables else table
        except (DataError, *_REFUSED) as error:
            bad.append(_bad(message, "other columns", one_line(error)))
            continue
        tables.append(table)
        offsets.append(message.offset)
    counts = [table.num_rows for table in tables]
    whole = pa.concat_tables(tables) if tables else _table([], plan)
    return Rows(whole, np.repeat(np.array(offsets, np.int64), np.array(counts, np.int64)), bad)


DECODE: Mapping[str, Callable[[Sequence[Message], ReadPlan], Rows]] = {
    "json": json_rows,
    "arrow": arrow_rows,
}


def names_in(messages: Sequence[Message]) -> set[str]:
    """The names that JSON messages use."""
    found: set[str] = set()
    for message in messages:
        try:
            row = json.loads(message.value or b"")
        except (ValueError, RecursionError):
            continue
        found.update(row if isinstance(row, dict) else ())
    return found


def _table(rows: Sequence[Mapping[str, Any]], plan: ReadPlan) -> Any:
    names = list(plan.columns)
    table = pa.table({name: _array([row.get(name) for row in rows]) for name in names})
    plan.check_types(dict(zip(names, table.schema.types, strict=True)), "the message")
    return table


def _array(values: list[Any]) -> Any:
    """Values of one column. Where integers and strings meet, all are strings: ids are the same either way."""
    try:
        return pa.array(values)
    except _REFUSED:
        pass
    try:
        return pa.array(values, pa.uint64())  # beyond the largest int64
    except _REFUSED:
        pass
    plain = [value for value in values if value is not None]
    if all(isinstance(value, bool | int | float) for value in plain):
        return pa.array([None if value is None else float(value) for value in values])
    return pa.array([_as_text(value) for value in values])


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        if not -_TOP <= value < 2 * _TOP:
            raise OverflowError(f"{value}: an id is an integer of 64 bits")
        return str(value if value < _TOP else value - 2 * _TOP)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{_shown(value)}: expected an id, an integer or a string")


def _bad(message: Message, reason: str, text: str) -> BadRow:
    if message.value is None:
        return BadRow(message.offset, "no value", "a record without a value; expected a message")
    return BadRow(message.offset, reason, text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
