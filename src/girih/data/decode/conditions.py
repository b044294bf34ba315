"""Conditions on columns: for rows to read (``where``), derived labels, and masks of labels.

All conditions use one grammar, the grammar of Python comparisons. A label's condition is a single comparison, and its
column needs no quotes, regardless of its name. A condition is a tree. Arrow computes its leaves from columns of any
format.

As in SQL, a comparison with a missing value is neither true nor false. Such a row is left out unless the rest of the
condition decides. Text that is compared with times and dates is a time: ``'2024-05-01'``, ``'2024-05-01 12:30:00'``.

Shapes: R rows.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, times
from girih.data.decode.columns import Notation
from girih.data.paths import one_line
from girih.errors import ConfigError, DataError
from girih.kernels.cpu.arrays import Bools

Value = bool | int | float | str


class Columns(NamedTuple):
    """Reads columns by name, each as one array, and says how to parse their text as numbers."""

    read: Callable[[str], pa.Array]
    notation: Notation | None = None


class Condition(ABC):
    """A tree of comparisons. Its text identifies the selected rows, so positions in data depend on the text."""

    __slots__ = ()

    @abstractmethod
    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if unknown."""

    @abstractmethod
    def leaves(self) -> Iterable[Leaf]:
        """Yields the parts of the tree that read a column."""


@dataclass(frozen=True, slots=True)
class Leaf(Condition):
    """A condition on one column."""

    column: str

    @property
    def compared(self) -> tuple[Value, ...]:
        """The values that are compared with the column."""
        return ()

    @property
    def on_strings(self) -> bool:
        """True if the column is compared with strings."""
        return isinstance(self.compared[0], str)

    def leaves(self) -> Iterable[Leaf]:
        """Returns this leaf."""
        return (self,)

    def trouble(self, kind: pa.DataType) -> str | None:
        """Returns the reason why values of an Arrow type cannot be compared with this leaf's values, or None."""
        return next(filter(None, (_trouble(kind, value) for value in self.compared)), None)

    def holds(self, array: pa.Array) -> Bools:
        """Returns bool[R]: marks the values of a column that meet the condition.

        Raises:
            DataError: values that cannot be compared.
        """
        return _kept(self, Columns(lambda _: array), f"column {self.column!r}")


@dataclass(frozen=True, slots=True)
class Comparison(Leaf):
    """``column operator value``."""

    operator: str
    value: Value

    @property
    def compared(self) -> tuple[Value, ...]:
        """The single value of this comparison."""
        return (self.value,)

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if unknown."""
        array = source.read(self.column)
        return pc.call_function(self.operator, list(_comparable(array, self.value, source.notation)))


class Flag(Comparison):
    """A column that holds only 0 and 1; the condition is met if it is 1."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OneOf(Leaf):
    """``column in [value, …]``."""

    values: tuple[Value, ...]

    @property
    def compared(self) -> tuple[Value, ...]:
        """The values of the list."""
        return self.values

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if unknown."""
        array = source.read(self.column)
        if self.on_strings and not times.is_time(array.type):
            words = columns.string_values(array)
            of = pa.array([str(value).encode() for value in self.values], pa.large_binary())
            return pc.if_else(words.is_null(), None, pc.is_in(words, value_set=of))
        equal = (pc.equal(*_comparable(array, value, source.notation)) for value in self.values)
        return reduce(pc.or_kleene, equal)


@dataclass(frozen=True, slots=True)
class Missing(Leaf):
    """``column is null``."""

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R]."""
        return source.read(self.column).is_null()


@dataclass(frozen=True, slots=True)
class Between(Leaf):
    """``low <= column < high``, for numbers or for times in microseconds; see :mod:`girih.data.split`."""

    order: times.Order
    low: int | float | None
    high: int | float | None

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if there is no value.

        :mod:`girih.data.split` has already refused rows without a value, except rows that are left out.

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
        """Returns the reason why values of an Arrow type do not have this order, or None."""
        is_alike = times.order_of(kind) in (self.order, None)
        return None if is_alike else f"{kind} is not a {self.order}, unlike in other files"


