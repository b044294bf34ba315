"""Conditions that rows have to meet to be read; :mod:`girih.data.decode.where_text` makes them of text.

A comparison with a missing value is neither true nor false, as in SQL, and such a row is left out unless the rest decides. Beside
times and dates, text is a time: ``'2024-05-01'``, ``'2024-05-01 12:30:00'``.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.data.decode import columns, times
from girih.data.decode.notation import Notation
from girih.data.paths import one_line
from girih.errors import DataError


class Columns(NamedTuple):
    """Columns by name, each as one array, and how text of theirs is read as numbers."""

    read: Callable[[str], Any]
    notation: Notation | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``column operator value``."""

    column: str
    operator: str
    value: bool | int | float | str

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it, null where nobody can say."""
        array = given.read(self.column)
        return pc.call_function(self.operator, list(_comparable(array, self.value, given.notation)))

    def trouble(self, kind: Any) -> str | None:
        """Says why values of an Arrow type cannot be compared with the value; None where they can."""
        return _trouble(kind, self.value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """``column in [value, …]``."""

    column: str
    values: tuple[bool | int | float | str, ...]

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it, null where nobody can say."""
        array = given.read(self.column)
        if isinstance(self.values[0], str) and not times.is_time(array.type):
            words = columns.string_values(array)
            of = pa.array([str(value).encode() for value in self.values], pa.large_binary())
            return pc.if_else(words.is_null(), None, pc.is_in(words, value_set=of))
        found = None
        for value in self.values:
            equal = pc.equal(*_comparable(array, value, given.notation))
            found = equal if found is None else pc.or_kleene(found, equal)
        return found

    def trouble(self, kind: Any) -> str | None:
        """Says why values of an Arrow type cannot be compared with the values; None where they can."""
        return next(filter(None, (_trouble(kind, value) for value in self.values)), None)


@dataclass(frozen=True, slots=True)
class Missing:
    """``column is null``."""

    column: str

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it."""
        return given.read(self.column).is_null()

    def trouble(self, kind: Any) -> str | None:
        """Nothing: any column may have missing values."""
        return None


@dataclass(frozen=True, slots=True)
class Between:
    """``low <= column < high``, of numbers or microseconds of times; see :mod:`girih.data.split`."""

    column: str
    order: times.Order
    low: int | float | None
    high: int | float | None

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it, null where there is no value: :mod:`girih.data.split` has refused such rows, but for those left out.

        Raises:
            DataError: a value that has no place in the order.
        """
        array = columns.plain(given.read(self.column))
        there = pc.is_valid(array).to_numpy(zero_copy_only=False)
        values = times.ordinals(array.drop_null(), self.column, self.order)[0]
        good = np.ones(len(values), np.bool_) if self.low is None else values >= self.low
        met = np.zeros(len(there), np.bool_)
        met[there] = good if self.high is None else good & (values < self.high)
        return pa.array(met, mask=~there)

    def trouble(self, kind: Any) -> str | None:
        """Says why values of an Arrow type have no order of this kind; None where they have."""
        return (
            None
            if times.order_of(kind) in (self.order, None)
            else f"{kind} is no {self.order}, as in other files"
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """Conditions joined by ``and_kleene`` or ``or_kleene``."""

    operator: str
    parts: tuple[Condition, ...]

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it, null where nobody can say."""
        found = self.parts[0].mask(given)
        for part in self.parts[1:]:
            found = pc.call_function(self.operator, [found, part.mask(given)])
        return found


@dataclass(frozen=True, slots=True)
class Not:
    """A condition that is not met."""

    part: Condition

    def mask(self, given: Columns) -> Any:
        """Which of R rows meet it, null where nobody can say."""
        return pc.invert(self.part.mask(given))


Condition = Comparison | OneOf | Missing | Between | Joined | Not


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on rows, and what it was written as."""

    text: str
    condition: Condition

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""
        return tuple(dict.fromkeys(leaf.column for leaf in _leaves(self.condition)))

    def keep(self, read: Callable[[str], Any], notation: Notation | None = None) -> NDArray[np.bool_]:
        """bool[R]: which rows meet the condition.

        Raises:
            DataError: values that cannot be compared as it is written.
        """
        try:
            mask = self.condition.mask(Columns(read, notation))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise DataError(f"{self.text}: cannot be compared: {one_line(error)}") from None
        kept: NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
        return kept

    def troubles(self, types: Mapping[str, Any]) -> Iterator[str]:
        """Which column has a type that the condition does not go with, and why."""
        for leaf in _leaves(self.condition):
            if trouble := leaf.trouble(types[leaf.column]):
                yield f"{leaf.column!r} of {self.text}: {trouble}"

    def joined(self, text: str, condition: Condition) -> Where:
        """Both conditions."""
        return Where(f"{self.text}, {text}", Joined("and_kleene", (self.condition, condition)))


def _leaves(condition: Condition) -> Iterator[Comparison | OneOf | Missing | Between]:
    if isinstance(condition, Not):
        yield from _leaves(condition.part)
    elif isinstance(condition, Joined):
        for part in condition.parts:
            yield from _leaves(part)
    else:
        yield condition


def _comparable(array: Any, value: Any, notation: Notation | None) -> tuple[Any, Any]:
    """A column and a value, in types that can be compared."""
    array = columns.plain(array)
    kind = array.type
    if times.is_time(kind):
        return array, times.moment(str(value), kind)
    if columns.is_string(kind):
        if isinstance(value, str):
            return columns.string_values(array), pa.scalar(value.encode(), pa.large_binary())
        numbers, null = columns.string_numbers(columns.string_values(array), notation)  # cells of a text file
        return pa.array(
            numbers, mask=np.isnan(numbers) if null is None else null | np.isnan(numbers)
        ), pa.scalar(float(value))
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    return array, pa.scalar(int(value) if isinstance(value, bool) else value)


def _trouble(kind: Any, value: Any) -> str | None:
    word = columns.kind_of(kind)
    if times.is_time(kind):
        if isinstance(value, str) and times.moment(value, kind) is not None:
            return None
        return f"{value!r} is no time as {kind} has: write '2024-05-01', or '2024-05-01 12:30:00'"
    if word == "strings":
        return None if isinstance(value, str) else f"{value!r} beside strings: put it in quotes"
    if word in ("integers", "floats", "booleans", "nulls") or word.startswith("decimal"):
        if not isinstance(value, str) or word == "nulls":
            return None
        if word == "booleans":
            return f"{value!r} beside booleans: write true or false, without quotes"
        number = columns.number_of(value.encode())
        return f"{value!r} beside {word}: {'compare with a number' if number is None else f'write {number:g}, without quotes'}"
    return f"{kind} cannot be compared: expected numbers, strings, times or dates"
