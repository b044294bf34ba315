"""A shard whose writer was killed amid a change: index, free rows and lists made anew from the rows.

A row says by itself which key it has. Of all rows only the one that is noted in the shard's state may be half done (see
:mod:`girih.kernels.cpu.rows`):

- one that was being made has no key again: its value is a function of the key, so nothing is lost;
- one that was leaving has left;
- one that a gradient was moving, or that was being set, stays, since each of its numbers is the one before or the one behind.
  It is told.

A list is followed from its oldest row by the newer ones: links are written in an order in which no row but the one that a
verb moves is ever missing there, and that one goes to the newest end. Where more are missing, as after a repair that
was killed itself, the list is ordered by last use. Counters, and a Bloom filter, may lack what the verb did last.
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
    """The state in which a shard was found whose writer was killed amid a change.

    Attributes:
        torn: (id, table) of the key whose row has some numbers from before a change and some from behind it, if there is one.
        num_unmade: rows that were being made, 0 or 1: their keys have none.
        cut: pushes that wait to be sent again; a torn row counts as served.
    """

    torn: tuple[int, int] | None
    num_unmade: int
    cut: list[CutPush]


def repair(memory: ShardMemory, listed: Bools) -> Repaired:
    """Makes a shard whole; to be called before any verb. If it is cut short itself, it can be made again.

    Args:
        listed: bool[T], whether a table keeps its rows in a list.

    Raises:
        StorageFullError: no memory for the index.
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
    """All rows of a table, oldest first, as far as its list tells."""
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
