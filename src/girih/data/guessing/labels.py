"""The label of some data, guessed by names and values."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns
from girih.data.decode.conditions import column_text
from girih.data.guessing.kinds import FEW, named
from girih.data.guessing.sample import Sample
from girih.errors import ConfigError, nearest

_LABELS = r"label|labels|click|clicks|clicked|y|target|converted|conversion|purchase|purchased|buy|bought|like|liked|install|installed"
_RATINGS = r"rating|ratings|stars|score"
_YES = ("yes", "true", "y", "t", "1", "click", "clicked")


_Candidate = tuple[str, dict[str, object], str]
"""A column, the section ``[labels]``, and why."""


class Label(NamedTuple):
    """The column to predict, the section ``[labels]``, why it is that one, and other columns that it might have been."""

    column: str
    section: dict[str, object]
    why: str
    others: frozenset[str]


def guess_label(sample: Sample, requested: str | None) -> Label:
    """Guesses what is to be predicted; ``requested`` is the column, where that is known.

    Raises:
        ConfigError: no column may be it.
    """
    table = sample.table
    names = table.column_names
    if requested is not None and requested not in names:
        raise ConfigError(f"--label {requested}: no such column{nearest(requested, names)}")
    by_name = _find_candidates(table, [name for name in names if named(name, _LABELS)])
    if requested is not None:
        tries = [_find_candidates(table, [requested], numbers=True, requested=True)]
    else:
        ratings = _find_candidates(table, [name for name in names if named(name, _RATINGS)], numbers=True)
        numbers = _find_candidates(table, [name for name in names if named(name, _LABELS)], numbers=True)
        tries = [by_name, ratings, numbers, _doubted(_by_values(table, "columns" in sample.options))]
    for candidates in tries:
        if candidates:
            (name, section, why), *others = candidates
            excluded = {other for other, _, _ in (*others, *by_name) if other != name}
            if name.startswith("is_"):
                excluded |= {other for other in names if other.startswith("is_") and other != name}
            return Label(name, section, why, frozenset(excluded))
    which = "no column looks like a label (0 and 1, yes and no, a rating)"
    if requested:
        values = _distinct(columns.flat(table[requested]).drop_null())
        alone = f" ({values[0]!r} alone)" if len(values) == 1 else ""
        which = f"--label {requested}: holds neither 0 and 1, nor two words, nor numbers that differ{alone}"
    raise ConfigError(f"{which}; name one of {', '.join(names[:20])} by --label COLUMN")


def _by_values(table: pa.Table, unnamed: bool) -> list[_Candidate]:
    """The column that is a label by its values: in a table of names most often the last one, without names the first one."""
    names = table.column_names
    if not unnamed:
        return _find_candidates(table, names[-1:], words=True) or _find_candidates(table, names)[:1]
    flags = _find_candidates(table, names)
    if flags and (flags[0][0] == names[0] or (len(flags) == 1 and flags[0][0] == names[-1])):
        return flags[:1]
    ratings = [name for name in names if _is_rating(columns.flat(table[name]))]
    if len(ratings) == 1:
        return _find_candidates(table, ratings, numbers=True)
    first = columns.flat(table[names[0]])
    if columns.kind_of(first.type) == "floats" and pc.count_distinct(first).as_py() > FEW:
        return _find_candidates(table, names[:1], numbers=True)
    flag = flags[-1:] if flags and flags[-1][0] == names[-1] else flags[:1]
    return flag or _find_candidates(table, names[-1:], words=True)


def _is_rating(array: pa.Array) -> bool:
    """Whether values are grades from 0 or 1 to 5 or 10, halves included."""
    values = [value for value in _distinct(array.drop_null()) if isinstance(value, int | float)]
    is_scale = len(values) > 2 and max(values) in (5, 10) and min(values) in (0, 0.5, 1)
    return is_scale and all(2 * value % 1 == 0 for value in values)


def _doubted(candidates: list[_Candidate]) -> list[_Candidate]:
    caveat = "; a guess by its values alone: --label COLUMN names another"
    return [(name, section, why + caveat) for name, section, why in candidates]


def _find_candidates(
    table: pa.Table, names: list[str], *, numbers: bool = False, words: bool = False, requested: bool = False
) -> list[_Candidate]:
    """Those of some columns that may be labels, with the section and the reason."""
    words = words or numbers
    sections = (
        (name, _of_label(name, columns.flat(table[name]), numbers, words, requested)) for name in names
    )
    return [(name, *_with_missing(table[name], *made)) for name, made in sections if made is not None]


def _of_one_value(name: str, value: int) -> str:
    mend = "name another column, or take more rows"
    if value:
        mend = "add negatives ([negatives], or rows with 0), or name another column"
    return f"WARNING: {name} is {value} throughout the sample, from which a model learns to say {value} of everything: {mend}"


def _with_missing(
    column: pa.ChunkedArray, section: dict[str, object], why: str
) -> tuple[dict[str, object], str]:
    """The section of a label that some rows lack has these left out of it."""
    if not column.null_count:
        return section, why
    return section | {"missing": "skip"}, f"{why}; {column.null_count:,} rows of the sample have none"


def _of_label(
    name: str, array: pa.Array, numbers: bool, words: bool, requested: bool
) -> tuple[dict[str, object], str] | None:
    """A label of a column: 0 and 1, one of two words that say yes and no, or

    Args:
        numbers: what is in the upper half of a column of numbers.
        words: the rarer one of any two words.
        requested: the column was named, so that 0 alone, or 1 alone, is taken too.
    """
    present = array.drop_null()
    values = _distinct(present)
    if values and set(values) <= {0, 1} and (len(values) == 2 or requested or named(name, _LABELS)):
        if len(values) == 1:
            return {"names": [name]}, _of_one_value(name, int(1 in values))
        share = pc.mean(present.cast(pa.float64())).as_py()
        return {"names": [name]}, f"{name} is 0 or 1, and 1 in {share:.1%} of the sample"
    if set(values) == {-1, 1}:
        return {"names": [name], "derive": {name: f"{column_text(name)} > 0"}}, f"{name} is -1 or 1"
    if len(values) == 2 and columns.kind_of(present.type) == "strings":
        yes = next((value for value in values if str(value).lower() in _YES), None)
        if yes is not None or words:
            yes = yes or min(values, key=lambda value: pc.sum(pc.equal(present, value)).as_py())
            derived = {name: f"{column_text(name)} == {yes!r}"}
            return {"names": [name], "derive": derived}, f"{name} is one of two words, {values}"
    kind = columns.kind_of(present.type)
    if not numbers or kind not in ("integers", "floats"):
        return None
    ordered = sorted(present.to_pylist())
    cut = next((value for value in ordered[len(ordered) // 2 :] if value > ordered[0]), None)
    if cut is None:
        return None
    good, numeric = f"{name}_high", f'names = ["{name}"], loss = {{ {name} = "mse" }}'
    why = f"{name} goes from {ordered[0]} to {ordered[-1]}: its upper half is 1; choose the bound that you mean,"
    derived = {good: f"{column_text(name)} >= {cut}"}
    return {"names": [good], "derive": derived}, f"{why} or predict the number: {numeric}"


def _distinct(present: pa.Array) -> list[object]:
    """The values of a column where they are few; none of lists and structs, which Arrow does not compare."""
    if not len(present) or pa.types.is_nested(present.type) or pc.count_distinct(present).as_py() > FEW:
        return []
    found: list[object] = pc.unique(present).to_pylist()
    return found
