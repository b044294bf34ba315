"""Repairs a shard whose writer was killed during a change. Rebuilds index, free rows and lists from the rows.

Each row contains its key. Verbs record the row that they change in the shard's state (see
:mod:`girih.kernels.cpu.rows`). Only this row may be half changed:

- A row that was being made loses its key. Its value is a function of the key, so nothing is lost.
- A row that was being removed is removed.
- A row that was being updated by a gradient or set stays. Each of its numbers is from before or after the change. The
  repair reports this row.

The repair follows each list from its oldest row to newer rows. Verbs write links in such an order that only the row
that a verb moves within its list can be missing from the list. The repair puts this row at the newest end. If more rows
are missing, for example after a repair that was killed, the list is ordered by last use. Counters and Bloom filters may
lack the last actions of the verb.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from girih.kernels.cpu import index, layout, recency, update
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.rows import LEAVING, MAKING, noted
from girih.store.memory.pushes import CutPush
from girih.store.memory.shard_memory import ShardMemory
from girih.store.spec import Bools, Ints


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair after the shard's writer was killed during a change.

    Attributes:
        torn: (id, table) of the key whose row mixes numbers from before and after a change, or None.
        num_unmade: the number of rows that were being made, 0 or 1. Their keys have no row now.
        cut: the pushes that must be sent again. A torn row counts as served.
    """

    torn: tuple[int, int] | None
    num_unmade: int
    cut: list[CutPush]


def repair(memory: ShardMemory, listed: Bools) -> Repaired:
    """Repairs a shard. Call it before any verb. A repair that was cut short can run again.

    Args:
        listed: bool[T], True for tables that keep their rows in a list.

    Raises:
        StorageFullError: there is no memory for the index.
    """
    arrays, state = memory.arrays, memory.arrays.state
    kind, row, _ = noted(int(state[layout.AMID]))
    rows_ever = int(state[layout.ROWS_EVER])
    has_key = 0 <= row < rows_ever and arrays.meta[row, layout.TABLE] >= 0
    unmade = kind == MAKING and has_key
    torn = None
    if kind in (MAKING, LEAVING) and has_key:
        arrays.meta[row, layout.TABLE] = layout.NO_ROW
    elif has_key:
        torn = int(arrays.keys[row, 0]), int(arrays.meta[row, layout.TABLE])
    memory.pushes.settle()
    tables = arrays.meta[:rows_ever, layout.TABLE]
    live = np.flatnonzero(tables >= 0).astype(np.int32)
    lists = {int(table): _in_order(arrays, int(table), live) for table in np.flatnonzero(listed)}
    for table, rows in lists.items():
        update.relink(arrays, table, rows)
    arrays.tables[:, layout.TABLE_ROWS] = np.bincount(tables[live], minlength=len(listed))
    _chain_free(arrays, np.flatnonzero(tables < 0).astype(np.int32))
    memory.renew_index(len(live))
    index.insert_all(memory.arrays, live)
    state[layout.NUM_ROWS] = len(live)
    state[layout.AMID] = 0
    return Repaired(torn, int(unmade), memory.pushes.cut())


def _in_order(arrays: Shard, table: int, live: Ints) -> Ints:
    """Returns all rows of a table, oldest first. Orders rows by last use if the list misses more than one row."""
    mine = live[arrays.meta[live, layout.TABLE] == table]
    rows_ever = int(arrays.state[layout.ROWS_EVER])
    seen, ordered = np.zeros(rows_ever, np.uint8), np.empty(rows_ever, np.int32)
    oldest = int(arrays.tables[table, layout.OLDEST])
    ordered = ordered[: recency.walk(arrays.meta, oldest, rows_ever, seen, ordered)]
    ordered = ordered[arrays.meta[ordered, layout.TABLE] == table]
    missing = mine[seen[mine] == 0]
    rows = np.concatenate([ordered, missing])
    if len(missing) > 1:
        rows = rows[np.argsort(arrays.meta[rows, layout.LAST_USED], kind="stable")]
    return rows


def _chain_free(arrays: Shard, free: Ints) -> None:
    arrays.meta[free, layout.OLDER] = np.append(free[1:], layout.NO_ROW)[: len(free)]
    arrays.state[layout.FREE_ROW] = free[0] if len(free) else layout.NO_ROW
