"""Conditions that rows have to meet to be read; :mod:`girih.data.decode.where` makes them of text.

A comparison with a missing value is neither true nor false, as in SQL, and such a row is left out unless the rest decides. Beside
times and dates, text is a time: ``'2024-05-01'``, ``'2024-05-01 12:30:00'``.

Shapes: R rows.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.data.decode import columns, times
from girih.data.decode.columns import Notation
from girih.data.paths import one_line
from girih.errors import ConfigError, DataError

Value = bool | int | float | str


class Columns(NamedTuple):
    """Columns by name, each as one array, and how text of theirs is read as numbers."""

    read: Callable[[str], pa.Array]
    notation: Notation | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``column operator value``."""

    column: str
    operator: str
    value: Value

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it, null where nobody can say."""
        array = source.read(self.column)
        return pc.call_function(self.operator, list(_comparable(array, self.value, source.notation)))

    def trouble(self, kind: pa.DataType) -> str | None:
        """Says why values of an Arrow type cannot be compared with the value; None where they can."""
        return _trouble(kind, self.value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """``column in [value, …]``."""

    column: str
    values: tuple[Value, ...]

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it, null where nobody can say."""
        array = source.read(self.column)
        if isinstance(self.values[0], str) and not times.is_time(array.type):
            words = columns.string_values(array)
            of = pa.array([str(value).encode() for value in self.values], pa.large_binary())
            return pc.if_else(words.is_null(), None, pc.is_in(words, value_set=of))
        found = None
        for value in self.values:
            equal = pc.equal(*_comparable(array, value, source.notation))
            found = equal if found is None else pc.or_kleene(found, equal)
        return found

    def trouble(self, kind: pa.DataType) -> str | None:
        """Says why values of an Arrow type cannot be compared with the values; None where they can."""
        return next(filter(None, (_trouble(kind, value) for value in self.values)), None)


@dataclass(frozen=True, slots=True)
class Missing:
    """``column is null``."""

    column: str

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it."""
        return source.read(self.column).is_null()

    def trouble(self, kind: pa.DataType) -> str | None:
        """Nothing: any column may have missing values."""
        return None


@dataclass(frozen=True, slots=True)
class Between:
    """``low <= column < high``, of numbers or microseconds of times; see :mod:`girih.data.split`."""

    column: str
    order: times.Order
    low: int | float | None
    high: int | float | None

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it, null where there is no value: :mod:`girih.data.split` has refused such rows, but for those left out.

        Raises:
            DataError: a value that has no place in the order.
        """
        array = columns.plain(source.read(self.column))
        there = pc.is_valid(array).to_numpy(zero_copy_only=False)
        values = times.ordinals(array.drop_null(), self.column, self.order)[0]
        good = np.ones(len(values), np.bool_) if self.low is None else values >= self.low
        met = np.zeros(len(there), np.bool_)
        met[there] = good if self.high is None else good & (values < self.high)
        return pa.array(met, mask=~there)

    def trouble(self, kind: pa.DataType) -> str | None:
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

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it, null where nobody can say."""
        found = self.parts[0].mask(source)
        for part in self.parts[1:]:
            found = pc.call_function(self.operator, [found, part.mask(source)])
        return found


@dataclass(frozen=True, slots=True)
class Not:
    """A condition that is not met."""

    part: Condition

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Which of R rows meet it, null where nobody can say."""
        return pc.invert(self.part.mask(source))


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

    def keep(self, read: Callable[[str], pa.Array], notation: Notation | None = None) -> NDArray[np.bool_]:
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

    def troubles(self, types: Mapping[str, pa.DataType]) -> Iterator[str]:
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


def _comparable(array: pa.Array, value: Value, notation: Notation | None) -> tuple[pa.Array, pa.Scalar]:
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


def _trouble(kind: pa.DataType, value: Value) -> str | None:
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


