"""Decodes the columns of one unit into rows, and finds bad rows.

Shapes: R rows, X numeric features, T labels, M values of one feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.batch import NULL_ID
from girih.data.decode import columns, lists, times
from girih.data.decode.batches import BagColumn, DecodedRows
from girih.data.decode.columns import table_without_views
from girih.data.decode.conditions import Flag, Leaf
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import DataError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu.arrays import F32, F64, I64, Bools
from girih.schema import Categorical, Numeric, Sequence

BLOCK_ROWS = 1 << 14
LABEL = "a label in [0, 1]"
_NULL_WORDS = [word.encode() for word in columns.NULL_WORDS]
NUMBER = "a label that is a finite number"


def decode(unit: Unit, plan: ReadPlan, buffers: Buffers) -> tuple[DecodedRows, list[BadRow]]:
    """Decodes the rows of a unit that meet the plan's condition. Also returns the bad rows, in order."""
    reader = _ColumnReader(chosen(unit, plan), plan)
    labels = [reader.label(name) for name in plan.labels]
    are_weighted = labels and plan.schema.labels.are_weighted
    rows = DecodedRows(
        bags=[reader.bags(feature) for feature in plan.schema.sparse],
        numeric=reader.side_by_side([reader.numeric(feature) for feature in plan.schema.numeric], buffers),
        labels=reader.side_by_side([values for values, _ in labels], buffers),
        example_weights=reader.example_weights(plan.weight) if plan.weight else None,
        label_weights=reader.side_by_side([own for _, own in labels], buffers) if are_weighted else None,
        kept=reader.kept() if plan.keep else None,
    )
    rows.good, bad = reader.bad_rows()
    return rows, bad


def chosen(unit: Unit, plan: ReadPlan) -> Unit:
    """Returns the rows of a unit that meet the plan's condition, with null for texts that mean a missing value."""
    if plan.null_values:
        arrays = (columns.without_texts(columns.flat(each), plan.null_values) for each in unit.table.columns)
        unit = replace(unit, table=pa.table(list(arrays), unit.table.column_names))
    if plan.where is None:
        return unit
    try:
        kept = plan.where.keep(lambda name: columns.flat(unit.table.column(name)), plan.notation)
    except DataError as error:
        raise DataError(f"{unit.file}{unit.suffix}: {error}") from None
    if kept.all():
        return unit
    table = table_without_views(unit.table).filter(pa.array(kept))
    return replace(unit, table=table, numbers=np.asarray(unit.numbers)[kept])


