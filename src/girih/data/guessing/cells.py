"""The meaning of the text in a sample's cells: missing values, local numbers, lists, pairs of id and weight, padding.

Shapes: R rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, lists, times
from girih.data.decode.columns import Notation

_DOUBTFUL = {"NA", "-", "--", "nil"}
"""Texts that mean a missing value only where the others of a column are numbers or times."""
_UNITS = ("%", "$", "€", "£", "¥", "₹", "USD", "EUR", "GBP", "US$")
_MARKS = (
    (".", None),
    (".", ","),
    (",", None),
    (",", "."),
    (",", " "),
    (".", " "),
    (".", "'"),
    (",", "\u202f"),
    (",", "\xa0"),
)
_LIST = r"^\s*[\[(].*[\])]\s*$"
_SEPARATORS = ("|", ";", ",", " ", "")
_LEAST_ROWS, _LEAST_PADDED = 20, 0.2
Options = dict[str, Any]


class Cells:
    """The columns of a sample, text read as what it is.

    Args:
        table: R rows; ``is_text`` says that cells have no types.

    Attributes:
        table: integers, floats, times or lists where all text of a column is such, else strings.
        data: options of ``[data]`` that this takes, each with the reason for it.
        features: options of a column's feature.
    """

    def __init__(self, table: Any, *, is_text: bool) -> None:
        self.data: dict[str, tuple[Any, str]] = {}
        self.features: dict[str, Options] = {}
        arrays = {name: columns.flat(table[name]) for name in table.column_names}
        nulls = {name: _null_words(array) for name, array in arrays.items()}
        words = sorted(set(itertools.chain(*nulls.values())))
        if words:
            where = next(name for name, found in nulls.items() if found)
            self.data["null_values"] = (words, f"texts that seem to mean a missing value, as in {where!r}")
            arrays = {name: columns.without_texts(array, tuple(words)) for name, array in arrays.items()}
        read = {name: typed(array, is_text) for name, array in arrays.items()}
        text = [name for name, array in read.items() if columns.is_string(array.type)]
        if is_text and text:
            read |= self._local_numbers({name: read[name] for name in text})
        for name, array in read.items():
            if columns.is_string(array.type):
                read[name] = self._lists(name, array)
            self._pad(name, read[name])
        self.table = pa.table(read)

    def _local_numbers(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Columns that are numbers in a notation: the one that reads most of them."""
        best: dict[str, Any] = {}
        for decimal, thousands in _MARKS:
            notation = Notation(decimal=decimal, thousands=thousands, units=_UNITS)
            found = {}
            for name, array in arrays.items():
                plain = notation.plain(array)
                if plain.null_count < len(plain) and not _any(plain, "?"):
                    found[name] = plain.cast(pa.float64())
            if len(found) > len(best):
                best = found
                units = [unit for unit in _UNITS if any(_any(arrays[name], unit) for name in found)]
                why = f"of numbers such as {arrays[next(iter(found))].drop_null()[0].as_py()!r}"
                self.data |= {"decimal": (decimal, why), "thousands": (thousands, why), "units": (units, why)}
        for name, default in (("decimal", "."), ("thousands", None), ("units", [])):
            if name in self.data and self.data[name][0] == default:
                del self.data[name]
        return best

    def _lists(self, name: str, array: Any) -> Any:
        """The lists that a column of strings holds; the column as it is if it holds none."""
        present = array.drop_null()
        if len(present) and pc.all(pc.match_substring_regex(present, _LIST)).as_py():
            values, offsets, good = lists.in_brackets(array)
            if good.all():
                self.features[name] = {"list_format": "brackets"}
                return _as_lists(values, offsets)
        for separator, mark in itertools.product(_SEPARATORS, (":", "=")):
            if not len(present) or not pc.all(pc.match_substring(present, mark)).as_py():
                continue
            piece = rf"[^{mark}|;, ]+{mark}[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
            several = rf"(?:\s*[{separator}]\s*{piece})*" if separator else ""
            is_pairs = pc.match_substring_regex(present, rf"^{piece}{several}$")
            if not pc.all(is_pairs).as_py() or (separator and not _any(present, separator)):
                continue
            if not separator and not pc.all(pc.match_substring(present, ".")).as_py():
                continue  # times of a day, and versions
            pieces, bounds = columns.pieces(array, separator or None)
            ids, _, good = lists.ids_and_weights(pieces, mark)
            if (good | pieces.is_null().to_numpy(zero_copy_only=False)).all():
                split = {"separator": separator} if separator else {}
                self.features[name] = {**split, "weight_separator": mark}
                ids = pc.if_else(pieces.is_null(), None, ids)
                return typed(ids, True) if bounds is None else _as_lists(ids, bounds)
        return array

    def _pad(self, name: str, array: Any) -> None:
        """Notes the id that fills the lists of a column up to one length, if there is such an id."""
        separator = None
        if columns.is_string(array.type):
            counts = {each: pc.unique(pc.count_substring(array.drop_null(), each)) for each in "|;, "}
            separator = next(
                (each for each, found in counts.items() if len(found) == 1 and found[0].as_py()), None
            )
            if separator is None:
                return
            array = pc.split_pattern(array, separator)
        if not columns.is_list(array.type):
            return
        rows = [row for row in array.to_pylist() if row]
        if len(rows) < _LEAST_ROWS or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
            return
        for last in (-1, 0):
            ends = [row[last] for row in rows]
            padding = max(set(ends), key=ends.count)
            kept = [[id for id in row if id != padding] for row in rows]
            whole = all(
                ids == (row[: len(ids)] if last else row[len(row) - len(ids) :])
                for ids, row in zip(kept, rows, strict=True)
            )
            if (
                whole
                and len({len(ids) for ids in kept}) > 2
                and ends.count(padding) >= _LEAST_PADDED * len(rows)
            ):
                integer = str(padding).lstrip("-").isdigit()
                self.features.setdefault(name, {})["padding_id"] = int(padding) if integer else padding
                return


