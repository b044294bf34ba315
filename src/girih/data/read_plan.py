"""Lists the columns that a schema, its labels and the kept columns need, and checks that files have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import pyarrow as pa

from girih.data.decode.columns import Notation, is_list, is_number, kind_of
from girih.data.decode.conditions import Leaf, Where, parse_condition, parse_mask
from girih.data.decode.times import is_time
from girih.errors import ConfigError, DataError, nearest
from girih.schema import Categorical, Numeric, Schema, Sequence

_STRINGS = ("strings", "nulls")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The columns to read, and their uses.

    Attributes:
        schema: its features are decoded, in order.
        labels: the labels to decode, in order. weight: the column of example weights, if any.
        conditions: the derived labels, parsed.
        masks: label → the condition under which it counts, parsed. label_weights: label → the column of its weights.
        keep: columns that are passed on unchanged. where: the condition that rows must meet; None takes all.
        null_values: texts that mean a missing value. notation: the notation of numbers in text. None is the notation of
            programming languages.
        until_bad: True if rows after the first bad row need not be read.
    """

    schema: Schema
    labels: tuple[str, ...] = ()
    weight: str | None = None
    conditions: dict[str, Leaf] = field(default_factory=dict)
    masks: dict[str, Leaf] = field(default_factory=dict)
    label_weights: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    where: Where | None = None
    null_values: tuple[str, ...] = ()
    notation: Notation | None = None
    until_bad: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """The columns to read, each with its first use, such as ``feature 'user'``."""
        uses: dict[str, str] = {}
        for feature in self.schema.features:
            uses.setdefault(feature.source, f"feature {feature.name!r}")
            if isinstance(feature, Categorical) and feature.weights:
                uses.setdefault(feature.weights, f"weights of feature {feature.name!r}")
        for name in self.labels:
            uses.setdefault(self._label_column(name), f"label {name!r}")
        for name, condition in self.masks.items():
            uses.setdefault(condition.column, f"mask of label {name!r}")
        for name, column in self.label_weights.items():
            uses.setdefault(column, f"label_weight of label {name!r}")
        if self.weight:
            uses.setdefault(self.weight, "labels: weight")
        for column in self.keep:
            uses.setdefault(column, "keep")
        for column in self.where.columns if self.where else ():
            uses.setdefault(column, "where")
        return uses

    @property
    def numbers(self) -> set[str]:
        """The columns that are only read as floating-point numbers."""
        schema = self.schema
        wanted = {feature.source for feature in schema.numeric if not feature.part_of_time}
        wanted |= {name for name in self.labels if name not in self.conditions} | (
            {self.weight} if self.weight else set()
        )
        wanted |= set(self.label_weights.values())
        conditions = (*self.conditions.values(), *self.masks.values())
        others = {feature.source for feature in schema.sparse} | {each.column for each in conditions}
        return wanted - others - set(self.where.columns if self.where else ()) - set(self.keep)

    def without_labels(self, keep: tuple[str, ...] = ()) -> ReadPlan:
        """Returns a plan without labels, with other columns to keep."""
        return replace(self, labels=(), weight=None, masks={}, label_weights={}, keep=keep)

    def check_names(self, present: Seq[str], where: str) -> None:
        """Refuses a file that lacks a column, or has a column twice.

        Raises:
            DataError: names the column, its use, and the nearest existing column.
        """
        counts = Counter(present)
        for column, use in self.columns.items():
            if column not in counts:
                hint = _joined(column, present) or nearest(column, present)
                raise DataError(f"{where}: no column {column!r} ({use}){hint}")
            if counts[column] > 1:
                raise DataError(f"{where}: {counts[column]} columns are named {column!r} ({use}); rename one")

    def check_types(self, types: dict[str, pa.DataType], where: str) -> None:
        """Refuses columns whose type does not fit the schema.

        Raises:
            DataError: names the column, its type, and the fix.
        """
        for trouble in self._troubles(types):
            raise DataError(f"{where}: column {trouble}")

    def _troubles(self, types: dict[str, pa.DataType]) -> Iterator[str]:
        """Yields one error per unusable column."""
        for feature in self.schema.features:
            kind = kind_of(types[feature.source])
            what = f"{feature.source!r} ({types[feature.source]}) of feature {feature.name!r}"
            if not isinstance(feature, Sequence) and feature.part_of_time:
                if trouble := _time_trouble(feature.part_of_time, types[feature.source], kind):
                    yield f"{what}: {trouble}"
                continue
            if isinstance(feature, Numeric):
                if not is_number(kind):
                    mend = _of_time(feature, types[feature.source])
                    yield f"{what}: expected numbers; {mend or 'cast the column, or make the feature categorical'}"
                continue
            if isinstance(feature, Categorical) and feature.bucketize:
                if not is_number(kind):
                    yield f"{what}: bucketize expects one number per row"
                continue
            values = kind.removeprefix("lists of ")
            if feature.is_split and kind not in _STRINGS:
                how = f"separator {feature.separator!r}" if feature.separator else "list_format"
                yield f"{what}: {how} splits strings; drop it"
            if isinstance(feature, Categorical) and feature.weight_separator and values not in _STRINGS:
                yield f"{what}: weight_separator {feature.weight_separator!r} splits strings; drop it"
            if values == "floats" and feature.float_ids:
                continue
            if values == "floats":
                yield f"{what}: ids are integers or strings; cast the column, set float_ids = true if 7.0 is the id 7, use kind numeric, or bucketize"
            if values not in ("integers", "booleans", *_STRINGS):
                mend = _of_time(feature, types[feature.source])
                yield f"{what}: ids are integers or strings, or lists of them; {mend or 'cast the column'}"
            if isinstance(feature, Categorical) and feature.weights:
                yield from _weight_troubles(feature, types[feature.weights], types[feature.source])
        for name in self.labels:
            condition, column = self.conditions.get(name), self._label_column(name)
            mend = "put the value in quotes" if condition else 'derive the label, as in "rating >= 4"'
            yield from _label_troubles(
                column, types[column], f" of label {name!r}", condition, f"expected numbers; {mend}"
            )
        for name, mask in self.masks.items():
            expected = f"expected 0 and 1; write a condition, as in \"{mask.column} == 'yes'\""
            yield from _label_troubles(
                mask.column, types[mask.column], f", mask of label {name!r}", mask, expected
            )
        for name, column in self.label_weights.items():
            if not is_number(kind_of(types[column])):
                yield f"{column!r} ({types[column]}), label_weight of label {name!r}: weights are numbers"
        if self.weight and not is_number(kind_of(types[self.weight])):
            yield f"{self.weight!r} ({types[self.weight]}): example weights are numbers"
        if self.where:
            yield from self.where.troubles(types)

    def _label_column(self, name: str) -> str:
        return self.conditions[name].column if name in self.conditions else name