class _ColumnReader:
    """Reads the columns of one unit, and notes rows with unusable values."""

    def __init__(self, unit: Unit, plan: ReadPlan) -> None:
        self._unit = unit
        self._plan = plan
        self._columns = dict(zip(unit.table.column_names, unit.table.columns, strict=True))
        self._mismatches: list[tuple[I64, str, str]] = []

    def bags(self, feature: Categorical | Sequence) -> BagColumn:
        """Returns the ids and weights of a feature, cut to its maximum length."""
        if isinstance(feature, Categorical) and feature.bucketize:
            return BagColumn(self._buckets(feature.source, feature.bucketize))
        if isinstance(feature, Categorical) and feature.transform:
            ids, null = self._part_of_time(feature)
            return BagColumn(ids if null is None else np.where(null, NULL_ID, ids))
        values, offsets = self._pieces(feature, feature.source)
        weights = None
        if isinstance(feature, Categorical) and feature.weight_separator:
            values, weights, good = lists.ids_and_weights(
                values, feature.weight_separator, self._plan.notation
            )
            self._expect_each(good, feature.source, offsets, f"id{feature.weight_separator}weight")
        if feature.float_ids:
            ids, good = lists.ids_of_floats(values)
            self._expect_each(good, feature.source, offsets, "ids that are whole numbers below 2⁵³")
        else:
            ids, floats = columns.scalar_ids(values)
            if self._unit.is_text and floats is not None and floats.any():
                expected = "an id, not a float: write 7 for 7.0 (in pandas, astype('Int64')), set float_ids = true, or bucketize"
                self._expect_each(~floats, feature.source, offsets, expected)
        if isinstance(feature, Categorical) and feature.weights:
            weights = self._weights(feature, feature.weights, BagColumn(ids, offsets).bounds())
        if weights is not None and (weights == 1.0).all():
            weights = None
        bags = BagColumn(ids, offsets, weights)
        if feature.padding_id is not None:
            bags = lists.without_padding(bags, feature.padding_id)
        if feature.max_length and bags.offsets is not None:
            ids, short = columns.keep_last(bags.ids, bags.offsets, feature.max_length)
            if bags.weights is not None:
                weights, _ = columns.keep_last(bags.weights, bags.offsets, feature.max_length)
            return BagColumn(ids, short, weights)
        return bags

    def _pieces(self, feature: Categorical | Sequence, column: str) -> tuple[pa.Array, I64 | None]:
        """Returns M values of a feature's bags, and their offsets int64[R+1], or None if each row is one value."""
        array, offsets = self._column(column), None
        if feature.list_format:
            values, offsets, good = lists.in_brackets(array)
            self._expect(good, column, "a list in brackets, as [1, 2] or ['a', 'b']")
        else:
            values, offsets = columns.pieces(array, feature.separator)
        if offsets is not None and self._plan.null_values:
            values = columns.without_texts(values, self._plan.null_values)
        return values, offsets

    def _expect_each(self, good: Bools, column: str, offsets: I64 | None, expected: str) -> None:
        """Marks rows as bad if one of their values is not good. ``good`` is bool[M]."""
        if good.all():
            return
        values = np.flatnonzero(~good)
        rows = np.ones(self._unit.table.num_rows, dtype=np.bool_)
        rows[values if offsets is None else np.searchsorted(offsets, values, side="right") - 1] = False
        self._expect(rows, column, expected)

    def _buckets(self, column: str, boundaries: tuple[float, ...]) -> I64:
        values, null = self._finite(column)
        ids = np.searchsorted(np.array(boundaries), values, side="right").astype(np.int64, copy=False)
        return ids if null is None else np.where(null, NULL_ID, ids)

    def _weights(self, feature: Categorical, column: str, bounds: I64) -> F32:
        """Returns float32[M], one weight per id. Rows whose weights do not match their ids are bad."""
        values, offsets = self._pieces(feature, column)
        weights = _narrow(columns.numbers(values, self._plan.notation)[0])
        num_rows = len(bounds) - 1
        lengths = np.ones(num_rows, np.int64) if offsets is None else np.diff(offsets)
        good = np.ones(num_rows, dtype=np.bool_)
        good[np.repeat(np.arange(num_rows), lengths)[~np.isfinite(weights)]] = False
        self._expect(good, column, "finite numbers as weights")
        wanted = np.diff(bounds)
        agree = lengths == wanted
        if agree.all():
            return weights
        self._expect(agree, column, f"as many weights as {feature.source!r} has ids")
        aligned = np.ones(bounds[-1], dtype=np.float32)
        aligned[np.repeat(agree, wanted)] = weights[np.repeat(agree, lengths)]
        return aligned

    def numeric(self, feature: Numeric) -> F32:
        """Returns float32[R], transformed. Null becomes 0, or NaN if the feature is standardized later."""
        log1p = "log1p" in feature.transform
        if feature.part_of_time:
            values, null = self._part_of_time(feature)
        else:
            values, null = self._finite(feature.source, keep_float32=not log1p)
        if log1p:
            values = np.log1p(np.maximum(values, 0.0))
        narrow = _narrow(values)
        if narrow is not values:
            self._expect(~np.isinf(narrow), feature.source, "a number that float32 can hold")
        if null is None:
            return narrow
        return np.where(null, np.float32(np.nan if "standardize" in feature.transform else 0.0), narrow)

    def _part_of_time(self, feature: Categorical | Numeric) -> tuple[NDArray[Any], Bools | None]:
        """Returns the hour or the weekday, int64[R], and bool[R] that marks missing values."""
        unit = feature.time_unit or "s"
        array = self._column(feature.source)
        values, null, good = times.part_of_time(array, feature.part_of_time or "hour", unit)
        mend = "" if feature.time_unit else "; time_unit = 'ms' sets another unit"
        self._expect(
            good, feature.source, f"a time before 2200, as '2024-05-01 12:30:00' or {unit} since 1970{mend}"
        )
        return values, null

    def label(self, name: str) -> tuple[F32, F32]:
        """Returns the values and the weights of a label, float32[R] each.

        If a label does not count for a row, both are 0.

        A value is in [0, 1]. The value of a derived label is 1 if its condition holds. If the loss allows it, a value
        is any number.
        """
        plan, options = self._plan, self._plan.schema.labels
        counts = np.ones(self._unit.table.num_rows, np.bool_)
        may_be_absent = options.missing == "skip"
        if name in plan.masks:
            expected = "0 or 1 in a mask" if isinstance(plan.masks[name], Flag) else "a value for the mask"
            counts, _ = self._holds(plan.masks[name], counts, expected, may_be_absent=may_be_absent)
        if name in plan.conditions:
            condition = plan.conditions[name]
            kind = "value" if condition.on_strings else "number"
            expected = f"a {kind} to derive the label from"
            holds, absent = self._holds(condition, counts, expected, may_be_absent=may_be_absent)
            values = holds.astype(np.float32)
        else:
            wide, absent = self._numbers(name)
            values = _narrow(wide)
            if options.loss.get(name, "bce") == "bce":
                good, expected = (wide >= 0.0) & (wide <= 1.0), LABEL
            else:
                good, expected = np.isfinite(values), NUMBER
            self._expect(good | ~counts | (absent & may_be_absent), name, expected)
        if not counts.all() or absent.any():
            counts = counts & ~absent
            values = np.where(counts, values, np.float32(0))
        if name not in plan.label_weights:
            return values, counts.astype(np.float32)
        weights = self.example_weights(plan.label_weights[name], counts)
        return values, np.where(counts, weights, np.float32(0))

    def _numbers(self, column: str) -> tuple[F64, Bools]:
        """Returns a column as float64[R], NaN if there is no number, and bool[R] that marks missing values.

        A NaN that is spelled out counts as missing.
        """
        values, null = columns.numbers(self._column(column), self._plan.notation)
        absent = np.isnan(values)
        if columns.is_string(self._column(column).type):
            for row in np.flatnonzero(absent if null is None else absent & ~null):
                absent[row] = not self._is_word(column, int(row))
        return values, absent

    def _holds(
        self, condition: Leaf, looked_at: Bools, expected: str, *, may_be_absent: bool
    ) -> tuple[Bools, Bools]:
        """Returns whether a condition holds, bool[R], and whether its value is missing, bool[R].

        Rows outside ``looked_at`` are never bad.
        """
        column = condition.column
        array = columns.plain(self._column(column))
        absent = np.zeros(len(array), np.bool_)
        good = ~absent
        if condition.on_strings:
            null = columns.null_mask(array)
            absent = absent if null is None else null
        elif columns.kind_of(array.type) != "integers" or array.null_count:  # integers stay exact beyond 2⁵³
            values, absent = self._numbers(column)
            array, good = pa.array(values), ~np.isnan(values) | absent
        holds = condition.holds(array) & ~absent
        if isinstance(condition, Flag):
            good = holds | (columns.numbers(array)[0] == 0) | absent
        self._expect((good & (~absent | may_be_absent)) | ~looked_at, column, expected)
        return holds, absent

    def example_weights(self, column: str, looked_at: Bools | None = None) -> F32:
        """Returns weights as float32[R]. Each weight within ``looked_at`` is finite and not negative."""
        weights = _narrow(columns.numbers(self._column(column), self._plan.notation)[0])
        good = np.isfinite(weights) & (weights >= 0.0)
        self._expect(good if looked_at is None else good | ~looked_at, column, "a finite weight ≥ 0")
        return weights

    def kept(self) -> pa.Table:
        """Returns the columns that are kept unchanged. Columns of text files are strings."""
        if not self._unit.is_text:
            return table_without_views(self._unit.table.select(self._plan.keep)).combine_chunks()
        return pa.table({name: self._text(name) for name in self._plan.keep})

    def _text(self, name: str) -> pa.Array:
        array = self._column(name)
        if not columns.is_string(array.type):
            return array
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid:
            words = array.fill_null(b"").to_pylist()
            text = [word.decode("utf-8", "replace") for word in words]
            good = [word == read.encode() for word, read in zip(words, text, strict=True)]
            self._expect(np.array(good), name, "UTF-8 text, or another data.encoding, such as 'cp1252'")
            return pa.array([read or None for read in text], type=pa.string())

    def side_by_side(self, parts: list[F32], buffers: Buffers) -> F32:
        """Puts columns of float32[R] side by side, in blocks of rows that stay in cache: float32[R, ·]."""
        if len(parts) == 1:
            return parts[0][:, None]
        num_rows = self._unit.table.num_rows
        matrix = buffers.take(np.float32, num_rows, len(parts))
        for start in range(0, num_rows if parts else 0, BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            for place, part in enumerate(parts):
                matrix[block, place] = part[block]
        return matrix

    def bad_rows(self) -> tuple[Bools | None, list[BadRow]]:
        """Returns bool[R] that marks usable rows, None if all are usable, and all bad rows of the unit."""
        if not self._mismatches:
            return None, sorted(self._unit.bad)
        unit, bad = self._unit, list(self._unit.bad)
        good = np.ones(unit.table.num_rows, dtype=np.bool_)
        for rows, column, expected in self._mismatches:
            told = rows[good[rows]]
            for row in told[: 1 if self._plan.until_bad else None].tolist():
                reason = f"column {column!r}: expected {expected}"
                message = f"column {column!r} {self._shown(column, row)}: expected {expected}"
                if expected == LABEL and not self._is_nothing(column, row):
                    is_low = "-" in self._shown(column, row)
                    test = "== 'yes'" if self._is_word(column, row) else "> 0" if is_low else "> 1"
                    message += f'; derive it, as in derive = {{ {column} = "{column} {test}" }}'
                if expected in (LABEL, NUMBER) and self._is_nothing(column, row):
                    message += "; if labels may be missing, set labels.missing = 'skip'"
                if (word := self._value(column, row)) in _NULL_WORDS:
                    message += f"; null_values = [{word.decode()!r}] makes it missing"
                bad.append(BadRow(int(unit.numbers[row]), reason, message))
            good[rows] = False
        return good, sorted(bad)

    def _value(self, column: str, row: int) -> Any:
        return self._unit.table.column(column)[row].as_py()

    def _is_word(self, column: str, row: int) -> bool:
        value = self._value(column, row)
        return isinstance(value, bytes) and columns.number_of(value.strip()) is None

    def _is_nothing(self, column: str, row: int) -> bool:
        value = self._value(column, row)
        return value is None or value != value or value == b""

    def _shown(self, column: str, row: int) -> str:
        value = self._value(column, row)
        if value is None:
            return "is missing"
        text = repr(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)
        return f"= {text if len(text) <= 60 else text[:57] + '...'}"

    def _expect(self, good: Bools, column: str, expected: str) -> None:
        """Marks the rows that are not good as bad. ``expected`` describes a valid value of the ``column``."""
        if not good.all():
            self._mismatches.append((np.flatnonzero(~good), column, expected))

    def _finite(self, column: str, *, keep_float32: bool = False) -> tuple[NDArray[Any], Bools | None]:
        values, null = columns.numbers(self._column(column), self._plan.notation, keep_float32=keep_float32)
        finite = np.isfinite(values)
        self._expect(finite if null is None else finite | null, column, "a finite number")
        return values, null

    def _column(self, name: str) -> pa.Array:
        return columns.flat(self._columns[name])


def _narrow(values: NDArray[Any]) -> F32:
    with np.errstate(over="ignore"):  # a number that is too large becomes inf, and a later check finds it
        return values.astype(np.float32, copy=False)
