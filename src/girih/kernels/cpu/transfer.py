"""Rows on their way back from a snapshot into a shard.

Shapes: K rows of a chunk.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu import index, recency
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import I32, I64, U8, F32x2, SealedU8
from girih.kernels.cpu.initial import fill_initial
from girih.kernels.cpu.jit import kernel
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.rows import take_row


@kernel()
def load_keys(
    shard: Shard, layout: Layout, ids: I64, tables: I32, last_used: I32, counts: I32, versions: I32, rows: I32
) -> None:
    """Finds or takes a row for each key and writes its meta; ``rows`` int32[K] tells where the values belong.

    Memory for K rows and slots must be there. Keys become the newest of their tables, in order.
    """
    for i in range(ids.shape[0]):
        table = np.int64(tables[i])
        row = index.find(shard, ids[i], table)
        if row < 0:
            row = take_row(shard, layout, ids[i], table, last_used[i], counts[i], versions[i])
        else:
            shard.meta[row, at.LAST_USED] = last_used[i]
            shard.meta[row, at.COUNT] = counts[i]
            shard.meta[row, at.VERSION] = versions[i]
            if layout.rules[table, at.EVICTION] != at.EVICT_NONE:
                recency.touch(shard, table, row)
        rows[i] = row


@kernel()
def initial_values(layout: Layout, ids: I64, tables: I32, out: F32x2) -> None:
    """Writes the initial values of keys, float32[K, W], not yet rounded to 16 bits."""
    for i in range(ids.shape[0]):
        fill_initial(layout, ids[i], np.int64(tables[i]), out[i])


@kernel()
def relink(shard: Shard, table: int, rows: I32) -> None:
    """Makes a table's list of ``rows``, all of its rows, oldest first."""
    shard.tables[table, at.NEWEST] = at.NO_ROW
    shard.tables[table, at.OLDEST] = at.NO_ROW
    for i in range(rows.shape[0]):
        recency.push_newest(shard, table, np.int64(rows[i]))


@kernel()
def follow(shard: Shard, table: int, oldest: int, newer_of: I32, new_of: I32) -> None:
    """Makes the rows of a saved list the newest of a table's list, in the saved order.

    The list begins at ``oldest``; of each row number as it was then, int32[R], ``newer_of`` is the next one and
    ``new_of`` the row now, or -1.
    """
    row = np.int64(oldest)
    for _ in range(newer_of.shape[0]):
        if row < 0:
            return
        if new_of[row] >= 0:
            recency.touch(shard, table, np.int64(new_of[row]))
        row = np.int64(newer_of[row])


@kernel()
def add_cells(mine: U8, theirs: SealedU8) -> None:
    """Adds counts of one Bloom filter to another, cell by cell, saturating."""
    for i in range(mine.shape[0]):
        mine[i] = min(np.int64(mine[i]) + np.int64(theirs[i]), np.int64(255))