@dataclass(frozen=True, slots=True)
class Joined(Condition):
    """Conditions joined by ``and_kleene`` or ``or_kleene``."""

    operator: str
    parts: tuple[Condition, ...]

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if unknown."""
        masks = [part.mask(source) for part in self.parts]
        return reduce(lambda one, other: pc.call_function(self.operator, [one, other]), masks)

    def leaves(self) -> Iterable[Leaf]:
        """Yields the leaves of all parts."""
        return itertools.chain.from_iterable(part.leaves() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Not(Condition):
    """A negated condition."""

    part: Condition

    def mask(self, source: Columns) -> pa.BooleanArray:
        """Marks the rows that meet the condition: bool[R], null if unknown."""
        return pc.invert(self.part.mask(source))

    def leaves(self) -> Iterable[Leaf]:
        """Yields the leaves of the negated condition."""
        return self.part.leaves()


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on rows, with its original text."""

    text: str
    condition: Condition

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the condition reads."""
        return tuple(dict.fromkeys(leaf.column for leaf in self.condition.leaves()))

    def keep(self, read: Callable[[str], pa.Array], notation: Notation | None = None) -> Bools:
        """Returns bool[R]: marks the rows that meet the condition.

        Raises:
            DataError: values that cannot be compared as the condition says.
        """
        return _kept(self.condition, Columns(read, notation), self.text)

    def troubles(self, types: Mapping[str, pa.DataType]) -> Iterator[str]:
        """Yields one error per column whose type does not fit the condition."""
        for leaf in self.condition.leaves():
            if trouble := leaf.trouble(types[leaf.column]):
                yield f"{leaf.column!r} of {self.text}: {trouble}"

    def joined(self, text: str, condition: Condition) -> Where:
        """Joins this condition and another condition with "and"."""
        return Where(f"{self.text}, {text}", Joined("and_kleene", (self.condition, condition)))


def _kept(condition: Condition, source: Columns, where: str) -> Bools:
    try:
        mask = condition.mask(source)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise DataError(f"{where}: cannot be compared: {one_line(error)}") from None
    kept: Bools = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return kept


def _comparable(array: pa.Array, value: Value, notation: Notation | None) -> tuple[pa.Array, pa.Scalar]:
    """Casts a column and a value to types that can be compared."""
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
    number = int(value) if isinstance(value, bool) else value
    if kind == pa.uint64() and isinstance(number, int) and 0 <= number < 1 << 64:
        return array, pa.scalar(number, kind)
    is_large = isinstance(number, int) and not -(1 << 63) <= number < 1 << 63
    if pa.types.is_integer(kind) and (isinstance(number, float) or is_large or kind == pa.uint64()):
        array = array.cast(pa.float64(), safe=False)
    return array, pa.scalar(float(number) if pa.types.is_float64(array.type) or is_large else number)


def _trouble(kind: pa.DataType, value: Value) -> str | None:
    word = columns.kind_of(kind)
    if times.is_time(kind):
        if isinstance(value, str) and times.moment(value, kind) is not None:
            return None
        return f"{value!r} is not a time, which {kind} needs: write '2024-05-01', or '2024-05-01 12:30:00'"
    if word == "strings":
        return None if isinstance(value, str) else f"{value!r} is compared with strings: put it in quotes"
    if not columns.is_number(word):
        return f"{kind} cannot be compared: expected numbers, strings, times or dates"
    if not isinstance(value, str) or word == "nulls":
        return None
    if word == "booleans":
        return f"{value!r} is compared with booleans: write true or false, without quotes"
    number = columns.number_of(value.encode())
    return f"{value!r} is compared with {word}: {'compare with a number' if number is None else f'write {number:g}, without quotes'}"


EXAMPLE = "\"country in ['NL', 'BE'] and price > 0\""
_EXAMPLE_OF_LABELS = (
    "a column, one of == != < <= > >= in, and a value, as in 'rating >= 4' or \"column('any name') >= 4\""
)
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
"""Patterns of operators of other languages, and the operators of this grammar to use instead."""
_QUOTED = r"""column\(\s*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*\)"""
_LEFT = re.compile(rf"\s*(?:{_QUOTED}|([^=<>!]+?))\s*(?:==|!=|<=|>=|<|>|(?<=[\s)])in\b)", re.DOTALL)
"""The column of a label's condition, which needs no quotes, and the operator."""
_UNREADABLE = (SyntaxError, MemoryError, RecursionError, ValueError)


def parse_where(text: str) -> Where:
    """Parses a condition on rows.

    Raises:
        ConfigError: not a condition. The error names the faulty part and gives an example.
    """
    where = f"where = {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'!r}"
    try:
        return Where(where, _condition(_tree(text)))
    except ConfigError as error:
        reason = f"{error}; expected a condition such as {EXAMPLE}{_instead(text, '; ')}"
    except _UNREADABLE as error:
        place = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        reason = f"cannot be read{place}{_instead(text)}; expected a condition on columns, such as {EXAMPLE}"
    raise ConfigError(f"{where}: {reason}")