def _label_troubles(
    column: str, kind: pa.DataType, use: str, condition: Leaf | None, expected: str
) -> Iterator[str]:
    """Yields an error if the type of a column does not fit a label or its mask."""
    what = f"{column!r} ({kind}){use}"
    if condition is not None and condition.on_strings:
        if kind_of(kind) not in _STRINGS:
            text = ", ".join(map(repr, condition.compared))
            yield f"{what}: compared with text {text}; drop the inner quotes"
    elif not is_number(kind_of(kind)):
        yield f"{what}: {expected}"


def _weight_troubles(feature: Categorical, weights: pa.DataType, ids: pa.DataType) -> Iterator[str]:
    """Yields an error if the type of a feature's weights is wrong, or does not match the type of its ids."""
    what = f"{feature.weights!r} ({weights}), weights of feature {feature.name!r}"
    kind = kind_of(weights)
    if feature.is_split:
        if kind not in _STRINGS:
            how = f"split at {feature.separator!r}" if feature.separator else "read as lists in brackets"
            yield f"{what}: expected strings to {how}, as in the ids"
    elif not is_number(kind.removeprefix("lists of ")):
        yield f"{what}: expected lists of numbers, one weight per id"
    elif is_list(weights) != is_list(ids):
        yield f"{what}: expected lists if and only if the ids are lists ({ids})"


def make_read_plan(
    schema: Schema,
    keep: tuple[str, ...],
    with_labels: bool,
    where: Where | None = None,
    null_values: Seq[str] | None = None,
) -> ReadPlan:
    """Makes a plan, and parses the schema's conditions.

    Args:
        null_values: texts that mean a missing value; None takes the schema's texts.

    Raises:
        ConfigError: a condition that cannot be parsed, or that uses the column of a feature.
    """
    conditions = {name: parse_condition(name, text) for name, text in schema.labels.derive.items()}
    for name, condition in conditions.items():
        for feature in schema.features:
            if feature.source == condition.column:
                raise ConfigError(
                    f"feature {feature.name!r} reads {condition.column!r}, which label {name!r} is derived from:"
                    " the model would see the answer"
                )
    plan = ReadPlan(
        schema=schema,
        labels=schema.labels.names,
        weight=schema.labels.weight,
        conditions=conditions,
        masks={name: parse_mask(name, text) for name, text in schema.labels.mask.items()},
        label_weights=dict(schema.labels.label_weight),
        keep=tuple(dict.fromkeys(keep)),
        where=where,
        null_values=schema.null_values if null_values is None else tuple(null_values),
    )
    return plan if with_labels else plan.without_labels(plan.keep)


def _time_trouble(part: str, kind: pa.DataType, word: str) -> str | None:
    if is_time(kind):
        return "a date has no hour; use weekday" if part == "hour" and pa.types.is_date(kind) else None
    if word in ("integers", "floats", *_STRINGS):
        return None
    return f"{part} expects timestamps, numbers since 1970 or text such as '2024-05-01 12:30:00'"


def _of_time(feature: object, kind: pa.DataType) -> str | None:
    """Returns how a feature can use a column of times. Returns None if the column holds no times."""
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return "cast the column to integers, as seconds, for kind = 'numeric'"
    if not is_time(kind):
        return None
    parts = "'weekday'" if pa.types.is_date(kind) else "'hour' or 'weekday'"
    kinds = " and kind = 'categorical' or 'numeric'" if isinstance(feature, Sequence) else ""
    return f"set transform = {parts}{kinds} for a part of these times, or cast the column to integers"


def _joined(column: str, present: Seq[str]) -> str | None:
    """Returns the end of an error if the only column is a header that was not split."""
    if len(present) != 1:
        return None
    found = next((each for each in ",;\t|" if column in present[0].split(each)), None)
    return f"; the header is one column, {present[0][:60]!r}: set separator = {found!r}" if found else None
