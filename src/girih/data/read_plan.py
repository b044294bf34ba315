"""The columns that a schema, its labels and the kept columns need, and checks that files have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from girih.data.decode.columns import is_list, kind_of
from girih.data.decode.conditions import Condition, parse_condition
from girih.errors import ConfigError, DataError, nearest
from girih.schema import Categorical, Numeric, Schema

_NUMBERS = ("integers", "floats", "booleans", "nulls")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which columns become what.

    Attributes:
        schema: its features and labels are decoded, in order.
        conditions: the derived labels, parsed.
        keep: columns carried along as they are.
        with_labels: False leaves out labels and example weights.
    """

    schema: Schema
    conditions: dict[str, Condition]
    keep: tuple[str, ...]
    with_labels: bool

    @property
    def columns(self) -> dict[str, str]:
        """The columns to read, and what each is read for, as in ``feature 'user'``."""
        uses: dict[str, str] = {}
        for feature in self.schema.features:
            uses.setdefault(feature.source, f"feature {feature.name!r}")
            if isinstance(feature, Categorical) and feature.weights:
                uses.setdefault(feature.weights, f"weights of feature {feature.name!r}")
        if self.with_labels:
            for name in self.schema.labels.names:
                column = self.conditions[name].column if name in self.conditions else name
                uses.setdefault(column, f"label {name!r}")
            if self.schema.labels.weight:
                uses.setdefault(self.schema.labels.weight, "labels: weight")
        for column in self.keep:
            uses.setdefault(column, "keep")
        return uses

    def check_names(self, present: list[str], where: str) -> None:
        """Refuses a file that lacks a column, or has one twice.

        Raises:
            DataError: it names the column, what needs it, and the nearest that is there.
        """
        for column, use in self.columns.items():
            if column not in present:
                raise DataError(f"{where}: no column {column!r} ({use}){nearest(column, present)}")
            if present.count(column) > 1:
                raise DataError(
                    f"{where}: {present.count(column)} columns are named {column!r} ({use}); rename one"
                )

    def check_types(self, types: dict[str, Any], where: str) -> None:
        """Refuses columns of a type that cannot become what the schema wants of them.

        Raises:
            DataError: it names the column, its type, and how to mend it.
        """
        for feature in self.schema.features:
            kind = kind_of(types[feature.source])
            what = f"{where}: column {feature.source!r} ({types[feature.source]}) of feature {feature.name!r}"
            if isinstance(feature, Numeric):
                if not _is_number(kind):
                    raise DataError(
                        f"{what}: expected numbers; cast the column, or make the feature categorical"
                    )
            elif isinstance(feature, Categorical) and feature.bucketize:
                if not _is_number(kind):
                    raise DataError(f"{what}: bucketize expects one number a row")
            else:
                _check_ids(kind, what, feature.separator)
            if isinstance(feature, Categorical) and feature.weights:
                self._check_weights(feature, types, where)
        if self.with_labels:
            self._check_labels(types, where)

    def _check_weights(self, feature: Categorical, types: dict[str, Any], where: str) -> None:
        kind = types[str(feature.weights)]
        what = f"{where}: column {feature.weights!r} ({kind}), weights of feature {feature.name!r}"
        if feature.separator:
            if kind_of(kind) not in ("strings", "nulls"):
                raise DataError(f"{what}: expected strings to split at {feature.separator!r}, as in the ids")
            return
        inner = kind.value_type if is_list(kind) else kind
        if not _is_number(kind_of(inner)):
            raise DataError(f"{what}: expected lists of numbers, one weight an id")
        if is_list(kind) != is_list(types[feature.source]):
            raise DataError(f"{what}: expected lists where the ids are lists ({types[feature.source]})")

    def _check_labels(self, types: dict[str, Any], where: str) -> None:
        labels = self.schema.labels
        for name in labels.names:
            condition = self.conditions.get(name)
            column = condition.column if condition else name
            kind, what = (
                kind_of(types[column]),
                f"{where}: column {column!r} ({types[column]}) of label {name!r}",
            )
            if condition and condition.on_strings:
                if kind not in ("strings", "nulls"):
                    raise DataError(
                        f"{what}: compared with text {condition.literal!r}; drop the inner quotes"
                    )
            elif not _is_number(kind):
                mend = "put the value in quotes" if condition else 'derive the label, as in "rating >= 4"'
                raise DataError(f"{what}: expected numbers; {mend}")
        if labels.weight and not _is_number(kind_of(types[labels.weight])):
            raise DataError(
                f"{where}: column {labels.weight!r} ({types[labels.weight]}): example weights are numbers"
            )


def make_read_plan(schema: Schema, keep: tuple[str, ...], with_labels: bool) -> ReadPlan:
    """Parses the schema's conditions.

    Raises:
        ConfigError: a condition that cannot be understood, or on a column that a feature reads too.
    """
    conditions = {name: parse_condition(name, text) for name, text in schema.labels.derive.items()}
    for name, condition in conditions.items():
        for feature in schema.features:
            if feature.source == condition.column:
                raise ConfigError(
                    f"feature {feature.name!r} reads {condition.column!r}, which label {name!r} is derived from:"
                    " the model would see the answer"
                )
    return ReadPlan(schema, conditions, tuple(dict.fromkeys(keep)), with_labels)


def _is_number(kind: str) -> bool:
    return kind in _NUMBERS or kind.startswith("decimal")


def _check_ids(kind: str, what: str, separator: str | None) -> None:
    if separator and kind not in ("strings", "nulls"):
        raise DataError(f"{what}: separator {separator!r} splits strings; drop it")
    inner = kind.removeprefix("lists of ")
    if inner == "floats":
        raise DataError(
            f"{what}: ids are integers or strings; cast the column, or use kind numeric, or bucketize"
        )
    if inner not in ("integers", "strings", "booleans", "nulls"):
        raise DataError(f"{what}: ids are integers or strings, or lists of them; cast the column")
