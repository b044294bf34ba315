"""Guesses a column's kind from its name, its type and the values of a sample.

Shapes: R rows, M values in lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, times
from girih.kernels.cpu.arrays import I64

Kind = Literal["categorical", "sequence", "numeric", "time", "left out"]
OUTCOME = "by its name it may be another outcome, which a model must not see; make it a feature if it is known before the label"
FEW, LONG_TEXT, ALL_DIFFER = 50, 60, 0.99
_MOST_S = 10 * times.YEAR_S
_BEYOND, _MOST_TIME = float(1 << 53), 9e18
LEAST_ROWS = 50  # with fewer rows, values may all differ by chance
COUNTS = r"price|cost|amount|count|cnt|num|nr|age|duration|length|len|score|rate|ratio|rank|avg|mean|sum|total|size|width|height|distance|weight|pct|percent|value|revenue|budget|bid|quantity|qty|days|hours|minutes|seconds|ms|year_of_birth|views|likes"
_IDS = r"id|ids|uid|user|item|code|cat|category|type|kind|key|hash|zip|country|city|region|device|os|browser|brand|genre|genres|tag|tags|channel|site|domain|app|campaign|ad|slot|position|segment|cluster|gender|lang|language|year|month|day|hour|weekday"
_TIMES = r"time|timestamp|ts|date|datetime|at|day|dt|ms"
_ROWS = r"index|row|rowid|unnamed|impression|request|session|event|uuid|guid|log"
_PAST = (
    r"hist|history|seq|sequence|past|previous|prev|recent|last|viewed|clicked|watched|bought|items|sessions"
)
_SEPARATORS = "|;,^\x02# "
_THOUSANDS = r"^\s*\d{1,3}(,\d{3}){0,3}\s*$"
_LISTS = f"{_PAST}|tags|genres|ids|categories"
_OUTCOMES = r"follow|comment|forward|hate|share|shared|stay|play|played|dwell|watch|skip|skipped|view"
_DATE = r"^[0-9]{1,4}[/.][0-9]{1,2}[/.][0-9]{2,4}(?: |$)"
_NUMBERED = re.compile(r"[a-z]+|[0-9]+")


@dataclass(frozen=True, slots=True)
class Guess:
    """The likely kind of a column, the options of its feature, and the reason."""

    column: str
    kind: Kind
    why: str
    options: Mapping[str, object] = field(default_factory=dict)


def guess_kind(name: str, array: pa.Array, *, counts: bool, cells: Mapping[str, object]) -> Guess:
    """Guesses one column's kind from R values.

    Args:
        counts: the column's numbers are not ids. cells: options to read its cells, or the reason why they cannot be
            read.
    """
    if "doubt" in cells:
        return Guess(name, "left out", str(cells["doubt"]))
    guess = _guess_any(name, array, counts)
    if guess.kind not in ("categorical", "sequence"):
        return guess
    why = guess.why
    if "padding_id" in cells:
        why += (
            f"; {cells['padding_id']!r} seems to fill them up to one length: drop padding_id if it is an id"
        )
    return replace(guess, why=why, options={**cells, **guess.options})


def _guess_any(name: str, array: pa.Array, counts: bool) -> Guess:
    present = array.drop_null()
    if not len(present):
        return Guess(name, "left out", "it is missing in every row of the sample")
    missing, word = 1 - len(present) / len(array), columns.kind_of(array.type)
    guess = _guess(name, present)
    if counts and word in ("integers", "floats"):
        guess = _of_numbers(name, present.cast(pa.float64()), "numbers, by the format,")
    elif named(name, _OUTCOMES) and not named(name, _IDS) and word in ("integers", "floats", "booleans"):
        return Guess(name, "left out", OUTCOME)
    if missing >= 0.01 and guess.kind != "left out":
        return Guess(name, guess.kind, f"{guess.why}; {missing:.0%} are missing", guess.options)
    return guess


def named(name: str, words: str) -> bool:
    """Returns whether a name contains one of some words. For example, ``userId`` and ``user_id`` contain ``user``."""
    return any(re.fullmatch(words, part) for part in words_of(name))


def is_of_ids(name: str) -> bool:
    """Returns whether a name suggests ids or lists of ids, and not numbers."""
    return named(name, f"{_IDS}|{_PAST}") and not named(name, COUNTS)


def words_of(name: str) -> list[str]:
    """Returns the words of a name such as ``userId`` or ``user_id``, in lower case."""
    return _NUMBERED.findall(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def _guess(name: str, values: pa.Array) -> Guess:
    kind = values.type
    word = columns.kind_of(kind)
    if times.is_time(kind):
        doubt = times.doubt(values)
        return Guess(
            name, "time", f"{'dates' if pa.types.is_date(kind) else kind}{f'; {doubt}' if doubt else ''}"
        )
    if word.startswith("lists of "):
        return _of_list(name, values, word)
    if word == "strings":
        return _of_strings(name, values)
    if word == "booleans":
        return Guess(name, "categorical", "true or false")
    if word == "integers":
        return _of_integers(name, values)
    if word == "floats" and named(name, _TIMES) and pc.max(pc.abs(values)).as_py() < _MOST_TIME:
        guess = _of_integers(name, values.cast(pa.int64(), safe=False))
        if guess.kind == "time" or "times" in guess.why:
            return guess
    if word == "floats" and is_of_ids(name) and _are_whole(values):
        why = f"ids by the name, written as floats, {_different(pc.count_distinct(values).as_py(), len(values))}"
        why += ": astype('Int64') in pandas would write them as integers"
        return Guess(name, "categorical", why, {"float_ids": True})
    if word == "floats" or word.startswith("decimal"):
        return _of_numbers(name, values.cast(pa.float64()), "floating-point numbers")
    return Guess(name, "left out", f"{kind} is not a number, text, time or list of these")


def _are_whole(values: pa.Array) -> bool:
    numbers = values.cast(pa.float64()).drop_null().to_numpy(zero_copy_only=False)
    numbers = numbers[~np.isnan(numbers)]
    return bool((numbers == np.floor(numbers)).all() and np.abs(numbers).max(initial=0.0) <= _BEYOND)


def _of_list(name: str, values: pa.Array, word: str) -> Guess:
    options = {"float_ids": True} if word == "lists of floats" and _are_whole(values.flatten()) else {}
    if not options and word.removeprefix("lists of ") not in ("integers", "strings", "booleans"):
        return Guess(name, "left out", f"{word}: ids are integers or strings")
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
    return _bag(name, f"{word}, {lengths.mean():.1f} each", lengths, options)


def _bag(name: str, why: str, lengths: I64, options: Mapping[str, object]) -> Guess:
    """Returns the guess for a list of ids: a sequence if its name suggests history, else a bag."""
    longest, usual = int(lengths.max()), int(np.percentile(lengths, 95))
    if longest > 2 * max(1, usual):
        options = {**options, "max_length": max(1, usual)}
    if named(name, _PAST):
        return Guess(name, "sequence", f"{why}; by its name they are in order", options)
    return Guess(name, "categorical", f"{why}: a bag", options)


def _of_strings(name: str, values: pa.Array) -> Guess:
    distinct, size = pc.count_distinct(values).as_py(), len(values)
    words = pc.ascii_trim_whitespace(values.cast(pa.large_string())).cast(pa.large_binary())
    separator = separator_in(name, words)
    if separator is not None:
        lengths = pc.list_value_length(pc.split_pattern(words, separator)).to_numpy(zero_copy_only=False)
        pieces, _ = columns.pieces(words, separator)
        numbers, _ = columns.string_numbers(pieces)
        if np.isfinite(numbers).all() and (numbers % 1 > 0).any():
            return Guess(
                name, "left out", "lists of floats: the option weights of another list may name them"
            )
        _, floats = columns.scalar_ids(pieces)
        options = {"float_ids": True} if floats is not None and floats.any() else {}
        why = f"{lengths.mean():.1f} pieces each between {separator!r}"
        return _bag(name, why, lengths, {"separator": separator, **options})
    if distinct == 1:
        return _constant(name, values)
    if size >= LEAST_ROWS and distinct > ALL_DIFFER * size and not named(name, _IDS):
        return Guess(name, "left out", "different text in every row: a model would memorize it")
    if size >= LEAST_ROWS and distinct == size and named(name, _ROWS):
        return _row_number(name)
    if pc.mean(pc.binary_length(words)).as_py() > LONG_TEXT:
        return Guess(name, "left out", "long text, which girih does not read as words")
    why = f"text, {_different(distinct, size)}"
    if named(name, COUNTS):
        why += "; if these are numbers, see decimal, thousands and units of [data]"
    if pc.all(pc.match_substring_regex(words, _DATE)).as_py():
        why += "; dates such as these are not read as times: write 2024-05-31"
    return Guess(name, "categorical", why)


def separator_in(name: str, words: pa.Array) -> str | None:
    """Returns the character that separates pieces of values, or None.

    Many values must contain it, and the pieces must repeat. Pieces between spaces or commas must be numbers, unless the
    name suggests lists.
    """
    is_number = not named(name, _LISTS) and pc.all(pc.match_substring_regex(words, _THOUSANDS)).as_py()
    for separator in _SEPARATORS:
        having = pc.mean(pc.match_substring(words, separator.encode()).cast(pa.int8())).as_py()
        pieces, _ = columns.pieces(words, separator)
        if having < 0.2 or not len(pieces) or (is_number and separator == ","):
            continue
        distinct = pc.count_distinct(pieces).as_py()
        numbers = pc.all(pc.match_substring_regex(pieces, "^-?[0-9]+$")).as_py()
        if numbers and len(pc.unique(pc.count_substring(words, separator))) > 1:
            return separator  # lists of different lengths, regardless of their ids
        spoken = separator in " ," and not numbers and not named(name, _LISTS)
        if distinct < 0.5 * len(pieces) and distinct <= 2 * pc.count_distinct(words).as_py() and not spoken:
            return separator
    return None


def _of_integers(name: str, values: pa.Array) -> Guess:
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
    counted = named(name, _ROWS) or name.lower() == "id" or most - least == size - 1 or rises
    if size >= LEAST_ROWS and distinct == size and counted:
        return _row_number(name)
    if named(name, _TIMES) and distinct > FEW and (doubt := times.doubt(values)):
        return Guess(name, "left out", doubt)
    ids, counts = named(name, _IDS), named(name, COUNTS)
    if counts and not ids and distinct > 2:
        return _of_numbers(name, values.cast(pa.float64()), "integers that count something by their name,")
    if least < 0 and not ids and most - least < 10**7:
        return _of_numbers(name, values.cast(pa.float64()), "integers, some below 0,")
    why = f"integers, {_different(distinct, size)}"
    if ids:
        why += ", ids by the name"
    elif distinct > FEW and most - least <= 10 * distinct:
        why += '; kind = "numeric" if they count something'
    return Guess(name, "categorical", why)


def _of_numbers(name: str, values: pa.Array, subject: str) -> Guess:
    numbers = values.to_numpy(zero_copy_only=False)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() == numbers.max():
        return _constant(name, values)
    if numbers.max() > _BEYOND and named(name, "id|uid|uuid|key|hash"):
        why = "ids as floating-point numbers, which cannot distinguish large ids: write them as integers or text"
        return Guess(name, "left out", why)
    low, middle, high = np.percentile(numbers, [0, 50, 99])
    skewed = low >= 0 and high > 10 * max(middle, 1e-12) and high > 10
    transform = ["log1p", "standardize"] if skewed else ["standardize"]
    why = f"{subject} from {low:.3g} to {numbers.max():.3g}{', a few far above the rest' if skewed else ''}"
    return Guess(name, "numeric", why, {"transform": transform})


def _constant(name: str, values: pa.Array) -> Guess:
    return Guess(name, "left out", f"{str(values[0].as_py())[:40]!r} in every row of the sample")


def _row_number(name: str) -> Guess:
    return Guess(name, "left out", "a different value in every row: it only identifies the row")


def _different(distinct: int, size: int) -> str:
    return f"{distinct:,} different in {size:,} rows"
