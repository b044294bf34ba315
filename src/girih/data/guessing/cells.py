"""Guesses the meaning of text in a sample's cells: missing values, local numbers, lists, weighted ids, padding.

Shapes: R rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from girih.data.decode import columns, lists, times
from girih.data.decode.columns import Notation
from girih.data.guessing.kinds import COUNTS, is_of_ids, named, separator_in
from girih.kernels.cpu.arrays import I64

_DOUBTFUL = {"NA", "-", "--", "nil"}
"""Texts that mean a missing value only if all other values of the column are numbers or times."""
_UNITS = "% ‰ $ € £ ¥ ₹ ₽ ₩ ₺ ₴ ₫ ฿ ₪ US$ R$ zł kr Kč Ft Rs Rs. CHF USD EUR GBP JPY CNY INR RUB BRL CAD AUD SEK NOK DKK PLN 元 円"
_UNIT_WORDS = tuple(_UNITS.split(" "))
_MARKS = tuple(
    (point, mark or None) for point in ".," for mark in ("", *",. '\u2019\u202f\xa0") if mark != point
)
_LIST = r"(?s)^\s*\w*(?:[\[{].*[\]}]|\((?:[^()]*,.*|\d*)\))\s*$"
_SEPARATORS, _WEIGHT_MARKS = ("||", "|", ";", "\x02", "#", ",", " ", ""), ":=\x03^@#"
_NUMBER = r"[-+]?(?:\d+[.,]?\d*|[.,]\d+)(?:[eE][-+]?\d+)?"
_SPELLED = r"^\D*(?:\d+|\d{1,3}(?:[,.'\x{2019}\p{Zs}]\d{2,3}){1,2})(?:[.,]\d*)?(?:[eE][-+]?\d+)?\D*$"
_LEAST_ROWS, _LEAST_PADDED, _MOST_WORDS = 20, 0.2, 2


class Cells:
    """The columns of a sample, with text converted to its likely types.

    Args:
        table: R rows. ``is_text`` says that cells have no types.

    Attributes:
        table: the columns with types. A column of text becomes integers, floats, times or lists if all its text is of
            this kind.
        data: the required options of ``[data]``, each with its reason.
        features: options of each column's feature. ``doubt`` says why a column cannot be a feature.
    """

    def __init__(self, table: pa.Table, *, is_text: bool) -> None:
        self.data: dict[str, tuple[object, str]] = {}
        self.features: dict[str, dict[str, object]] = {}
        arrays = {name: columns.flat(table[name]) for name in table.column_names}
        nulls = {name: _null_words(name, array) for name, array in arrays.items()}
        words = sorted(set(itertools.chain(*nulls.values())))
        if words:
            where = next(name for name, found in nulls.items() if found)
            self.data["null_values"] = (words, f"texts that seem to mean a missing value, as in {where!r}")
            arrays = {name: columns.without_texts(array, tuple(words)) for name, array in arrays.items()}
        read = {name: typed(array, is_text) for name, array in arrays.items()}
        read |= self._local_numbers(read, arrays) if is_text else {}
        for name, array in read.items():
            if columns.is_string(array.type):
                read[name] = self._lists(name, array)
            self._pad(name, read[name])
        self.table = pa.table(read)

    def _local_numbers(self, read: dict[str, pa.Array], arrays: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """Finds the notation that reads most columns of numbers.

        Returns these columns as numbers, and the other columns as text.
        """
        kinds = {name: columns.kind_of(array.type) for name, array in read.items() if not is_of_ids(name)}
        spelled = {name: text(arrays[name]) for name, kind in kinds.items() if kind in ("strings", "floats")}
        spelled = {name: words for name, words in spelled.items() if _share(words, _SPELLED) > 0.9}
        is_new = {
            name for name in spelled if kinds[name] == "strings" and _share(spelled[name], r"[^-+\d]") > 0
        }
        best, most = {}, len(spelled) - len(is_new) - 1
        for decimal, thousands in _MARKS if is_new else ():
            notation = Notation(decimal=decimal, thousands=thousands, units=_UNIT_WORDS)
            plain = {name: notation.plain(array) for name, array in spelled.items()}
            readable = {name: array for name, array in plain.items() if not _any(array, "?")}
            units = [unit for unit in _UNIT_WORDS if any(_any(spelled[name], unit) for name in readable)]
            options = {"decimal": decimal.strip("."), "thousands": thousands, "units": units}
            if is_new & readable.keys() and len(readable) > most and any(options.values()):
                best, most = readable, len(readable)
                why = f"of numbers such as {spelled[min(is_new & readable.keys())].drop_null()[0].as_py()!r}"
                chosen = {key: (value, why) for key, value in options.items() if value}
        if not best:
            return {}
        self.data |= chosen
        return spelled | {name: array.cast(pa.float64()) for name, array in best.items()}

    def _lists(self, name: str, array: pa.Array) -> pa.Array:
        """Returns the lists in a column of strings. Returns the column unchanged if it holds no lists."""
        present = array.filter(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(array)), 0))
        if _share(present, _LIST) > 0.5:
            values, offsets, good = lists.in_brackets(array)
            if good.all() and _share(values, "[:;|]") < 0.5:
                self.features[name] = {"list_format": "brackets"}
                return _as_lists(values, offsets)
            cell = present[0] if good.all() else array.filter(pa.array(~good))[0]
            why = f"cells are in brackets, but not all are lists of ids: {cell.as_py()[:60]!r}"
            self.features[name] = {"doubt": why}
            return array
        for separator, mark in itertools.product(_SEPARATORS, _WEIGHT_MARKS):
            if separator == mark or not _any(present, separator) or _share(present, re.escape(mark)) < 0.5:
                continue
            pieces, bounds = columns.pieces(array, separator or None)
            pair = rf"^\s*[^|;,\x02{re.escape(mark)}]+{re.escape(mark)}\s*{_NUMBER}"
            pairs = _share(pieces, rf"{pair}%?\s*$")
            decimals = _share(pieces, rf"{re.escape(mark)}\s*[-+]?\d*[.,]\d+(?:[eE][-+]?\d+)?%?\s*$")
            if pairs < 0.5 or (decimals < 0.5 and (mark in "^@#" or not separator)):
                continue  # times of a day, ports and versions
            ids, _, good = lists.ids_and_weights(pieces, mark)
            bad = pieces.filter(pa.array(~good)).drop_null()
            if len(bad):
                why = f"cells seem to be ids and weights, but not {text(bad)[0].as_py()[:60]!r}: give each id a weight, or none"
                self.features[name] = {"doubt": why}
                return array
            split = {"separator": separator} if separator else {}
            self.features[name] = {**split, "weight_separator": mark}
            ids = pc.if_else(pieces.is_null(), None, ids)
            return typed(ids, True) if bounds is None else _as_lists(ids, bounds)
        return array

    def _pad(self, name: str, array: pa.Array) -> None:
        """Notes the id that pads the lists of a column to one length, if there is such an id."""
        if columns.is_string(array.type) and array.null_count < len(array):
            separator = separator_in(name, columns.trimmed(array.drop_null()))
            array = pc.split_pattern(array, separator or "\n")
        if not columns.is_list(array.type) or pa.types.is_nested(array.type.value_type):
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
            whole = whole and len(set(map(len, kept))) > 2 and padding not in ("", None)
            if whole and ends.count(padding) >= _LEAST_PADDED * len(rows):
                integer = str(padding).lstrip("-").isdigit()
                self.features.setdefault(name, {})["padding_id"] = int(padding) if integer else padding
                return


def _any(array: pa.Array, part: str) -> bool:
    return bool(pc.any(pc.match_substring(array, part)).as_py())


def _share(words: pa.Array, pattern: str) -> float:
    """Returns the share of strings that match, without nulls; 0 if there are none."""
    return pc.mean(pc.match_substring_regex(text(words), pattern).cast(pa.int8())).as_py() or 0.0


def text(words: pa.Array) -> pa.Array:
    """Returns a column of strings or bytes as strings. Invalid UTF-8 becomes a replacement character."""
    words = columns.string_values(words)
    try:
        return words.cast(pa.large_string())
    except pa.ArrowInvalid:
        read = [None if word is None else word.decode("utf-8", "replace") for word in words.to_pylist()]
        return pa.array(read, pa.large_string())


def _as_lists(values: pa.Array, offsets: I64) -> pa.Array:
    """Returns lists of text, or lists of integers if all text is integers."""
    values = typed(values, True)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _null_words(name: str, array: pa.Array) -> list[str]:
    """Returns the words of a column that mean a missing value: known words, and one or two words among numbers."""
    array = columns.plain(array)
    if not columns.is_string(array.type):
        return []
    words = text(array.drop_null())
    known = pc.is_in(pc.utf8_trim_whitespace(words), value_set=pa.array(columns.NULL_WORDS, words.type))
    known_words, others = pc.unique(words.filter(known)).to_pylist(), words.filter(pc.invert(known))
    number = rf"^\s*{_NUMBER}\s*$"
    few: list[str] = pc.unique(others.filter(pc.invert(pc.match_substring_regex(others, number)))).to_pylist()
    are_numbers = named(name, COUNTS) or _share(others, r"\d\.\d") > 0
    few = few if are_numbers and len(few) <= _MOST_WORDS and _share(others, number) > 0.5 else []
    if not known_words and not few:
        return []
    typed_others = typed(columns.without_texts(array, (*known_words, *few)), True)
    sure = typed_others.null_count < len(typed_others) and not columns.is_string(typed_others.type)
    return few + [word for word in known_words if sure or word.strip() not in _DOUBTFUL]


def typed(array: pa.Array, numbers: bool) -> pa.Array:
    """Returns a column as integers, floats or times if all its cells are such text.

    Args:
        numbers: False for text in a format with types. Text that spells numbers then stays text if few values differ.
    """
    array = columns.plain(array)
    if array.null_count == len(array):
        return pa.nulls(len(array))
    if not columns.is_string(array.type):
        return array
    words = columns.string_values(array)
    kinds: tuple[Callable[[], pa.DataType], ...] = (pa.int64, pa.uint64, pa.float64)
    if _share(words, "[.eE+]") == 0:
        kinds = kinds[:2]  # integers beyond 64 bits stay text
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
    return text(words)
