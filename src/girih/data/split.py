"""Splits the same files into training, validation and test data.

The order of one column decides. The column has times, or any numbers. One pass over this column finds the two cuts,
from ranks. Each unit keeps at most :data:`RANKS` values, evenly spaced in its order. So a cut is off by less than 1 /
RANKS of a unit's rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.config.bounds import Fraction
from girih.config.options import Options
from girih.data.dataset import Dataset
from girih.data.decode import columns, times
from girih.data.decode.conditions import Between, Where
from girih.data.decode.decoder import chosen
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.errors import ConfigError, DataError, nearest
from girih.kernels.cpu.arrays import F64
from girih.schema import Numeric, Schema

RANKS = 1 << 16
_ORDERED = ("integers", "floats", "strings", "nulls")
"""Kinds of columns that may hold numbers, or times as text or since 1970."""


class Split(Options):
    """The shares of ``data.train``.

    The last rows are test data, the rows before them are validation data, and the rest are training data.

    Attributes:
        by: the column whose order is cut.
        valid, test: shares of the rows; 0 makes no such split.
    """

    by: str
    valid: Fraction = 0.0
    test: Fraction = 0.0

    def _check(self) -> None:
        if not 0 < self.valid + self.test < 1:
            raise ConfigError(
                f"valid = {self.valid:g}, test = {self.test:g}: expected shares of the rows, together above 0 and below 1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The splits that are cut off the training data."""
        return tuple(name for name in ("valid", "test") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The values of a column at which validation and test data begin."""

    by: str
    order: times.Order
    valid: int | float
    test: int | float | None

    def of(self, data: Dataset, name: str) -> Dataset:
        """Returns one split of the data."""
        low = {"train": None, "valid": self.valid, "test": self.test}[name]
        high = {"train": self.valid, "valid": self.test, "test": None}[name]
        text = f"the split {name!r} by {self.by!r}, from {self.text_of(low)} to {self.text_of(high)}"
        condition, where = Between(self.by, self.order, low, high), data.plan.where
        return data.meeting(Where(text, condition) if where is None else where.joined(text, condition))

    def text_of(self, cut: float | None) -> str:
        """Returns a cut in words."""
        if cut is None:
            return "the end"
        if self.order == "number":
            return str(cut)
        return (datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=int(cut))).isoformat(" ")


class _SplitPlan(ReadPlan):
    """A plan that reads the column of a split. Its errors name the option ``split``."""

    @property
    def by(self) -> str:
        """The column."""
        return self.schema.features[0].source

    def check_names(self, present: Seq[str], where: str) -> None:
        if self.by not in present:
            raise DataError(f"{where}: split.by = {self.by!r}: no such column{nearest(self.by, present)}")
        super().check_names(present, where)

    def check_types(self, types: dict[str, object], where: str) -> None:
        kind = types[self.by]
        if not times.is_time(kind) and columns.kind_of(kind) not in _ORDERED:
            raise DataError(
                f"{where}: split.by = {self.by!r} ({kind}): expected times, or numbers, one per row; cast it, or name another column"
            )
        super().check_types(types, where)


def find_cuts(data: Dataset, split: Split) -> Cuts:
    """Reads the column of all rows that meet the condition, and finds the cuts.

    Raises:
        DataError: no such column, a row without a value, or too few different values.
    """
    only = Numeric(name="data.split", column=split.by, transform="weekday")  # reads a time or a number
    plan = _SplitPlan(
        schema=Schema([only], "none"),
        where=data.plan.where,
        null_values=data.plan.null_values,
        notation=data.plan.notation,
        until_bad=data.plan.until_bad,
    )
    data.source.check(plan)
    sampled, weights, orders = [], [], set()
    for unit in data.source.read(plan, np.arange(data.source.num_parts), Cursor()):
        unit = chosen(unit, plan)
        if not unit.table.num_rows:
            continue
        try:
            values, order = times.ordinals(columns.flat(unit.table.column(split.by)), split.by)
        except DataError as error:
            raise DataError(f"{unit.file}: split.by = {split.by!r}: {error}") from None
        orders.add(order)
        kept = np.sort(values)[:: -(-len(values) // RANKS)]
        sampled.append(kept)
        weights.append(np.full(len(kept), len(values) / len(kept)))
    if len(orders) > 1:
        raise DataError(
            f"column {split.by!r}: numbers in one place and times in another; data.split needs one of them"
        )
    if not sampled:
        raise DataError(
            f"{data.addresses[0]}: no row to split{f'; none meets {data.plan.where.text}' if data.plan.where else ''}"
        )
    values = np.concatenate(sampled)
    places = np.argsort(values, kind="stable")
    behind = np.cumsum(np.concatenate(weights)[places])
    valid = _at(values[places], behind, 1 - split.valid - split.test)
    test = _at(values[places], behind, 1 - split.test) if split.test else None
    if not values[places[0]] < valid or (split.valid and valid == test):
        raise DataError(
            f"column {split.by!r}: too few different values to cut off {split.valid + split.test:.0%} of the rows; split by another column"
        )
    return Cuts(split.by, orders.pop(), valid, test)


def _at(values: NDArray[np.number], behind: F64, share: float) -> int | float:
    """Returns the first value after a share of all rows."""
    place = int(np.searchsorted(behind, share * behind[-1] * (1 + 1e-12), side="right"))
    value: int | float = values[min(place, len(values) - 1)].item()
    return value
