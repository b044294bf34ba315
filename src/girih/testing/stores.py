"""What a store must do, whatever keeps its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.store import Store
from girih.store.snapshot.columns import Chunk


@dataclass
class MemorySnapshot:
    """A snapshot as plain arrays, from which a store can be restored."""

    description: dict[str, Any]
    columns: Chunk
    cells: Mapping[str, NDArray[np.uint8]]
    where: str = "snapshot in memory"

    def verify(self) -> None:
        """No-op."""

    def chunks(self) -> Iterator[Chunk]:
        """All rows at once."""
        if len(self.columns["ids"]):
            yield self.columns

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells of this shard, or None where it has none."""
        return self.cells.get(table)


def taken(store: Store, since: int | None = None) -> MemorySnapshot:
    """A copy of all rows, or of those that changed after step ``since``."""
    with store.snapshot(since=since) as snapshot:
        parts: dict[str, list[NDArray[Any]]] = {tensor.name: [] for tensor in snapshot.tensors()}
        for chunk in snapshot.chunks():
            for name, column in chunk.items():
                parts[name].append(column.copy())
        for table, cells in snapshot.blooms():
            parts[f"bloom.{table}"].append(cells.copy())
    columns: Chunk = {name: np.concatenate(p) if p else np.zeros(0, np.int32) for name, p in parts.items()}
    filters = {name: columns.pop(name) for name in parts if name.startswith("bloom.")}
    filters = {name.removeprefix("bloom."): cells for name, cells in filters.items()}
    return MemorySnapshot(snapshot.description, columns, filters)


def columns_of(store: Store) -> dict[str, NDArray[Any]]:
    """All rows by column: those of tables without a list as they lie, then each list from its oldest row."""
    snapshot = taken(store)
    columns = dict(snapshot.columns)
    if not snapshot.description["linked"]:
        return columns
    numbers, newer = columns.pop("rows").tolist(), columns.pop("newer").tolist()
    place = {number: position for position, number in enumerate(numbers)}
    in_lists: dict[int, None] = {}
    for number in snapshot.description["oldest"]:
        while number >= 0:
            in_lists[place[number]] = None
            number = newer[place[number]]
    order = np.array([p for p in range(len(numbers)) if p not in in_lists] + list(in_lists), np.int64)
    return {name: column[order] for name, column in columns.items()}
