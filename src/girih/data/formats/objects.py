"""JSON objects to columns, an object a row: messages, and lines that Arrow's own reader has no types for.

Shapes: R rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.paths import one_line
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow
from girih.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_TOP = 1 << 63
REFUSED = (pa.ArrowException, TypeError, ValueError, OverflowError)


class ObjectRows(NamedTuple):
    """Objects as a ``pyarrow.Table`` of R rows, the number of each row int64[R], and those that are not rows."""

    table: pa.Table
    numbers: NDArray[np.int64]
    bad: list[BadRow]


def objects_to_rows(
    objects: Sequence[tuple[int, bytes]],
    names: Sequence[str],
    plan: ReadPlan,
    noun: str,
    known: Mapping[str, pa.DataType],
) -> ObjectRows:
    """One row per object. What an object lacks is missing; whole objects that do not serve are bad.

    Args:
        objects: the number and the text of each.
        names: the columns to read.
        noun: an object's word in errors, as ``message``.
        known: types of columns that come from elsewhere, or are all missing here.
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
                types[name] = known[name]  # a list that is missing has no ids, an id that is missing is one
                made = made.set_column(place, name, made[name].cast(known[name]))
        plan.check_types(types, f"the {noun}")
        return made

    try:
        made = table(rows)
    except (DataError, *REFUSED):  # some value has a type that its column does not take: which?
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


def preview(value: object) -> str:
    """A value in words, as much of it as a line has room for."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def array_of(
    values: Sequence[object] | NDArray[Any], null_values: Sequence[str] = ()
) -> pa.Array | pa.ChunkedArray:
    """Build the Arrow array of a column's Python values: numbers, strings, lists of these, or None, which ``null_values`` mean too.

    Integers from -2**63 to 2**64 - 1 that share no Arrow type, with each other or with strings, become strings. Their ids stay the same.

    Raises:
        OverflowError: an integer of more than 64 bits. TypeError, ValueError, pyarrow.ArrowException: no common type.
    """
    if null_values:
        values = [None if isinstance(value, str) and value in null_values else value for value in values]
    for kind in (None, pa.uint64()):  # the second is for integers above the largest int64
        try:
            return pa.array(values, kind)
        except REFUSED:
            continue
    numbers = [value for value in values if value is None or isinstance(value, int | float)]
    plain = [value for value in numbers if value is not None]
    are_integers = all(isinstance(value, int) for value in plain)
    if len(numbers) == len(values) and not (are_integers and _TOP <= max(plain) < 2 * _TOP):
        return pa.array([None if value is None else float(value) for value in numbers])
    return pa.array([_as_text(value) for value in values])


def table_of_stream(data: object, null_values: Sequence[str] = ()) -> pa.Table:
    """The ``pyarrow.Table`` of an object with ``__arrow_c_stream__``.

    Object columns of a pandas DataFrame may hold integers above the largest int64, which Arrow refuses by itself.

    Raises:
        OverflowError, TypeError, ValueError, pyarrow.ArrowException: a column has no common type.
    """
    try:
        return pa.table(data)
    except REFUSED:
        if type(data).__module__.partition(".")[0] != "pandas":
            raise
        frame: pd.DataFrame = data
        return pa.table({str(name): array_of(frame[name].tolist(), null_values) for name in frame.columns})


def _as_text(value: object) -> object:
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | np.integer):
        if not -_TOP <= value < 2 * _TOP:
            raise OverflowError(f"{value}: an id is an integer from -2**63 to 2**64 - 1")
        return str(value)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{preview(value)}: expected an id, an integer or a string")