def _any(array: Any, text: str) -> bool:
    return bool(pc.any(pc.match_substring(array, text)).as_py())


def _as_lists(values: Any, offsets: Any) -> Any:
    """Lists of text, of integers where all of it is such."""
    values = typed(values, True)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _null_words(array: Any) -> list[str]:
    """Words of a column that mean a missing value."""
    array = columns.plain(array)
    if not columns.is_string(array.type):
        return []
    words = columns.string_values(array).drop_null()
    known = pa.array([word.encode() for word in columns.NULL_WORDS], words.type)
    found = [
        word.decode()
        for word in pc.unique(words.filter(pc.is_in(columns.trimmed(words), value_set=known))).to_pylist()
    ]
    if not found:
        return []
    rest = typed(columns.without_texts(array, tuple(found)), True)
    sure = rest.null_count < len(rest) and not columns.is_string(rest.type)
    return [word for word in found if sure or word.strip() not in _DOUBTFUL]


def typed(array: Any, numbers: bool) -> Any:
    """A column; cells of text that all are such as integers, floats or times.

    Args:
        numbers: False for text of a format that has types: text that spells numbers stays text where few values differ.
    """
    array = columns.plain(array)
    if not columns.is_string(array.type) or array.null_count == len(array):
        return array
    words = columns.string_values(array)
    kinds: tuple[Callable[[], Any], ...] = (pa.int64, pa.uint64, pa.float64)
    if not numbers and pc.count_distinct(words).as_py() <= 2:
        kinds = ()
    for kind in kinds:
        try:
            return pc.ascii_trim_whitespace(words.cast(pa.large_string())).cast(kind())
        except pa.ArrowInvalid:
            continue
    found, read = times.text_times(words)
    if read.all() and pc.min(pc.binary_length(words)).as_py() >= len("2024-05-01"):
        return pa.array(found, mask=columns.null_mask(array)).cast(pa.timestamp("us"))
    return words.cast(pa.large_string(), safe=False)
