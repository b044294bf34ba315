"""Checks of what a shard's file says of its rows, before anything follows or keeps it.

Shapes: n rows of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.store.arrays import Ints, Longs
from girih.store.route import shard_of

_ODD = np.int64(0x1E3779B97F4A7C15)


def wrong_rows(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any], *, lists: bool) -> str:
    """Says what none of a store's rows can have, by the columns and description of a file; "" where there is nothing."""
    linked = lists and description["linked"]
    limits = {"rows": 0, "newer": -1} if linked else {}
    for name, least in limits.items():
        column, above = arrays[name], description["rows_ever"]
        if column.size and (column.min() < least or column.max() >= above):
            return f"column {name!r} leads out of [{least}, {above})"
    wrong = wrong_keys(arrays["ids"], arrays["tables"], description)
    return wrong or (_wrong_lists(arrays, description) if linked else "")


def wrong_keys(ids: Longs, tables: Ints, shard: Mapping[str, Any]) -> str:
    """Says what no keys of a shard can be, int64[n] and int32[n]; "" if nothing is wrong.

    Args:
        shard: its ``tables``, ``shard`` and ``num_shards``.
    """
    if wrong := wrong_tables(tables, len(shard["tables"])):
        return wrong
    if _any_twice(ids, tables):
        return "it has a key twice"
    if (shard_of(ids, tables, shard["num_shards"]) != shard["shard"]).any():
        return f"it has a key of another shard than {shard['shard']}"
    return ""


def wrong_tables(tables: Ints, num_tables: int) -> str:
    """Says which numbers of tables no rows can have, int32[n]; "" if nothing is wrong."""
    if not tables.size or 0 <= tables.min() <= tables.max() < num_tables:
        return ""
    return f"column 'tables' leads out of [0, {num_tables})"


def _any_twice(ids: Longs, tables: Ints) -> bool:
    mixed = ids + tables * _ODD  # different keys rarely meet in it
    mixed.sort()
    if not (mixed[1:] == mixed[:-1]).any():
        return False
    order = np.lexsort((ids, tables))
    ids, tables = ids[order], tables[order]
    return bool(((ids[1:] == ids[:-1]) & (tables[1:] == tables[:-1])).any())


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
