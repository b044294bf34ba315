"""The list of a table's rows, newest first, as row numbers in ``meta``: exact LRU in constant time.

``NEWER`` and ``OLDER`` of a row are its neighbours, ``NEWEST`` and ``OLDEST`` of a table the ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.jit import njit_lean, prefetch
from girih.kernels.cpu.layout import NEWER, NEWEST, NO_ROW, OLDER, OLDEST


@njit_lean
def push_newest(meta: NDArray[np.int32], tables: NDArray[np.int64], table: Any, row: Any) -> None:
    """Puts a row that is in no list at the newest end."""
    newest = tables[table, NEWEST]
    meta[row, NEWER] = NO_ROW
    meta[row, OLDER] = newest
    if newest >= 0:
        meta[newest, NEWER] = row
    else:
        tables[table, OLDEST] = row
    tables[table, NEWEST] = row


@njit_lean
def unlink(meta: NDArray[np.int32], tables: NDArray[np.int64], table: Any, row: Any) -> None:
    """Takes a row out of its table's list."""
    newer, older = meta[row, NEWER], meta[row, OLDER]
    if newer >= 0:
        meta[newer, OLDER] = older
    else:
        tables[table, NEWEST] = older
    if older >= 0:
        meta[older, NEWER] = newer
    else:
        tables[table, OLDEST] = newer


@njit_lean
def touch(meta: NDArray[np.int32], tables: NDArray[np.int64], table: Any, row: Any) -> None:
    """Moves a row of the list to the newest end."""
    if tables[table, NEWEST] != row:
        unlink(meta, tables, table, row)
        push_newest(meta, tables, table, row)


@njit_lean
def oldest_first(
    meta: NDArray[np.int32], tables: NDArray[np.int64], table: Any, out: NDArray[np.int32]
) -> Any:
    """Writes the rows of a table's list to ``out``, oldest first; returns how many."""
    row = tables[table, OLDEST]
    count = 0
    while row >= 0:
        out[count] = row
        count += 1
        row = np.int64(meta[row, NEWER])
    return count


@njit_lean
def prefetch_neighbours(meta: NDArray[np.int32], row: Any) -> None:
    """Asks for the meta of the rows that :func:`touch` will write beside ``row``."""
    prefetch(meta, meta[row, NEWER])
    prefetch(meta, meta[row, OLDER])
