"""Converts examples of a program (columns, rows, a DataFrame, Arrow) to a ``pyarrow.Table`` for a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.decode.columns import is_list, value_type
from girih.data.paths import one_line
from girih.errors import DataError, kind_of
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence

if TYPE_CHECKING:
    import pandas as pd

_TOP = 1 << 63
REFUSED = (pa.ArrowException, TypeError, ValueError, OverflowError)
EXPECTED = "expected a dict of columns, a list of dicts, a pandas DataFrame, or anything with Arrow's C stream interface"


def as_table(data: object, columns: Seq[str] | None = None, null_values: Seq[str] = ()) -> pa.Table:
    """Returns a ``pyarrow.Table`` of some data.

    Args:
        data: a dict of columns (lists or arrays), or of the values of one example; a list of dicts, one per example; a
            row of a pandas DataFrame; or anything with Arrow's C stream interface, such as a ``pyarrow.Table``, or a
            DataFrame of pandas or polars.
        columns: the columns to take from dicts, if they exist; None takes all.
        null_values: texts that mean a missing value.

    Raises:
        DataError: other data, columns of different lengths, or values that have no common type; names the column.
    """
    if isinstance(data, Mapping):
        return _of_columns(data, columns, null_values)
    if _is_series_of_pandas(data):
        return _of_series(data, columns, null_values)
    if hasattr(data, "__arrow_c_stream__"):
        try:
            return table_of_stream(data, null_values)
        except REFUSED as error:
            raise DataError(
                f"data: Arrow cannot take this {type(data).__name__}: {one_line(error)}"
            ) from None
    if isinstance(data, Seq) and not isinstance(data, str | bytes):
        for number, row in enumerate(data):
            if not isinstance(row, Mapping):
                raise DataError(f"data: item {number} is {kind_of(row)}; {EXPECTED}")
        return _of_rows(data, columns, null_values)
    raise DataError(f"data: received an object of type {type(data).__name__}; {EXPECTED}")


def columns_as_given(schema: Schema, table: pa.Table) -> Schema:
    """Adapts the schema to the table's columns: lists need no separator."""
    types = dict(zip(table.schema.names, table.schema.types, strict=True))

    def of(feature: Feature) -> Feature:
        if isinstance(feature, Numeric) or not feature.is_split or feature.source not in types:
            return feature
        no_text = is_list(types[feature.source])
        return replace(feature, separator=None, list_format=None) if no_text else feature

    features = [of(feature) for feature in schema.features]
    return Schema(features, schema.labels, schema.tables, null_values=schema.null_values)


def check_sequences(schema: Schema, table: pa.Table) -> None:
    """Refuses a single value per example for a sequence, which needs a list.

    Raises:
        DataError: text, or another single value, for a sequence whose text is not split.
    """
    for feature in schema.sparse:
        if not isinstance(feature, Sequence) or feature.is_split or feature.source not in table.column_names:
            continue
        column = table[feature.source]
        if not (is_list(value_type(column.type)) or pa.types.is_null(column.type)):
            shown = next((value.as_py() for value in column if value.is_valid), None)
            raise DataError(
                f"data: column {feature.source!r} = {shown!r}: feature {feature.name!r} is a sequence; expected a list of ids for each"
                " example, as [1, 2]"
            )


def columns_of(schema: Schema) -> list[str]:
    """Returns the columns that features read, weights included."""
    names = [feature.source for feature in schema.features]
    names += [f.weights for f in schema.features if isinstance(f, Categorical) and f.weights]
    return list(dict.fromkeys(names))


def _of_columns(data: Mapping[str, object], columns: Seq[str] | None, null_values: Seq[str]) -> pa.Table:
    taken = {name: value for name, value in data.items() if columns is None or name in columns}
    if data and not taken:
        raise _unknown(data, columns)
    if any(_is_scalar(value) for value in taken.values()):  # one example, whose bags may be lists
        return _of_rows([taken], columns, null_values)
    arrays = {str(name): _array(str(name), value, null_values) for name, value in taken.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        (first, rows), *others = lengths.items()
        other, differing = next((name, length) for name, length in others if length != rows)
        raise DataError(
            f"data: column {other!r} has {differing} values, {first!r} has {rows}; all columns need the same number"
        )
    return pa.table(arrays)


def _of_rows(rows: Seq[Mapping[str, object]], columns: Seq[str] | None, null_values: Seq[str]) -> pa.Table:
    present = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in present if columns is None or name in columns]
    if rows and not names:
        raise _unknown(present, columns)
    if not rows and columns is not None:
        return pa.table({name: pa.nulls(0) for name in columns})
    return pa.table({str(n): _array(str(n), [row.get(n) for row in rows], null_values) for n in names})


def _unknown(received: Iterable[object], columns: Seq[str] | None) -> DataError:
    names, known = list(map(str, received)), list(columns or ())
    return DataError(f"data: no feature reads the columns {names[:10]}; expected {known[:10]}")


def _array(
    name: str, values: Seq[object] | NDArray[Any] | pa.Array | pa.ChunkedArray, null_values: Seq[str]
) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    try:
        return array_of(values, null_values)
    except REFUSED as error:
        raise DataError(f"data: column {name!r} cannot be an Arrow column: {one_line(error)}") from None


def _of_series(data: pd.Series, columns: Seq[str] | None, null_values: Seq[str]) -> pa.Table:
    """Converts a row of a pandas DataFrame.

    pandas gives its values one number type, so ids next to floats are no longer ids.
    """
    if columns is not None and not set(columns) & set(data.index):
        raise DataError(f"data: a Series whose index names no feature, as {list(data.index[:3])}; {EXPECTED}")
    if data.dtype.kind == "f":
        raise DataError(
            "data: a Series of floats, whose ids are no longer integers; take a row by df.iloc[[i]]"
        )
    values = {name: None if _is_missing(value) else value for name, value in data.items()}
    return _of_columns(values, columns, null_values)


def _is_missing(value: object) -> bool:
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NaTType", "NAType")


def _is_series_of_pandas(data: object) -> bool:
    return type(data).__name__ == "Series" and type(data).__module__.partition(".")[0] == "pandas"


def _is_scalar(value: object) -> bool:
    """Returns whether a value is single. Columns have a length."""
    return (
        isinstance(value, str | bytes) or not hasattr(value, "__len__") or getattr(value, "shape", None) == ()
    )


def preview(value: object) -> str:
    """Returns a value in words, shortened to fit on a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def array_of(values: Seq[object] | NDArray[Any], null_values: Seq[str] = ()) -> pa.Array | pa.ChunkedArray:
    """Builds the Arrow array of a column's Python values: numbers, strings, lists of these, or None.

    Texts in ``null_values`` also become None. Integers from -2**63 to 2**64 - 1 that share no Arrow type, with each
    other or with strings, become strings. Their ids stay the same.

    Raises:
        OverflowError: an integer of more than 64 bits. TypeError, ValueError, pyarrow.ArrowException: no common type.
    """
    if null_values:
        values = [None if isinstance(value, str) and value in null_values else value for value in values]
    for kind in (None, pa.uint64()):  # uint64 is for integers above the largest int64
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


def table_of_stream(data: object, null_values: Seq[str] = ()) -> pa.Table:
    """Returns the ``pyarrow.Table`` of an object with ``__arrow_c_stream__``.

    Object columns of a pandas DataFrame may hold integers above the largest int64, which Arrow alone refuses.

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
