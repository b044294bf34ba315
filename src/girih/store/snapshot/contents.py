"""Checks of what a shard's file says of its rows, before anything follows or keeps it.

Shapes: n rows of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.store.arrays import Ints, Longs
from girih.store.snapshot.columns import value_columns

_LARGEST_BITS = {"BF16": 0x7F80, "F16": 0x7C00}  # of a 16-bit float that is no NaN, without its sign
_BLOCK = 1 << 20
_ODD = np.int64(0x1E3779B97F4A7C15)


def wrong_rows(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]) -> str:
    """Says what none of a store's rows can have, by the columns and description of a file; "" where there is nothing."""
    limits = {"tables": (0, len(description["tables"]))}
    if description["linked"]:
        limits |= {"rows": (0, description["rows_ever"]), "newer": (-1, description["rows_ever"])}
    for name, (least, above) in limits.items():
        column = arrays[name]
        if column.size and (column.min() < least or column.max() >= above):
            return f"column {name!r} leads out of [{least}, {above})"
    if _any_twice(arrays["ids"], arrays["tables"]):
        return "it has a key twice"
    for value in value_columns(description):
        if _any_nan(arrays[value.name], value.tag):
            return f"column {value.name!r} holds NaN"
    return _wrong_lists(arrays, description) if description["linked"] else ""


def _any_twice(ids: Longs, tables: Ints) -> bool:
    mixed = ids + tables * _ODD  # different keys rarely meet in it
    mixed.sort()
    if not (mixed[1:] == mixed[:-1]).any():
        return False
    order = np.lexsort((ids, tables))
    ids, tables = ids[order], tables[order]
    return bool(((ids[1:] == ids[:-1]) & (tables[1:] == tables[:-1])).any())


def _any_nan(column: NDArray[Any], tag: str) -> bool:
    if tag not in _LARGEST_BITS:
        return bool(column.size and np.isnan(column.min()))
    bits = column.reshape(-1)
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return any((block & 0x7FFF).max() > _LARGEST_BITS[tag] for block in blocks)


def _wrong_lists(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]) -> str:
    """A list must stay in its table: verbs trust that it has as many rows. Tables without one may have had one."""
    rows, newer, tables = (arrays[name] for name in ("rows", "newer", "tables"))
    table_of = np.full(description["rows_ever"], -1, np.int32)
    table_of[rows] = tables
    if np.count_nonzero(table_of >= 0) != len(rows):
        return "two rows have one number"
    oldest = np.array(description["oldest"], np.int64)
    listed = oldest >= 0
    followed = np.flatnonzero(listed[tables] & (newer >= 0))
    if (table_of[oldest[listed]] != np.flatnonzero(listed)).any() or (
        table_of[newer[followed]] != tables[followed]
    ).any():
        return "the list of a table leads into another one"
    return ""
