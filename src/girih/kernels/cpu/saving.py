"""Copy on write: records as they stood when a save began, kept before a verb changes them.

A record is a row, meta included, or a page of Bloom cells of the same size; rows are numbered from 0, pages
from ``FIRST_PAGE`` on. A save copies them chunk by chunk, in order of their numbers. Whatever writes to a
record that was not copied yet first calls :func:`keep_row` or :func:`keep_cells`, which copy it to a log, once.

Shapes: V 32-bit words of a record, K records of a chunk, L records that the log has room for, P units of a
record (words, or half words where columns have 16 bits).
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

# The first words of a log record: its number, and one more than the place of its chunk's one before.
LINKS = 2
_BLOCK = 256  # rows that stay in the nearest cache while they are split


@njit_lean
def _place_of(shard: Shard, number: Any) -> Any:
    """The log's place for a record of a chunk that was not copied; -1 if it has the record already."""
    byte, bit = number >> 3, 1 << (number & 7)
    if shard.kept[byte] & bit != 0:
        return -1
    place = shard.saving[at.NUM_KEPT]
    if place >= shard.log.shape[0]:
        shard.saving[at.LOST] = 1  # nobody made room: the save fails, memory stays whole
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
    """To be called before a row is written to; costs one comparison where no save is under way."""
    if row < shard.saving[at.SAVE_ROWS] and row >= shard.saving[at.SAVED]:
        place = _place_of(shard, np.int64(row))
        if place >= 0:
            for word in range(shard.meta.shape[1]):
                shard.log[place, LINKS + word] = shard.meta[row, word]


@njit_lean
def keep_cells(shard: Shard, layout: Layout, key_id: Any, table: Any) -> None:
    """To be called before a key is counted in its table's Bloom filter."""
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
    """Puts what the log has of a chunk over its copy, int32[K, V], whose first record has number ``first``."""
    place = shard.saving[at.HEADS + chunk]
    while place > 0:
        number = np.int64(shard.log[place - 1, 0]) - first
        for word in range(records.shape[1]):
            records[number, word] = shard.log[place - 1, LINKS + word]
        place = np.int64(shard.log[place - 1, 1])


@kernel()
def empty_log(shard: Shard, first_chunk: int, out: I32x2, ends: I64) -> Any:
    """Moves the log's records of chunks from ``first_chunk`` on to ``out``, int32[L, 1 + V], chunk by chunk.

    ``ends`` int64[number of chunks] tells where each ends in ``out``; returns how many records there are.
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
    """Puts records of :func:`empty_log`, int32[·, 1 + V], over their chunk's copy, int32[K, V]."""
    for i in range(spilled.shape[0]):
        number = np.int64(spilled[i, 0]) - first
        for word in range(records.shape[1]):
            records[number, word] = spilled[i, 1 + word]


@kernel()
def split_halves(records: U16x2, rows: I32, columns: I64x2, starts: I64, out: U16x2) -> None:
    """As :func:`split_words`, with half words as units."""
    for column in range(columns.shape[0]):
        first, width = columns[column, 0], columns[column, 1]
        for i in range(rows.shape[0]):
            place = starts[column] + i * width
            for unit in range(width):
                out[0, place + unit] = records[rows[i], first + unit]


@kernel()
def split_words(records: F32x2, rows: I32, columns: I64x2, starts: I64, out: F32x2) -> None:
    """Copies rows of ``records``, [K, P] units, column by column.

    Each of ``columns``, int64[·, 2] (first unit, width), is one dense array in ``out``, [1, ·], from its
    ``starts`` on.
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
    """To be called where a row is made, moved or set."""
    byte = np.int64(row) >> 3
    if byte < shard.changed.shape[0]:
        shard.changed[byte] |= np.uint8(1 << (np.int64(row) & 7))


@njit_lean
def note_left(shard: Shard, row: Any) -> None:
    """To be called before a row is taken from its key; where there is no room for the key, that is noted instead."""
    if shard.left.shape[0] == 0:
        return
    place = shard.left[0, at.NUM_LEFT] + 1
    if place >= shard.left.shape[0]:
        shard.left[0, at.LEFT_LOST] = 1
        return
    shard.left[place, 0] = shard.keys[row, 0]
    shard.left[place, 1] = shard.meta[row, at.TABLE]
    shard.left[0, at.NUM_LEFT] = place
