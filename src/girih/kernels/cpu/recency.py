"""The list of a table's rows in the order of their last use, for exact LRU in constant time.

The list is linked by row numbers in ``meta``. ``NEWER`` and ``OLDER`` of a row are its neighbours. ``NEWEST`` and
``OLDEST`` of a table are the ends of its list.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, U8, I32x2, I64x2
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import NEWER, NEWEST, NO_ROW, OLDER, OLDEST, Shard
from girih.kernels.cpu.saving import keep_row
from girih.kernels.cpu.system import prefetch


@njit_lean
def push_newest(shard: Shard, table: Any, row: Any) -> None:
    """Puts a row at the newest end. The row must not be in a list. Call ``keep_row`` before."""
    meta, tables = shard.meta, shard.tables
    newest = tables[table, NEWEST]
    meta[row, NEWER] = NO_ROW
    meta[row, OLDER] = newest
    if newest >= 0:
        keep_row(shard, newest)
        meta[newest, NEWER] = row
    else:
        tables[table, OLDEST] = row
    tables[table, NEWEST] = row


@njit_lean
def unlink(shard: Shard, table: Any, row: Any) -> None:
    """Removes a row from its table's list."""
    meta, tables = shard.meta, shard.tables
    newer, older = meta[row, NEWER], meta[row, OLDER]
    if newer >= 0:
        meta[newer, OLDER] = older  # without keep_row, because a save follows only the links to newer rows
    else:
        tables[table, NEWEST] = older
    if older >= 0:
        keep_row(shard, older)
        meta[older, NEWER] = newer
    else:
        tables[table, OLDEST] = newer


@njit_lean
def touch(shard: Shard, table: Any, row: Any) -> None:
    """Moves a row of the list to the newest end. Call ``keep_row`` before."""
    if shard.tables[table, NEWEST] != row:
        unlink(shard, table, row)
        push_newest(shard, table, row)


@kernel()
def oldest_first(meta: I32x2, tables: I64x2, table: int, out: I32) -> Any:
    """Writes the rows of a table's list to ``out``, oldest first. Returns their number."""
    row = tables[table, OLDEST]
    count = 0
    while row >= 0:
        out[count] = row
        count += 1
        row = np.int64(meta[row, NEWER])
    return count


@kernel()
def walk(meta: I32x2, oldest: int, rows_ever: int, seen: U8, out: I32) -> Any:
    """Works like :func:`oldest_first`, but the list may be damaged. Stops at an invalid or repeated row.

    ``seen``, uint8[R], must be 0 at first.
    """
    row = np.int64(oldest)
    count = 0
    while 0 <= row < rows_ever and seen[row] == 0:
        seen[row] = 1
        out[count] = row
        count += 1
        row = np.int64(meta[row, NEWER])
    return count


@njit_lean
def prefetch_neighbours(meta: I32, row: Any) -> None:
    """Prefetches the meta of the neighbours of ``row``, which :func:`touch` will write."""
    prefetch(meta, meta[row, NEWER])
    prefetch(meta, meta[row, OLDER])