def parse_condition(label: str, text: str, option: str = "derive") -> Leaf:
    """Parses the condition of a derived label or of a label's mask: a single comparison.

    Raises:
        ConfigError: not a comparison. The error gives an example.
    """
    where, left, reason = f"labels: {option} {label!r} = {text!r}", _LEFT.match(text), ""
    if left and left[1]:
        text = f"column({left[1]!r}) {text[left.end(1) :]}"
    try:
        condition = _condition(_tree(f"({text}\n)"))
        if isinstance(condition, Comparison | OneOf):
            return condition
    except ConfigError as error:
        reason = f"{error}; "
    except _UNREADABLE:
        pass
    raise ConfigError(f"{where}: {reason}expected {_EXAMPLE_OF_LABELS}")


def parse_mask(label: str, text: str) -> Leaf:
    """Parses the mask of a label: a condition, or the name of a column of 0 and 1.

    Raises:
        ConfigError: a condition that cannot be parsed.
    """
    if re.fullmatch(rf"\s*{_QUOTED}\s*", text, re.DOTALL):
        return Flag(_column(_tree(text)), "equal", 1)
    return parse_condition(label, text, "mask") if _LEFT.match(text) else Flag(text, "equal", 1)


def column_text(name: str) -> str:
    """Writes a column name as conditions read it: unchanged, or as ``column('any name')``."""
    left = _LEFT.match(f"{name} ==")
    return name if left and left[1] == name and left[0] == f"{name} ==" else f"column({name!r})"


def _tree(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about escapes in text
        return ast.parse(text.strip(), mode="eval").body


def _instead(text: str, before: str = ": ") -> str:
    """Returns a hint that names the operator to use instead of one of another language. Empty if the text has none."""
    outside = re.sub(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", "''", text)
    for theirs, ours in _OF_OTHERS.items():
        if found := re.search(theirs, outside):
            return f"{before}write {ours}, not {found[1] if found.re.groups else found[0]}"
    return ""


def _condition(node: ast.expr) -> Condition:
    match node:
        case ast.BoolOp():
            operator = "and_kleene" if isinstance(node.op, ast.And) else "or_kleene"
            return Joined(operator, tuple(map(_condition, node.values)))
        case ast.UnaryOp(op=ast.Not()):
            return Not(_condition(node.operand))
        case ast.Compare():
            sides = [node.left, *node.comparators]
            parts = tuple(map(_comparison, sides, node.ops, sides[1:]))
            return parts[0] if len(parts) == 1 else Joined("and_kleene", parts)
    raise _refused(node, "is not a comparison")


def _comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition:
    if isinstance(operator, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Name | ast.Constant) and _value(right) is None):
            raise _refused(right, "is not null, the only word allowed after 'is' and 'is not'")
        missing = Missing(_column(left))
        return missing if isinstance(operator, ast.Is) else Not(missing)
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise _refused(right, "is not a list of values, as 'in' needs")
        values = tuple(map(_known, right.elts))
        if len({isinstance(value, str) for value in values}) > 1:
            raise _refused(right, "has both text and numbers")
        one_of = OneOf(_column(left), values)
        return one_of if isinstance(operator, ast.In) else Not(one_of)
    name = _OPERATORS[type(operator)]
    if _is_column(left) == _is_column(right):
        other = ast.unparse(right)
        raise _refused(left, f"and {other!r}: expected a column on one side and a value on the other")
    if _is_column(left):
        return Comparison(_column(left), name, _known(right))
    return Comparison(_column(right), _TURNED.get(name, name), _known(left))


def _is_column(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id not in _WORDS) or isinstance(node, ast.Call)


def _column(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) if name not in _WORDS:
            return name
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))], keywords=[]):
            return name
    raise _refused(node, "is not a column: expected a name, or column('any name')")


def _known(node: ast.expr) -> Value:
    value = _value(node)
    if value is None:
        raise _refused(node, "cannot be compared: write 'is null', or 'is not null'")
    return value


def _value(node: ast.expr) -> Value | None:
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.Constant(value=str() | bool() | None as value):
            return value
        case ast.Constant(value=int() | float() as value) if -(1 << 63) <= value < 1 << 64:
            return value
        case ast.UnaryOp(
            op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)
        ) if not isinstance(value, bool) and value < 1 << 64:
            return value if isinstance(sign, ast.UAdd) else -value
    raise _refused(node, "is not a value: expected a number, 'text' in quotes, true or false")


def _refused(node: ast.expr, why: str) -> ConfigError:
    return ConfigError(f"{ast.unparse(node)!r} {why}")
