"""A snapshot of a store that stands still."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.cpu import recency
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout
from girih.store.snapshot.columns import META, Chunk, bloom_tensors, cells_of, is_listed, row_tensors
from girih.store.snapshot.tensorfile import Tensor

_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK = 1 << 10


class StillSnapshot:
    """The state of a store that stands still; made by :meth:`Store.snapshot` and :meth:`Store.delta_since`.

    Attributes:
        where: for errors.
        description: the layout, tables, counters (one mapping a table) and last step, as plain values.
        num_rows: n.
    """

    def __init__(
        self,
        space: ShardMemory,
        layout: RowLayout,
        description: Mapping[str, Any],
        counters: Sequence[Mapping[str, int]],
        since: int | None,
    ) -> None:
        self._space = space
        self._layout = layout
        self._num_changes = space.num_changes
        self._order = _live_rows(space, layout, since)
        self.where = "snapshot of a store"
        self.num_rows = len(self._order)
        self.description = {
            **description,
            "num_rows": self.num_rows,
            "since": since,
            "last_step": int(space.arrays.state[at.LAST_STEP]),
            "counters": [dict(of_table) for of_table in counters],
            "linked": False,
        }

    def tensors(self) -> list[Tensor]:
        """All columns and Bloom filters."""
        return [
            *row_tensors(self.description, self.num_rows),
            *bloom_tensors(self.description, self._layout),
        ]

    def verify(self) -> None:
        """Checks that the store has not changed since.

        Raises:
            ConfigError: it has.
        """
        if self._space.num_changes != self._num_changes:
            raise ConfigError("snapshot: the store changed before it was read to the end; take another one")

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells of this shard, or None where it has none."""
        names = [t["name"] for t in self.description["tables"]]
        first, last = cells_of(self._layout, names.index(table))
        return self._space.arrays.cells[first:last] if first < last else None

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """(table's name, its Bloom cells), of those that have some."""
        for table in self.description["tables"]:
            cells = self.bloom(table["name"])
            if cells is not None:
                yield table["name"], cells

    def chunks(self) -> Iterator[Chunk]:
        """The columns of some rows at a time, as copies.

        Raises:
            ConfigError: the store changed since the snapshot was taken.
        """
        size = max(_LEAST_CHUNK, _CHUNK_BYTES // (4 * self._layout.num_words))
        for start in range(0, self.num_rows, size):
            self.verify()
            yield self._gather(self._order[start : start + size])

    def _gather(self, rows: NDArray[np.int32]) -> Chunk:
        arrays, segments = self._space.arrays, self._layout.kernel.segments
        values = arrays.values[rows]
        meta = values.view(np.int32)
        chunk: Chunk = {"ids": values.view(np.int64)[:, 0]}
        for name, column in META.items():
            chunk[name] = meta[:, column]
        weights, start = values, at.VALUES
        if self.description["dtype"] != "float32":
            weights, start = values.view(np.uint16), 2 * at.VALUES
        for number, segment in enumerate(self.description["segments"]):
            first = start + int(segments[number, at.FIRST_COLUMN])
            chunk[segment["name"]] = weights[:, first : first + segment["dim"]]
        for state in self._layout.state:
            chunk[f"{state.segment}.{state.name}"] = values[:, state.start : state.start + state.width]
        return chunk


def _live_rows(space: ShardMemory, layout: RowLayout, since: int | None) -> NDArray[np.int32]:
    """Row numbers: tables without a list in row order, then each list from the oldest."""
    arrays, listed = space.arrays, is_listed(layout)
    owner = arrays.meta[: arrays.state[at.ROWS_EVER], at.TABLE]
    parts = []
    if not listed.all():
        unlisted = np.append(~listed, False)  # the last entry answers for free rows, whose table is -1
        parts.append(np.flatnonzero(unlisted[owner]).astype(np.int32))
    for table in np.flatnonzero(listed):
        rows = np.empty(int(arrays.tables[table, at.TABLE_ROWS]), np.int32)
        recency.oldest_first(arrays.meta, arrays.tables, int(table), rows)
        parts.append(rows)
    order = np.concatenate(parts)
    return order if since is None else order[arrays.meta[order, at.VERSION] > since]
