"""A column's kind, guessed by its name, its type and the values of a sample.

Shapes: R rows, M values in lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, times

Kind = Literal["categorical", "sequence", "numeric", "time", "left out"]
OUTCOME = "by its name it may be an outcome too, which a model must not see; make it a feature if it is known before"
FEW, LONG_TEXT, ALL_DIFFER = 50, 60, 0.99
_MOST_S = 10 * times.YEAR_S
_BEYOND = float(1 << 53)
LEAST_ROWS = 50  # from which on values that all differ are told from few rows
_COUNTS = r"price|cost|amount|count|cnt|num|nr|age|duration|length|len|score|rate|ratio|rank|avg|mean|sum|total|size|width|height|distance|weight|pct|percent|value|revenue|budget|bid|quantity|qty|days|hours|minutes|seconds|ms|year_of_birth|views|likes"
_IDS = r"id|ids|uid|user|item|code|cat|category|type|kind|key|hash|zip|country|city|region|device|os|browser|brand|genre|genres|tag|tags|channel|site|domain|app|campaign|ad|slot|position|segment|cluster|gender|lang|language|year|month|day|hour|weekday"
_TIMES = r"time|timestamp|ts|date|datetime|at|day|dt|ms"
_ROWS = r"index|row|rowid|unnamed|impression|request|session|event|uuid|guid|log"
_PAST = (
    r"hist|history|seq|sequence|past|previous|prev|recent|last|viewed|clicked|watched|bought|items|sessions"
)
_SEPARATORS = "|;,^ "
_OUTCOMES = r"follow|comment|forward|hate|share|shared|stay|play|played|dwell|watch|skip|skipped|view"
_DATE = r"^[0-9]{1,4}[/.][0-9]{1,2}[/.][0-9]{2,4}(?: |$)"
_NUMBERED = re.compile(r"[a-z]+|[0-9]+")


@dataclass(frozen=True, slots=True)
class Guess:
    """The kind that a column seems to be, the options of its feature, and why."""

    column: str
    kind: Kind
    why: str
    options: dict[str, Any] = field(default_factory=dict)


def guess_kind(
    name: str, array: Any, *, counts: bool = False, cells: Mapping[str, Any] | None = None
) -> Guess:
    """Guesses one column's kind from R values.

    Args:
        counts: its numbers are no ids. cells: the options by which its cells are read.
    """
    found = _guess_any(name, array, counts)
    if cells and found.kind in ("categorical", "sequence"):
        why = found.why
        if "padding_id" in cells:
            why += f"; {cells['padding_id']!r} seems to fill them up to one length: drop padding_id if it is an id"
        return replace(found, why=why, options={**cells, **found.options})
    return found


def _guess_any(name: str, array: Any, counts: bool) -> Guess:
    present = array.drop_null()
    if not len(present):
        return Guess(name, "left out", "it is missing in every row of the sample")
    missing = 1 - len(present) / len(array)
    found = _guess(name, present)
    if counts and columns.kind_of(array.type) in ("integers", "floats"):
        found = _of_numbers(name, present.cast(pa.float64()), "numbers, by the format,")
    elif (
        named(name, _OUTCOMES)
        and not named(name, _IDS)
        and columns.kind_of(array.type) in ("integers", "floats", "booleans")
    ):
        return Guess(name, "left out", OUTCOME)
    if missing >= 0.01 and found.kind != "left out":
        return Guess(name, found.kind, f"{found.why}; {missing:.0%} are missing", found.options)
    return found


def named(name: str, words: str) -> bool:
    """Whether one of a name's words, as of ``userId`` or ``user_id``, is among some."""
    return any(re.fullmatch(words, part) for part in words_of(name))


