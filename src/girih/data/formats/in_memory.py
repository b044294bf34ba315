"""A table in memory: a unit is a slice of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.data.paths import File
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import FileSource, Unit

UNIT_ROWS = 1 << 16


class InMemorySource(FileSource):
    """The rows of a ``pyarrow.Table``, in order.

    Args:
        where: its name in errors.
    """

    def __init__(self, table: Any, where: str = "data") -> None:
        self._table, self._where = table, where
        self.files = (File(None, "", where, 0),)
        self.num_rows: int | None = table.num_rows
        self.num_parts = -(-table.num_rows // UNIT_ROWS)
        names = f"{table.num_rows}/{','.join(table.column_names)}"
        self.identity = "memory/" + hashlib.sha256(names.encode()).hexdigest()[:16]

    def check(self, plan: ReadPlan) -> None:
        """Refuses a table that lacks a column, or holds it in a type that does not serve."""
        names, types = self._table.schema.names, self._table.schema.types
        plan.check_names(names, self._where)
        own = dict(zip(names, types, strict=True))
        plan.check_types({name: own[name] for name in plan.columns}, self._where)

    def read(self, plan: ReadPlan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields slices in the order given, from ``start.part`` on."""
        table = self._table.select(list(plan.columns))
        for part in range(start.part, len(order)):
            first = int(order[part]) * UNIT_ROWS
            rows = table.slice(first, UNIT_ROWS)
            numbers = range(first + 1, first + rows.num_rows + 1)
            yield Unit(rows, self._where, Cursor(part + 1), numbers)