EXAMPLE = "\"country in ['NL', 'BE'] and price > 0\""
_SHOWN = 300
_OPERATORS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "equal", ast.NotEq: "not_equal", ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater", ast.GtE: "greater_equal",
}  # fmt: skip
_TURNED = {"less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal"}
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_OF_OTHERS = {
    r"(?i)\w\s+(between)\s+\S+\s+and\b": "low <= column and column <= high", r"(?i)\w\s+(like)\s+''": "== or in, with whole values",
    r"&&?": "and", r"\|\|?": "or", "~": "not", r"\bAND\b": "and", r"\bOR\b": "or", r"\bNOT\b": "not", "=>": ">=", "=<": "<=", "<>": "!=", "(?<![=!<>:])=(?![=<>])": "==",
}  # fmt: skip
"""A pattern of an operator of other languages → what it is here."""


def parse_where(text: str) -> Where:
    """Parses a condition.

    Raises:
        ConfigError: not a condition; says which part is not, with an example of one.
    """
    where = f"where = {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in text, which Python would have a word on
            tree = ast.parse(text.strip(), mode="eval")
        return Where(where, _condition(tree.body, where))
    except ConfigError as error:
        raise ConfigError(f"{error}{_instead(text, '; ')}") from None
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        place = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise ConfigError(
            f"{where}: cannot be read{place}{_instead(text)}; expected a condition on columns, as {EXAMPLE}"
        ) from None


def _instead(text: str, before: str = ": ") -> str:
    """The words for an operator of other languages; empty where there is none."""
    outside = re.sub(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", "''", text)
    for theirs, ours in _OF_OTHERS.items():
        if found := re.search(theirs, outside):
            return f"{before}write {ours}, not {found[1] if found.re.groups else found[0]}"
    return ""


def _condition(node: ast.expr, where: str) -> Condition:
    if isinstance(node, ast.BoolOp):
        operator = "and_kleene" if isinstance(node.op, ast.And) else "or_kleene"
        return Joined(operator, tuple(_condition(value, where) for value in node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Not(_condition(node.operand, where))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        found = [_comparison(*pair, where) for pair in zip(sides, node.ops, sides[1:], strict=False)]
        return found[0] if len(found) == 1 else Joined("and_kleene", tuple(found))
    raise _refused(node, "is no comparison", where)


def _comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr, where: str) -> Condition:
    if isinstance(operator, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Name | ast.Constant) and _value(right, where) is None):
            raise _refused(right, "is not null, the one word after 'is' and 'is not'", where)
        missing = Missing(_column(left, where))
        return missing if isinstance(operator, ast.Is) else Not(missing)
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise _refused(right, "is not a list of values, as 'in' needs", where)
        values = tuple(_known(each, where) for each in right.elts)
        if len({isinstance(value, str) for value in values}) > 1:
            raise _refused(right, "has both text and numbers", where)
        one_of = OneOf(_column(left, where), values)
        return one_of if isinstance(operator, ast.In) else Not(one_of)
    name = _OPERATORS[type(operator)]
    if _is_column(left) == _is_column(right):
        raise _refused(
            left, f"and {ast.unparse(right)!r}: expected a column on one side and a value on the other", where
        )
    if _is_column(left):
        return Comparison(_column(left, where), name, _known(right, where))
    return Comparison(_column(right, where), _TURNED.get(name, name), _known(left, where))


def _is_column(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id not in _WORDS) or isinstance(node, ast.Call)


def _column(node: ast.expr, where: str) -> str:
    if isinstance(node, ast.Name) and node.id not in _WORDS:
        return node.id
    match node:
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))], keywords=[]):
            return name
    raise _refused(node, "is no column: expected a name, or column('any name')", where)


def _known(node: ast.expr, where: str) -> Value:
    value = _value(node, where)
    if value is None:
        raise _refused(node, "is compared: write 'is null', or 'is not null'", where)
    return value


def _value(node: ast.expr, where: str) -> Value | None:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
    value = inner.value if isinstance(inner, ast.Constant) else ...
    if isinstance(value, str | bool) or value is None:
        if not negative:
            return value
    elif isinstance(value, int | float) and value == value and -(1 << 63) <= value < 1 << 64:
        return -value if negative else value
    raise _refused(node, "is no value: expected a number, 'text' in quotes, true or false", where)


def _refused(node: ast.expr, why: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: {ast.unparse(node)!r} {why}; expected a condition such as {EXAMPLE}")