def words_of(name: str) -> list[str]:
    """The words of a name such as ``userId`` or ``user_id``, in lower case."""
    return _NUMBERED.findall(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def _guess(name: str, values: Any) -> Guess:
    kind = values.type
    word = columns.kind_of(kind)
    if times.is_time(kind):
        doubt = times.doubt(values)
        return Guess(
            name,
            "time",
            "".join(("dates" if pa.types.is_date(kind) else f"{kind}", f"; {doubt}" * bool(doubt))),
        )
    if word.startswith("lists of "):
        return _of_list(name, values, word)
    if word == "strings":
        return _of_strings(name, values)
    if word == "booleans":
        return Guess(name, "categorical", "true or false")
    if word == "integers":
        return _of_integers(name, values)
    if word == "floats" and named(name, _TIMES) and _are_whole(values):
        guess = _of_integers(name, values.cast(pa.int64()))
        if guess.kind == "time" or "times" in guess.why:
            return guess
    if word == "floats" and named(name, _IDS) and not named(name, _COUNTS) and _are_whole(values):
        why = f"ids by the name, written as floats, {_different(pc.count_distinct(values).as_py(), len(values))}"
        return Guess(
            name,
            "categorical",
            f"{why}: astype('Int64') in pandas would write them as integers",
            {"float_ids": True},
        )
    if word == "floats" or word.startswith("decimal"):
        return _of_numbers(name, values.cast(pa.float64()), "floating-point numbers")
    return Guess(name, "left out", f"{kind} is no number, text, time or list of these")


def _are_whole(values: Any) -> bool:
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return bool((numbers == np.floor(numbers)).all() and np.abs(numbers).max(initial=0.0) <= _BEYOND)


def _of_list(name: str, values: Any, word: str) -> Guess:
    if word.removeprefix("lists of ") not in ("integers", "strings", "booleans"):
        return Guess(name, "left out", f"{word}: ids are integers or strings")
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
    return _bag(name, f"{word}, {lengths.mean():.1f} each", lengths, {})


def _bag(name: str, why: str, lengths: Any, options: dict[str, Any]) -> Guess:
    """A list of ids: in order, where the name speaks of what was before."""
    longest, usual = int(lengths.max()), int(np.percentile(lengths, 95))
    if longest > 2 * max(1, usual):
        options = {**options, "max_length": max(1, usual)}
    if named(name, _PAST):
        return Guess(name, "sequence", f"{why}; by its name they are in order", options)
    return Guess(name, "categorical", f"{why}: a bag", options)


def _of_strings(name: str, values: Any) -> Guess:
    distinct, size = pc.count_distinct(values).as_py(), len(values)
    words = pc.ascii_trim_whitespace(values.cast(pa.large_string())).cast(pa.large_binary())
    separator = separator_in(name, words)
    if separator is not None:
        lists = pc.split_pattern(words, separator)
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        return _bag(
            name, f"{lengths.mean():.1f} pieces each between {separator!r}", lengths, {"separator": separator}
        )
    if distinct == 1:
        return _constant(name, values)
    if size >= LEAST_ROWS and distinct > ALL_DIFFER * size and not named(name, _IDS):
        return Guess(name, "left out", "different text in every row: it would be learnt by heart")
    if size >= LEAST_ROWS and distinct == size and named(name, _ROWS):
        return _row_number(name)
    if pc.mean(pc.binary_length(words)).as_py() > LONG_TEXT:
        return Guess(name, "left out", "long text, which girih does not read as words")
    why = f"text, {_different(distinct, size)}"
    if pc.all(pc.match_substring_regex(words, _DATE)).as_py():
        why += "; dates such as these are not read as times: write 2024-05-31"
    return Guess(name, "categorical", why)


def separator_in(name: str, words: Any) -> str | None:
    """The character between pieces: in many values, with pieces that come again, and, where it is a space, without letters."""
    for separator in _SEPARATORS:
        having = pc.mean(pc.match_substring(words, separator.encode()).cast(pa.int8())).as_py()
        if having < 0.2:
            continue
        pieces = pc.split_pattern(words, separator).flatten()
        pieces = pieces.filter(pc.greater(pc.binary_length(pieces), 0))
        if not len(pieces):
            continue
        distinct = pc.count_distinct(pieces).as_py()
        numbers = pc.all(pc.match_substring_regex(pieces, "^-?[0-9]+$")).as_py()
        if numbers and len(pc.unique(pc.count_substring(words, separator))) > 1:
            return separator  # lists of other lengths, whatever their ids
        spoken = separator in " ," and not numbers and not named(name, _PAST + "|tags|genres|ids|categories")
        if distinct < 0.5 * len(pieces) and distinct <= 2 * pc.count_distinct(words).as_py() and not spoken:
            return separator
    return None


def _of_integers(name: str, values: Any) -> Guess:
    distinct, size = pc.count_distinct(values).as_py(), len(values)
    least, most = (each.as_py() for each in pc.min_max(values).values())
    if distinct == 1:
        return _constant(name, values)
    unnamed = re.fullmatch(r"column[0-9]+", name) is not None
    if (named(name, _TIMES) or unnamed) and distinct > FEW:
        for unit, per_second in times.PER_SECOND.items():
            first, last = least // per_second, most // per_second
            if first >= 5 * 10**8 and last < 4 * 10**9 and (not unnamed or last - first < _MOST_S):
                why = f"numbers since 1970 in {unit}, by {'their' if unnamed else 'its name and'} size"
                doubt = times.doubt(values, unit)
                return Guess(name, "time", f"{why}; {doubt}" if doubt else why, {"time_unit": unit})
    rises = bool((np.diff(values.to_numpy(zero_copy_only=False)) > 0).all())
    if (
        size >= LEAST_ROWS
        and distinct == size
        and (named(name, _ROWS) or name.lower() == "id" or most - least == size - 1 or rises)
    ):
        return _row_number(name)
    if named(name, _TIMES) and distinct > FEW and (doubt := times.doubt(values)):
        return Guess(name, "left out", doubt)
    ids, counts = named(name, _IDS), named(name, _COUNTS)
    if counts and not ids and distinct > 2:
        return _of_numbers(name, values.cast(pa.float64()), "integers that count something by their name,")
    if least < 0 and not ids and most - least < 10**7:
        return _of_numbers(name, values.cast(pa.float64()), "integers, some below 0,")
    if ids or distinct <= FEW or most - least > 10 * distinct:
        return Guess(
            name, "categorical", f"integers, {_different(distinct, size)}{', ids by the name' if ids else ''}"
        )
    return Guess(
        name,
        "categorical",
        f'integers, {_different(distinct, size)}; kind = "numeric" if they count something',
    )


def _of_numbers(name: str, values: Any, subject: str) -> Guess:
    numbers = values.to_numpy(zero_copy_only=False)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() == numbers.max():
        return _constant(name, values)
    if numbers.max() > _BEYOND and named(name, "id|uid|uuid|key|hash"):
        return Guess(
            name,
            "left out",
            "ids as floating-point numbers, which tell no two large ones apart: write them as integers or text",
        )
    low, middle, high = np.percentile(numbers, [0, 50, 99])
    skewed = low >= 0 and high > 10 * max(middle, 1e-12) and high > 10
    transform = ["log1p", "standardize"] if skewed else ["standardize"]
    why = f"{subject} from {low:.3g} to {numbers.max():.3g}"
    return Guess(
        name, "numeric", why + (", a few far above the rest" if skewed else ""), {"transform": transform}
    )


def _constant(name: str, values: Any) -> Guess:
    return Guess(name, "left out", f"{str(values[0].as_py())[:40]!r} in every row of the sample")


def _row_number(name: str) -> Guess:
    return Guess(name, "left out", "another value in every row: it tells rows apart, and nothing about them")


def _different(distinct: int, size: int) -> str:
    return f"{distinct:,} different in {size:,} rows"
