"""The columns of a snapshot's file: their names, shapes, and where each lies in a row.

| column | dtype | shape |
|---|---|---|
| ``ids`` | int64 | [n] |
| ``tables``, ``last_used``, ``counts``, ``versions`` | int32 | [n] |
| ``<segment>`` | float32, or the bits of 16-bit floats | [n, dim] |
| ``<segment>.<state>``, as in ``embedding.sum`` | float32 | [n, width] |
| ``rows``, ``newer``: the row's number, that of the next one in its table's list; where a table keeps one | int32 | [n] |
| ``bloom.<table>`` | uint8 | [cells of this shard] |

Shapes: n rows of the snapshot, K rows of a chunk, T tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import layout as at
from girih.store.rows.record import RowLayout
from girih.store.snapshot.tensorfile import Tensor

META = {"tables": at.TABLE, "last_used": at.LAST_USED, "counts": at.COUNT, "versions": at.VERSION}
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Chunk = dict[str, NDArray[Any]]


class FileColumn(NamedTuple):
    """A column of the file, as bytes of a row in memory; width 0 stands for one number a row."""

    name: str
    dtype: type[np.generic]
    first_byte: int
    num_bytes: int
    width: int

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Of so many rows."""
        return (num_rows, self.width) if self.width else (num_rows,)


def row_tensors(description: Mapping[str, Any], num_rows: int) -> list[Tensor]:
    """The columns that the rows of a description have, links left out."""
    tensors = [Tensor("ids", "I64", (num_rows,))]
    tensors += [Tensor(name, "I32", (num_rows,)) for name in META]
    for segment in description["segments"]:
        tensors.append(Tensor(segment["name"], _TAGS[description["dtype"]], (num_rows, segment["dim"])))
        for name, width in segment["state"]:
            tensors.append(Tensor(f"{segment['name']}.{name}", "F32", (num_rows, width)))
    return tensors


def link_tensors(description: Mapping[str, Any], num_rows: int) -> list[Tensor]:
    """The columns that tell the order of lists, where rows do not come in it."""
    names = ("rows", "newer") if description["linked"] else ()
    return [Tensor(name, "I32", (num_rows,)) for name in names]


def bloom_tensors(description: Mapping[str, Any], layout: RowLayout) -> list[Tensor]:
    """The filters of the tables that have one."""
    tensors = []
    for number, table in enumerate(description["tables"]):
        first, last = cells_of(layout, number)
        if first < last:
            tensors.append(Tensor(f"bloom.{table['name']}", "U8", (last - first,)))
    return tensors


def cells_of(layout: RowLayout, table: int) -> tuple[int, int]:
    """The first of a table's Bloom cells in this shard, and the one behind its last."""
    bloom = layout.kernel.bloom[table]
    start = int(bloom[at.CELLS_START])
    return start, start + int(bloom[at.NUM_BLOCKS] * bloom[at.BLOCK_CELLS])


def is_listed(layout: RowLayout) -> NDArray[np.bool_]:
    """bool[T]: whether a table's rows are in a list."""
    listed: NDArray[np.bool_] = layout.kernel.rules[:, at.EVICTION] != at.EVICT_NONE
    return listed


def file_columns(description: Mapping[str, Any], layout: RowLayout) -> list[FileColumn]:
    """Where the columns of :func:`row_tensors` and :func:`link_tensors` lie in a row.

    ``rows`` lies in the word of the older neighbour, which a snapshot has no other use for.
    """
    weights = np.float32 if description["dtype"] == "float32" else np.uint16
    item = np.dtype(weights).itemsize
    columns = [FileColumn("ids", np.int64, 0, 8, 0)]
    columns += [FileColumn(name, np.int32, 4 * word, 4, 0) for name, word in META.items()]
    for number, segment in enumerate(description["segments"]):
        first = 4 * at.VALUES + item * int(layout.kernel.segments[number, at.FIRST_COLUMN])
        columns.append(FileColumn(segment["name"], weights, first, item * segment["dim"], segment["dim"]))
    for state in layout.state:
        name = f"{state.segment}.{state.name}"
        columns.append(FileColumn(name, np.float32, 4 * state.start, 4 * state.width, state.width))
    if description["linked"]:
        columns.append(FileColumn("rows", np.int32, 4 * at.OLDER, 4, 0))
        columns.append(FileColumn("newer", np.int32, 4 * at.NEWER, 4, 0))
    return columns
