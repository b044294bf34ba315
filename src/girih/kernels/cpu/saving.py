"""Copy on write for saves: a verb copies each record to a log before it changes the record for the first time.

A record is a row with its meta, or a page of Bloom cells of the same size. Rows are numbered from 0, and pages from
``FIRST_PAGE``. A save copies records chunk by chunk, in the order of their numbers. Before a verb changes a record that
the save has not copied yet, :func:`keep_row` or :func:`keep_cells` copies the record to the log, once.

Shapes: V 32-bit words of a record, K records of a chunk, L records that fit into the log, P units of a record. A unit
is a word, or a half word if columns have 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.admission import NUM_HASHES, cell_of
from girih.kernels.cpu.arrays import I32, I64, F32x2, I32x2, I64x2, U16x2
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.vector import copy_row

# The first words of a log record: its number, and the place + 1 of the previous record of its chunk.
LINKS = 2
_BLOCK = 256  # rows that fit into the nearest cache


@njit_lean
def _place_of(shard: Shard, number: Any) -> Any:
    """Returns the place in the log for a record whose chunk was not copied yet, or -1 if the log has the record."""
    byte, bit = number >> 3, 1 << (number & 7)
    if shard.kept[byte] & bit != 0:
        return -1
    place = shard.saving[at.NUM_KEPT]
    if place >= shard.log.shape[0]:
        shard.saving[at.LOST] = 1  # the caller did not make room, so the save fails; the shard stays valid
        return -1
    shard.kept[byte] |= bit
    shard.saving[at.NUM_KEPT] = place + 1
    head = at.HEADS + (number >> shard.saving[at.CHUNK_BITS])
    shard.log[place, 0] = number
    shard.log[place, 1] = shard.saving[head]
    shard.saving[head] = place + 1
    return place


@njit_lean
def keep_row(shard: Shard, row: Any) -> None:
    """Copies a row to the log if a save needs it. Call it before any write to the row.

    Without a save, the call costs one comparison.
    """
    if row < shard.saving[at.SAVE_ROWS] and row >= shard.saving[at.SAVED]:
        place = _place_of(shard, np.int64(row))
        if place >= 0:
            for word in range(shard.meta.shape[1]):
                shard.log[place, LINKS + word] = shard.meta[row, word]


@njit_lean
def keep_cells(shard: Shard, layout: Layout, key_id: Any, table: Any) -> None:
    """Copies the pages with a key's Bloom cells to the log if a save needs them.

    Call it before the key is counted in its table's Bloom filter.
    """
    if shard.saving[at.SAVE_PAGES] == 0:
        return
    page_bytes = 4 * shard.meta.shape[1]
    for hashed in range(NUM_HASHES):
        page = np.int64(cell_of(layout.bloom, key_id, table, hashed)) // page_bytes
        number = shard.saving[at.FIRST_PAGE] + page
        if number >= shard.saving[at.SAVED]:
            place = _place_of(shard, number)
            if place >= 0:
                start = page * page_bytes
                for byte in range(min(page_bytes, shard.cells.shape[0] - start)):
                    shard.log_bytes[place, 4 * LINKS + byte] = shard.cells[start + byte]


@kernel()
def put_logged(shard: Shard, chunk: int, first: int, records: I32x2) -> None:
    """Overwrites a chunk's copy with the chunk's records in the log.

    The copy is int32[K, V], and its first record has number ``first``.
    """
    place = shard.saving[at.HEADS + chunk]
    while place > 0:
        number = np.int64(shard.log[place - 1, 0]) - first
        for word in range(records.shape[1]):
            records[number, word] = shard.log[place - 1, LINKS + word]
        place = np.int64(shard.log[place - 1, 1])


@kernel()
def empty_log(shard: Shard, first_chunk: int, out: I32x2, ends: I64) -> Any:
    """Moves the log's records of chunks from ``first_chunk`` on into ``out``, int32[L, 1 + V], chunk by chunk.

    Writes each chunk's end in ``out`` to ``ends``, int64[number of chunks]. Returns the number of records.
    """
    count = 0
    for chunk in range(ends.shape[0]):
        if chunk >= first_chunk:
            place = shard.saving[at.HEADS + chunk]
            while place > 0:
                out[count, 0] = shard.log[place - 1, 0]
                for word in range(out.shape[1] - 1):
                    out[count, 1 + word] = shard.log[place - 1, LINKS + word]
                place = np.int64(shard.log[place - 1, 1])
                count += 1
        shard.saving[at.HEADS + chunk] = 0
        ends[chunk] = count
    shard.saving[at.NUM_KEPT] = 0
    return count


@kernel()
def put_spilled(spilled: I32x2, first: int, records: I32x2) -> None:
    """Overwrites a chunk's copy, int32[K, V], with records of :func:`empty_log`, int32[·, 1 + V]."""
    for i in range(spilled.shape[0]):
        number = np.int64(spilled[i, 0]) - first
        for word in range(records.shape[1]):
            records[number, word] = spilled[i, 1 + word]


@kernel()
def split_halves(records: U16x2, rows: I32, columns: I64x2, starts: I64, out: U16x2) -> None:
    """Works like :func:`split_words`, with half words as units."""
    for column in range(columns.shape[0]):
        first, width = columns[column, 0], columns[column, 1]
        for i in range(rows.shape[0]):
            place = starts[column] + i * width
            for unit in range(width):
                out[0, place + unit] = records[rows[i], first + unit]


@kernel()
def split_words(records: F32x2, rows: I32, columns: I64x2, starts: I64, out: F32x2) -> None:
    """Copies rows of ``records``, [K, P] units, column by column.

    ``columns``, int64[·, 2], has the first unit and the width of each column. Each column becomes one dense array in
    ``out``, [1, ·], which begins at its entry of ``starts``.
    """
    for block in range(0, rows.shape[0], _BLOCK):
        end = min(block + _BLOCK, rows.shape[0])
        for column in range(columns.shape[0]):
            first, width, start = columns[column, 0], columns[column, 1], starts[column]
            if width == 1:
                for i in range(block, end):
                    out[0, start + i] = records[rows[i], first]
            else:
                for i in range(block, end):
                    copy_row(out, 0, start + i * width, records, rows[i], first, width)


@njit_lean
def note_changed(shard: Shard, row: Any) -> None:
    """Records a changed row. Call it when a row is made, updated or set."""
    byte = np.int64(row) >> 3
    if byte < shard.changed.shape[0]:
        shard.changed[byte] |= np.uint8(1 << (np.int64(row) & 7))


@njit_lean
def note_left(shard: Shard, row: Any) -> None:
    """Records a key whose row leaves. Call it before the row is taken from the key.

    If there is no room for the key, sets LEFT_LOST instead.
    """
    if shard.left.shape[0] == 0:
        return
    place = shard.left[0, at.NUM_LEFT] + 1
    if place >= shard.left.shape[0]:
        shard.left[0, at.LEFT_LOST] = 1
        return
    shard.left[place, 0] = shard.keys[row, 0]
    shard.left[place, 1] = shard.meta[row, at.TABLE]
    shard.left[0, at.NUM_LEFT] = place
