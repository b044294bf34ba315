"""The text of conditions on rows, as ``country in ['NL', 'BE'] and not (price > 100 or price is null)``.

The grammar is a small part of Python's, which Python's own parser reads; nothing of it is evaluated as Python:

    condition  = comparison | condition and condition | condition or condition | not condition | ( condition )
    comparison = column OP value | value OP column [OP value] | column [not] in [value, ...] | column is [not] null
    OP         = == | != | < | <= | > | >=
    column     = a name, or column('any name')
    value      = a number | 'text' | true | false
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping

from girih.data.decode.where import Comparison, Condition, Joined, Missing, Not, OneOf, Where
from girih.errors import ConfigError

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


def _known(node: ast.expr, where: str) -> bool | int | float | str:
    value = _value(node, where)
    if value is None:
        raise _refused(node, "is compared: write 'is null', or 'is not null'", where)
    return value


def _value(node: ast.expr, where: str) -> bool | int | float | str | None:
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
