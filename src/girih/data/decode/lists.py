"""Parses cells of text that are lists, or pairs of an id and its weight.

Shapes: R rows, M values in their lists.
"""

from __future__ import annotations

import ast
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.batch import NULL_ID, offsets_of
from girih.data.decode import columns
from girih.data.decode.batches import BagColumn
from girih.data.decode.columns import Notation
from girih.kernels.cpu.arrays import F32, I64, Bools

_LARGEST_WHOLE = float(1 << 53)
_INNER = r"[^\[\](){}'\"\\]*"
_PLAIN = rf"^\s*(?:\[{_INNER}\]|\({_INNER}\)|\{{{_INNER}\}})?\s*$"
_CALL = r"^\s*(?:array|frozenset|set)\(([^()]*)\)\s*$|\bnp\.\w+\(([^()]*)\)"
_ELLIPSIS = r"\.\.\."
_MISSING = ("nan", "NaN", "None", "null", "<NA>")
_BOOLEANS = {"True": "1", "true": "1", "False": "0", "false": "0"}
_ITEM = re.compile(
    r"\s*(?:b?('(?:[^'\\]|\\.)*')|b?(\"(?:[^\"\\]|\\.)*\")|([^\s,\[\](){}'\"]+))\s*(?:,|(?=[\s'\"])|$)",
    re.DOTALL,
)


def in_brackets(array: pa.Array) -> tuple[pa.Array, I64, Bools]:
    """Parses R lists in brackets, as JSON, Python and NumPy write them: ``[1, 2]``, ``['a', 'b']``, ``[1 2]``.

    Returns:
        M values as text; offsets int64[R+1]; bool[R], True if a row is such a list, or null, which is an empty list.
    """
    words = pc.replace_substring_regex(columns.string_values(array), _CALL, rb"\1\2")
    plain = pc.match_substring_regex(words, _PLAIN)
    plain = pc.and_not(plain, pc.match_substring_regex(words, _ELLIPSIS)).fill_null(True)
    is_plain = plain.to_numpy(zero_copy_only=False)
    inner = pc.ascii_trim(words.cast(pa.large_string(), safe=False), " \t\r\n[](){}")
    with_commas = pc.match_substring(inner, ",")
    inner = pc.if_else(with_commas, inner, pc.replace_substring_regex(inner, r"\s+", ","))
    split = pc.split_pattern(inner, ",")
    values, offsets = pc.ascii_trim_whitespace(split.flatten()), columns.list_offsets(split)
    values = pc.if_else(pc.is_in(values, value_set=pa.array(_MISSING, values.type)), None, values)
    for word, number in _BOOLEANS.items():
        values = pc.if_else(pc.equal(values, word), number, values)
    values = values.cast(pa.large_binary())
    good = np.ones(len(words), np.bool_)
    if not is_plain.all():
        rows = np.flatnonzero(~is_plain)
        cells = words.filter(pc.invert(plain)).dictionary_encode()
        read = [_items(cell.decode("utf-8", "surrogateescape")) for cell in cells.dictionary.to_pylist()]
        good[rows] = np.array([each is not None for each in read])[cells.indices.to_numpy()]
        encoded = [
            [item if item is None else item.encode("utf-8", "surrogateescape") for item in each or ()]
            for each in read
        ]
        of_rows = pa.array(encoded, pa.large_list(pa.large_binary())).take(cells.indices)
        places = np.arange(len(words))
        places[rows] = len(words) + np.arange(len(rows))
        of_plain = pa.LargeListArray.from_arrays(pa.array(offsets), values)
        split = pa.concat_arrays([of_plain, of_rows]).take(pa.array(places))
        values, offsets = split.flatten(), columns.list_offsets(split)
    kept = pc.fill_null(pc.greater(pc.binary_length(values), 0), True).to_numpy(zero_copy_only=False)
    if not kept.all():
        values = values.filter(pa.array(kept))
        offsets = offsets_of(kept)[offsets]
    return values, offsets, good


def _items(cell: str) -> list[str | None] | None:
    """Parses the items of one list. Returns None if the cell is not a list."""
    cell = cell.strip()
    if len(cell) < 2 or cell[0] + cell[-1] not in ("[]", "()", "{}"):
        return None
    inner, at, items = cell[1:-1].rstrip(), 0, []
    while at < len(inner):
        match = _ITEM.match(inner, at)
        if match is None or match[3] == "...":
            return None
        single, double, word = match.groups()
        try:
            item = word if word else json.loads(double) if double else ast.literal_eval(single)
        except ValueError:  # a Python string in double quotes
            item = ast.literal_eval(double)
        items.append(None if word in _MISSING else _BOOLEANS.get(item, item) if word else item)
        at = match.end()
    return items


def ids_and_weights(
    words: pa.Array, separator: str, notation: Notation | None = None
) -> tuple[pa.Array, F32, Bools]:
    """Splits strings such as ``7:0.5`` into an id and a weight, at the last separator.

    Returns:
        M ids as text; weights float32[M]; bool[M], True for an id with a finite weight.
    """
    words = columns.string_values(words)
    good = pc.match_substring(words, separator).fill_null(False)
    halves = pc.split_pattern(
        pc.if_else(good, words, f"0{separator}0".encode()), separator, max_splits=1, reverse=True
    )
    ids, weights = columns.trimmed(pc.list_element(halves, 0)), pc.list_element(halves, 1)
    with np.errstate(over="ignore"):
        numbers = columns.numbers(weights, notation)[0].astype(np.float32)
    present = pc.greater(pc.binary_length(ids), 0).to_numpy(zero_copy_only=False)
    return ids, numbers, good.to_numpy(zero_copy_only=False) & present & np.isfinite(numbers)


def ids_of_floats(array: pa.Array) -> tuple[I64, Bools]:
    """Parses ids that may be written as floats: 7.0 is the id 7. pandas writes integers as floats if some are missing.

    Returns:
        int64[M]; bool[M], False for a float that is not a whole number.
    """
    array = columns.plain(array)
    if pa.types.is_floating(array.type):
        values, null = columns.numbers(array)
        missing = np.isnan(values) if null is None else np.isnan(values) | null
        ids = np.full(len(values), NULL_ID)
    else:
        ids, floats = columns.scalar_ids(array)
        if floats is None:
            return ids, np.ones(len(ids), np.bool_)
        numbers, _ = columns.string_numbers(columns.string_values(array))
        missing = ~(floats | (np.isfinite(numbers) & (numbers != np.floor(numbers))))
        values = np.where(missing, 0.0, numbers)
    good = missing | ((values == np.floor(values)) & (np.abs(values) <= _LARGEST_WHOLE))
    ids = np.where(missing, ids, np.where(good & ~missing, values, 0).astype(np.int64))
    return ids, good


def without_padding(bags: BagColumn, padding_id: int | str) -> BagColumn:
    """Drops the padding id from bags. If each row has one id, padding becomes a missing id."""
    ids, offsets, weights = bags
    padding = columns.scalar_ids(pa.array([str(padding_id)]))[0][0]
    is_padding = ids == padding
    if not is_padding.any():
        return bags
    if offsets is None:
        return BagColumn(np.where(is_padding, NULL_ID, ids), None, weights)
    offsets = offsets_of(~is_padding)[offsets]
    return BagColumn(ids[~is_padding], offsets, None if weights is None else weights[~is_padding])
