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

from girih.kernels.cpu import layout
from girih.store.rows.record import RowLayout
from girih.store.snapshot.tensorfile import Tensor

META = {
    "tables": layout.TABLE,
    "last_used": layout.LAST_USED,
    "counts": layout.COUNT,
    "versions": layout.VERSION,
}
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Chunk = dict[str, NDArray[Any]]


class FileColumn(NamedTuple):
    """A column of the file, as bytes of a row in memory; width 0 stands for one number per row."""

    name: str
    dtype: type[np.generic]
    first_byte: int
    num_bytes: int
    width: int

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """The shape of the column, for ``num_rows`` rows."""
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


def bloom_tensors(own: RowLayout) -> list[Tensor]:
    """The filters of the tables that have one."""
    cells = [own.cells_of(number) for number in range(len(own.description["tables"]))]
    return [
        Tensor(f"bloom.{table['name']}", "U8", (part.stop - part.start,))
        for table, part in zip(own.description["tables"], cells, strict=True)
        if part.start < part.stop
    ]


def value_columns(own: RowLayout) -> list[FileColumn]:
    """The places of segments, and of their optimizers' state, in a row."""
    weights = np.float32 if own.description["dtype"] == "float32" else np.uint16
    item = np.dtype(weights).itemsize
    columns = []
    for number, segment in enumerate(own.description["segments"]):
        first = 4 * layout.VALUES + item * int(own.kernel.segments[number, layout.FIRST_COLUMN])
        columns.append(FileColumn(segment["name"], weights, first, item * segment["dim"], segment["dim"]))
    for state in own.state:
        name = f"{state.segment}.{state.name}"
        columns.append(FileColumn(name, np.float32, 4 * state.start, 4 * state.width, state.width))
    return columns


def file_columns(own: RowLayout, *, linked: bool) -> list[FileColumn]:
    """The places of the columns of :func:`row_tensors` and :func:`link_tensors` in a row.

    ``rows`` lies in the word of the older neighbour, which a snapshot has no other use for.
    """
    links = {"rows": layout.OLDER, "newer": layout.NEWER} if linked else {}
    return [
        FileColumn("ids", np.int64, 0, 8, 0),
        *(FileColumn(name, np.int32, 4 * word, 4, 0) for name, word in META.items()),
        *value_columns(own),
        *(FileColumn(name, np.int32, 4 * word, 4, 0) for name, word in links.items()),
    ]
