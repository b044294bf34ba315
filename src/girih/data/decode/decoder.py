"""One unit of columns to decoded rows, bad rows found on the way.

Shapes: R rows, X numeric features, T labels, M values of one feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.decode import columns
from girih.data.decode.conditions import Condition
from girih.data.decode.rows import Bags, DecodedRows
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Findings, Unit
from girih.errors import DataError
from girih.kernels.buffers import Buffers
from girih.schema import Categorical, Numeric, Sequence

BLOCK_ROWS = 1 << 14


def decode(unit: Unit, plan: ReadPlan, buffers: Buffers) -> tuple[DecodedRows, list[BadRow]]:
    """Decodes a unit; bad rows are left out and returned.

    Raises:
        DataError: a column whose type does not serve the plan.
    """
    findings = Findings(unit)
    reader = _Reader(unit, findings)
    bags = [reader.bags(feature) for feature in plan.schema.sparse]
    numbers = [reader.numeric(feature) for feature in plan.schema.numeric]
    numeric = _side_by_side(numbers, unit.table.num_rows, buffers)
    names = plan.schema.labels.names if plan.with_labels else ()
    conditions = {name: plan.conditions.get(name) for name in names}
    targets = [reader.derived(how) if how else reader.label(name) for name, how in conditions.items()]
    labels = _side_by_side(targets, unit.table.num_rows, buffers)
    weight = plan.schema.labels.weight if plan.with_labels else None
    example_weights = reader.example_weights(weight) if weight else None
    kept = reader.kept(plan.keep) if plan.keep else None
    rows = DecodedRows(unit.table.num_rows, bags, numeric, labels, example_weights, kept)
    drop, bad = findings.bad_rows()
    return rows if drop is None else rows.take(np.flatnonzero(~drop)), bad


class _Reader:
    """Reads columns of one unit, noting what is wrong with their values."""

    def __init__(self, unit: Unit, findings: Findings) -> None:
        self._unit = unit
        self._findings = findings
        self._is_text = unit.is_text

    def _column(self, name: str) -> Any:
        return columns.flat(self._unit.table.column(name))

    def bags(self, feature: Categorical | Sequence) -> Bags:
        """The ids of a feature, its weights, cut to its maximum length."""
        if isinstance(feature, Categorical) and feature.bucketize:
            return Bags(self._buckets(feature.source, feature.bucketize))
        array = self._column(feature.source)
        offsets = None
        try:
            if feature.separator:
                words, offsets = columns.split(array, feature.separator)
                ids = columns.scalar_ids(words, empty_is_null=False)
            elif columns.is_list(array.type):
                ids, offsets = columns.list_ids(array)
            else:
                ids = columns.scalar_ids(array, empty_is_null=self._is_text)
        except DataError as error:
            raise DataError(f"{self._unit.file}: {feature.source!r}: {error}") from None
        weights = None
        if isinstance(feature, Categorical) and feature.weights:
            weights = self._weights(feature, Bags(ids, offsets).bounds())
            if (weights == 1.0).all():
                weights = None
        if feature.max_length and offsets is not None:
            if weights is not None:
                weights, _ = columns.keep_last(weights, offsets, feature.max_length)
            ids, offsets = columns.keep_last(ids, offsets, feature.max_length)
        return Bags(ids, offsets, weights)

    def _buckets(self, column: str, boundaries: tuple[float, ...]) -> NDArray[np.int64]:
        values, null = self._finite(column)
        ids = np.searchsorted(np.array(boundaries), values, side="right").astype(np.int64, copy=False)
        if null is not None:
            ids[null] = columns.NULL_ID
        return ids

    def _weights(self, feature: Categorical, bounds: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32[M], one weight per id; rows whose weights do not match their ids are bad."""
        name = str(feature.weights)
        array = self._column(name)
        if feature.separator:
            words, offsets = columns.split(array, feature.separator)
            values, null, unreadable = columns.string_numbers(words)
            bad = null if unreadable is None else null | unreadable
        else:
            inner = array.flatten() if columns.is_list(array.type) else array
            offsets = (
                columns.list_offsets(array) if columns.is_list(array.type) else np.arange(len(array) + 1)
            )
            numbers = columns.numbers(inner, from_strings=self._is_text)
            values, bad = numbers.values, np.zeros(len(inner), dtype=np.bool_)
            for mask in (numbers.null, numbers.unreadable):
                bad = bad if mask is None else bad | mask
        weights = _narrow(values)
        bad = bad | ~np.isfinite(weights)
        lengths, wanted = np.diff(offsets), np.diff(bounds)
        rows_bad = np.zeros(len(lengths), dtype=np.bool_)
        rows_bad[np.repeat(np.arange(len(lengths)), lengths)[bad]] = True
        self._findings.add(rows_bad, name, "finite numbers as weights")
        differ = lengths != wanted
        if differ.any():
            self._findings.add(differ, name, f"as many weights as {feature.source!r} has ids")
            aligned = np.ones(bounds[-1], dtype=np.float32)
            aligned[np.repeat(~differ, wanted)] = weights[np.repeat(~differ, lengths)]
            return aligned
        return weights

    def numeric(self, feature: Numeric) -> NDArray[np.float32]:
        """float32[R], transformed; null is 0, or NaN where it waits to be standardized."""
        log1p = "log1p" in feature.transform
        values, null = self._finite(feature.source, keep_float32=not log1p)
        if log1p:
            values = np.log1p(np.maximum(values, 0.0))
        narrow = _narrow(values)
        if narrow is not values:
            self._findings.add(np.isinf(narrow), feature.source, "a number that float32 can hold")
        if null is not None:
            narrow = narrow if narrow.flags.writeable else narrow.copy()
            narrow[null] = np.nan if "standardize" in feature.transform else 0.0
        return narrow

    def label(self, column: str) -> NDArray[np.float32]:
        """float32[R] in [0, 1]."""
        values, null = self._numbers(column, "a label in [0, 1]")
        self._findings.add(null, column, "a label in [0, 1]")
        self._findings.add(~((values >= 0.0) & (values <= 1.0)), column, "a label in [0, 1]")
        return _narrow(values)

    def derived(self, condition: Condition) -> NDArray[np.float32]:
        """float32[R], 1 where the condition holds."""
        array = self._column(condition.column)
        if condition.on_strings:
            words = columns.string_values(array)
            null = columns.null_mask(words)
            values = words.fill_null(b"").to_numpy(zero_copy_only=False)
            if self._is_text:
                empty = values == b""
                null = empty if null is None else null | empty
            self._findings.add(null, condition.column, "a value to derive the label from")
            return condition.holds(values).astype(np.float32)
        expected = "a number to derive the label from"
        if columns.kind_of(array.type) == "integers" and array.null_count == 0:
            return condition.holds(array.to_numpy(zero_copy_only=False)).astype(
                np.float32
            )  # exact beyond 2⁵³
        numbers, null = self._numbers(condition.column, expected)
        self._findings.add(np.isnan(numbers), condition.column, expected)
        self._findings.add(null, condition.column, expected)
        return condition.holds(numbers).astype(np.float32)

    def example_weights(self, column: str) -> NDArray[np.float32]:
        """float32[R], each finite and not negative."""
        expected = "a finite weight ≥ 0"
        values, null = self._numbers(column, expected)
        weights = _narrow(values)
        self._findings.add(null, column, expected)
        self._findings.add(~(np.isfinite(weights) & (weights >= 0.0)), column, expected)
        return weights

    def kept(self, names: tuple[str, ...]) -> Any:
        """The columns as they are; those of text files as strings, null where empty."""
        table = self._unit.table.select(names)
        if not self._is_text:
            return table.combine_chunks()
        return pa.table({name: self._text(name) for name in names})

    def _text(self, name: str) -> Any:
        array = self._column(name)
        if not columns.is_string(array.type):
            return array
        try:
            text = array.cast(pa.string())
        except pa.ArrowInvalid:
            words = [_decoded(word) for word in array.to_pylist()]
            self._findings.add(np.array([word is None for word in words]), name, "UTF-8 text")
            text = pa.array(words, type=pa.string())
        empty = np.equal(pa.compute.binary_length(text).fill_null(1).to_numpy(zero_copy_only=False), 0)
        return (
            pa.compute.if_else(pa.array(empty), pa.scalar(None, pa.string()), text) if empty.any() else text
        )

    def _finite(
        self, column: str, *, keep_float32: bool = False
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        expected = "a finite number"
        values, null = self._numbers(column, expected, keep_float32=keep_float32)
        finite = np.isfinite(values)
        if not finite.all():
            self._findings.add(~finite, column, expected)
        return values, null

    def _numbers(
        self, column: str, expected: str, *, keep_float32: bool = False
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        try:
            array = self._column(column)
            read = columns.numbers(array, from_strings=self._is_text, keep_float32=keep_float32)
        except DataError as error:
            raise DataError(f"{self._unit.file}: {column!r}: {error}") from None
        self._findings.add(read.unreadable, column, expected)
        return read.values, read.null


def _narrow(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what does not fit becomes inf, and is found
        return values.astype(np.float32, copy=False)


def _side_by_side(parts: list[NDArray[np.float32]], num_rows: int, buffers: Buffers) -> NDArray[np.float32]:
    """Columns of float32[R] as float32[R, ·]; by blocks of rows, as a block stays in cache."""
    if len(parts) == 1:
        return parts[0][:, None]
    matrix = buffers.take(np.float32, num_rows, len(parts))
    for start in range(0, num_rows if parts else 0, BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        for place, part in enumerate(parts):
            matrix[block, place] = part[block]
    return matrix


def _decoded(word: bytes) -> str | None:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError:
        return None
