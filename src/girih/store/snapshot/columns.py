"""The columns of a snapshot's file: their names, shapes, and positions in a row.

| column | dtype | shape |
|---|---|---|
| ``ids`` | int64 | [n] |
| ``tables``, ``last_used``, ``counts``, ``versions`` | int32 | [n] |
| ``<segment>`` | float32, or the bits of 16-bit floats | [n, dim] |
| ``<segment>.<state>``, as in ``embedding.sum`` | float32 | [n, width] |
| ``rows``, ``newer``: the row's number, and the next in its table's list, if it keeps one | int32 | [n] |
| ``bloom.<table>`` | uint8 | [cells of this shard] |

Shapes: n rows of the snapshot, K rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import layout
from girih.store.rows.record import RowLayout
from girih.store.snapshot.tensorfile import DTYPES, StoredTensor
from girih.store.spec import Description, Ints, Longs, TableDescription, shard_of

META = {
    "tables": layout.TABLE,
    "last_used": layout.LAST_USED,
    "counts": layout.COUNT,
    "versions": layout.VERSION,
}
# ``rows`` uses the word of the older neighbour, which snapshots do not need.
LINKS = {"rows": layout.OLDER, "newer": layout.NEWER}
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Chunk: TypeAlias = dict[str, NDArray[Any]]


class Column(NamedTuple):
    """A column: its name, its dtype in the file, its first byte in a row, and its width.

    Width 0 means one number per row.
    """

    name: str
    tag: str
    first_byte: int
    width: int

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype in memory."""
        return DTYPES[self.tag]

    @property
    def num_bytes(self) -> int:
        """The number of bytes in one row."""
        return self.dtype.itemsize * max(1, self.width)

    def tensor(self, num_rows: int) -> StoredTensor:
        """Returns the name and shape of the column for ``num_rows`` rows."""
        return StoredTensor(self.name, self.tag, (num_rows, self.width) if self.width else (num_rows,))


def columns_of(description: Description) -> list[Column]:
    """Returns the columns of rows, given the description of a store, a snapshot or its file."""
    links = LINKS if description.get("linked") else {}
    columns = [Column("ids", "I64", 0, 0), *(Column(name, "I32", 4 * word, 0) for name, word in META.items())]
    return columns + value_columns(description) + [Column(n, "I32", 4 * word, 0) for n, word in links.items()]


def value_columns(description: Description) -> list[Column]:
    """Returns the columns of segments, which are adjacent in a row, and then of optimizer state."""
    tag = _TAGS[description["dtype"]]
    weights, columns = 4 * layout.VALUES, []
    state = weights + 4 * -(-DTYPES[tag].itemsize * sum(s["dim"] for s in description["segments"]) // 4)
    for segment in description["segments"]:
        columns.append(Column(segment["name"], tag, weights, segment["dim"]))
        weights += columns[-1].num_bytes
        for name, width in segment["state"]:
            columns.append(Column(f"{segment['name']}.{name}", "F32", state, width))
            state += 4 * width
    return columns


def bloom_tensors(row_layout: RowLayout) -> list[StoredTensor]:
    """Returns the Bloom filters of the tables that have one."""
    cells = [row_layout.cells_of(number) for number in range(len(row_layout.description["tables"]))]
    return [
        StoredTensor(f"bloom.{table['name']}", "U8", (part.stop - part.start,))
        for table, part in zip(row_layout.description["tables"], cells, strict=True)
        if part.start < part.stop
    ]


def counts_seconds(table: TableDescription) -> bool:
    """Returns whether a table measures the age of its rows in seconds."""
    eviction = table.get("eviction")
    return isinstance(eviction, Mapping) and bool(eviction.get("seconds"))


_ODD = np.int64(0x1E3779B97F4A7C15)


def wrong_rows(arrays: Mapping[str, NDArray[Any]], description: Description, *, lists: bool) -> str:
    """Returns why the columns cannot come from a store with this description, or "" if they can."""
    linked = lists and description["linked"]
    limits = {"rows": 0, "newer": -1} if linked else {}
    for name, least in limits.items():
        column, above = arrays[name], description["rows_ever"]
        if column.size and (column.min() < least or column.max() >= above):
            return f"column {name!r} has values outside [{least}, {above})"
    shard, num_shards = description["shard"], description["num_shards"]
    wrong = wrong_keys(arrays["ids"], arrays["tables"], len(description["tables"]), shard, num_shards)
    return wrong or (_wrong_lists(arrays, description) if linked else "")


def wrong_keys(ids: Longs, tables: Ints, num_tables: int, shard: int, num_shards: int) -> str:
    """Returns why the keys, int64[n] and int32[n], cannot belong to a shard, or "" if they can."""
    if wrong := wrong_tables(tables, num_tables):
        return wrong
    if _any_twice(ids, tables):
        return "it has a key twice"
    if (shard_of(ids, tables, num_shards) != shard).any():
        return f"it has a key of another shard than {shard}"
    return ""


def wrong_tables(tables: Ints, num_tables: int) -> str:
    """Returns why the numbers, int32[n], cannot be table numbers of rows, or "" if they can."""
    if not tables.size or 0 <= tables.min() <= tables.max() < num_tables:
        return ""
    return f"column 'tables' has values outside [0, {num_tables})"


def _any_twice(ids: Longs, tables: Ints) -> bool:
    mixed = ids + tables * _ODD  # different keys rarely have the same value
    mixed.sort()
    if not (mixed[1:] == mixed[:-1]).any():
        return False
    order = np.lexsort((ids, tables))
    ids, tables = ids[order], tables[order]
    return bool(((ids[1:] == ids[:-1]) & (tables[1:] == tables[:-1])).any())


def _wrong_lists(arrays: Mapping[str, NDArray[Any]], description: Description) -> str:
    """Returns why the lists are wrong, or "" if they are correct.

    All rows of a list must belong to its table, because verbs trust the table's number of rows. A table without a list
    may have had a list before.
    """
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
        return "the list of a table leads into another table"
    return ""
