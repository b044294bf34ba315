"""Conditions that derive labels from columns, as in ``rating >= 4``.

A column is a name, or ``column('any name')`` where the name has an operator in it, as in :mod:`girih.data.decode.where`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_QUOTED = r"""column\(\s*((?:'(?:[^'\\]|\\.)*')|(?:"(?:[^"\\]|\\.)*"))\s*\)"""
_QUOTED_ALONE = re.compile(rf"\s*{_QUOTED}\s*", re.DOTALL)
_PATTERN = re.compile(
    rf"^\s*(?:{_QUOTED}|([^=<>!]+?))\s*(?:(==|!=|<=|>=|<|>)|(?:\s|(?<=\)))(in)\b)\s*(.+?)\s*$", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Condition:
    """``column operator literal``; the literal is a number, a string, or a tuple of either.

    Attributes:
        is_flag: the column has nothing but 0 and 1.
    """

    column: str
    operator: str
    literal: Any
    is_flag: bool = False

    @property
    def on_strings(self) -> bool:
        """True where the column is compared with strings."""
        return isinstance(self.literal[0] if isinstance(self.literal, tuple) else self.literal, str)

    def holds(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Which values meet the condition: numbers, or an object array of ``bytes``.

        Returns:
            bool[R].
        """
        literal = self.literal
        if self.on_strings:
            encode = str.encode
            literal = tuple(map(encode, literal)) if isinstance(literal, tuple) else encode(literal)
        if self.operator == "in":
            return np.isin(values, np.array(literal, dtype=object if self.on_strings else None))
        return np.asarray(_COMPARISONS[self.operator](values, literal), dtype=np.bool_)


def column_text(name: str) -> str:
    """Writes the name of a column as conditions read it: as it is, or as ``column('any name')``."""
    match = _PATTERN.match(f"{name} == 0")
    return name if match and match[2] == name and match[3] == "==" else f"column({name!r})"


def parse_mask(label: str, text: str) -> Condition:
    """Parses the mask of a label: a condition, or the name of a column of 0 and 1.

    Raises:
        ConfigError: a condition that cannot be understood.
    """
    if quoted := _QUOTED_ALONE.fullmatch(text):
        return Condition(_unquoted(quoted[1], f"labels: mask {label!r} = {text!r}"), "==", 1, is_flag=True)
    if _PATTERN.match(text):
        return parse_condition(label, text, "mask")
    return Condition(text, "==", 1, is_flag=True)


def parse_condition(label: str, text: str, option: str = "derive") -> Condition:
    """Parses the condition of a derived label, or of a label's mask.

    Raises:
        ConfigError: not a condition, with an example of one.
    """
    where = f"labels: {option} {label!r} = {text!r}"
    match = _PATTERN.match(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f"{where}: expected a column, one of == != < <= > >= in, and a value, as in 'rating >= 4' or"
            " \"column('any name') >= 4\""
        )
    column = _unquoted(match[1], where) if match[1] else match[2]
    comparison, written = match[3] or match[4], match[5]
    try:
        literal: Any = ast.literal_eval({"true": "True", "false": "False"}.get(written, written))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError(
            f"{where}: {written!r} is not a value; expected a number, 'text' in quotes, or a list"
        ) from None
    values: tuple[Any, ...] = (literal,)
    if comparison == "in":
        if not isinstance(literal, list | tuple | set) or not literal:
            raise ConfigError(f"{where}: 'in' needs a list with values, as in 'tab in [1, 2]'")
        literal = values = tuple(sorted(literal, key=repr) if isinstance(literal, set) else literal)
    are_strings = all(isinstance(value, str) for value in values)
    are_numbers = all(isinstance(value, bool | int | float) and value == value for value in values)
    if not (are_strings or are_numbers):
        raise ConfigError(f"{where}: {written} is neither a number, nor a string, nor a list of one of them")
    return Condition(column, comparison, literal)


def _unquoted(text: str, where: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        raise ConfigError(f"{where}: {text} is no name in quotes; expected column('any name')") from None
