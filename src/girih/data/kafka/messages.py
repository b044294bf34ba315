"""Messages to columns: a JSON object is a row, an Arrow IPC stream any number of rows.

Shapes: R rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from girih.data.formats.objects import REFUSED, ObjectRows, objects_to_rows
from girih.data.paths import one_line
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow
from girih.errors import DataError


class Message(NamedTuple):
    """A record: its offset in the partition, and its value; None is a tombstone."""

    offset: int
    value: bytes | None


def json_rows(messages: Sequence[Message], plan: ReadPlan) -> ObjectRows:
    """One row per message. What a message lacks is missing; whole messages that do not serve are bad."""
    empty = [_bad(message, "", "") for message in messages if message.value is None]
    objects = [(message.offset, message.value) for message in messages if message.value is not None]
    rows = objects_to_rows(objects, list(plan.columns), plan, "message", {})
    return rows._replace(bad=sorted([*rows.bad, *empty]))


def arrow_rows(messages: Sequence[Message], plan: ReadPlan) -> ObjectRows:
    """The rows of each message's record batches, one below the other."""
    names = list(plan.columns)
    tables: list[Any] = []
    offsets: list[int] = []
    bad = []
    for message in messages:
        try:
            table = pa.ipc.open_stream(message.value or b"").read_all()
            table.validate(full=True)
        except (OSError, *REFUSED) as error:
            bad.append(_bad(message, "not an Arrow message", f"not an Arrow IPC stream: {one_line(error)}"))
            continue
        try:
            plan.check_names(table.column_names, "the message")
            table = table.select(names).replace_schema_metadata(None)
            if not tables or not table.schema.equals(tables[0].schema):
                plan.check_types(dict(zip(names, table.schema.types, strict=True)), "the message")
                table = table.cast(tables[0].schema) if tables else table
        except (DataError, *REFUSED) as error:
            bad.append(_bad(message, "other columns", one_line(error)))
            continue
        tables.append(table)
        offsets.append(message.offset)
    counts = [table.num_rows for table in tables]
    whole = pa.concat_tables(tables) if tables else pa.table({name: pa.nulls(0) for name in names})
    return ObjectRows(whole, np.repeat(np.array(offsets, np.int64), np.array(counts, np.int64)), bad)


DECODE: Mapping[str, Callable[[Sequence[Message], ReadPlan], ObjectRows]] = {
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


def _bad(message: Message, reason: str, text: str) -> BadRow:
    if message.value is None:
        return BadRow(message.offset, "no value", "a record without a value; expected a message")
    return BadRow(message.offset, reason, text)
