"""Rows whose values are in slots of memory, or in a file. Kernels find rows, give them slots, and empty slots.

The shard holds the meta of every row, followed by one more word, its *place*: the position of its values.

    0        nowhere: the values are the initial values, which are not stored
    n > 0    in the file, at n - 1
    n < 0    in slot -1 - n

A slot holds a whole record with its meta, so that all kernels that update rows also work on slots. Only the key of this
meta is used. If the file has a copy of a slot's record, the slot keeps the place of this copy until the record changes.
So a row that was only read leaves its slot without a write.

A clock hand goes around the slots to find a slot for a row. It skips hot slots, slots whose record is still being read,
and slots that the last few calls have used.

Shapes: R rows, N slots, U keys, V 32-bit words of a record, K records in transit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from girih.kernels.cpu import index
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import I32, I64, U8, F32x2, F64x2, I32x2
from girih.kernels.cpu.initial import read_initial
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.rows import begin_state, holds, prefetch_ahead, read_row, write_row
from girih.kernels.cpu.saving import keep_row, note_changed

PLACE = at.META_COLUMNS // 2  # the 64-bit word of a row that is its place
ROW_WORDS = at.META_COLUMNS + 2
NO_SLOT, MISSING = -1, -2
CHANGED, HOT, LOADING, FETCHED = 1, 2, 4, 8  # flags of a slot
HAND, NUM_SLOTS, NUM_HOT, MOST_HOT, LEAST_COUNT, CALL, USED_SINCE = range(7)  # entries of ``state``
STATE_WORDS = 8
NUM_LEFT, NUM_FREED, NUM_LOADS = range(3)  # entries of ``ends``
_KEY_WORDS = 3


class Slots(NamedTuple):
    """Memory for the values of some rows.

    Attributes:
        records: int32[N, V].
        rows: int32[N], the row in each slot, or -1.
        places: int64[N], the place in the file of a slot's content, counted from 1, or 0 for nowhere.
        calls: int32[N], the last call that used the slot.
        flags: uint8[N]. CHANGED: the file does not have the current values. HOT: the row stays until the hot set is
            chosen again. LOADING: the record is still being read. FETCHED: the row was fetched ahead, and not read yet.
        state: int64[8]: the hand, the number of slots, the number of hot slots and its maximum, the count from which a
            row that gets a slot is hot, the number of this call, and the number of the first call whose slots stay.
    """

    records: I32x2
    rows: I32
    places: I64
    calls: I32
    flags: U8
    state: I64


class SlotEvictions(NamedTuple):
    """Work that :func:`take_slots` leaves to the caller.

    Attributes:
        rows, records: int32[K], int32[K, V]: rows that left their slots, and records that must be written to the file.
        freed: int64[K], places in the file that are not needed any more.
        loads: int32[K], slots whose record must be read from the file.
        ends: int64[3], the numbers of ``rows``, ``freed`` and ``loads``.
    """

    rows: I32
    records: I32x2
    freed: I64
    loads: I32
    ends: I64


@njit_lean
def use_slot(slots: Any, slot: Any, reads: Any) -> Any:
    """Marks a slot as used in this call. Returns whether training reads a row that was fetched ahead.

    This function and the next three work on :class:`Slots` and on
    :class:`girih.kernels.cpu.device_slots.DeviceSlots`.
    """
    slots.calls[slot] = slots.state[CALL]
    if reads and slots.flags[slot] & FETCHED:
        slots.flags[slot] &= ~FETCHED & 0xFF
        return True
    return False


@njit_lean
def fill_slot(shard: Shard, slots: Any, slot: Any, row: Any) -> None:
    """Gives an empty slot to a row. The slot becomes hot if the row's count is high enough and a hot slot is left."""
    state = slots.state
    slots.rows[slot] = row
    slots.calls[slot] = state[CALL]
    if state[NUM_HOT] < state[MOST_HOT] and shard.meta[row, at.COUNT] >= state[LEAST_COUNT]:
        slots.flags[slot] = HOT
        state[NUM_HOT] += 1


@njit_lean
def empty_slot(slots: Any, slot: Any) -> None:
    """Removes a row from its slot."""
    if slots.flags[slot] & HOT:
        slots.state[NUM_HOT] -= 1
    slots.rows[slot] = at.NO_ROW
    slots.flags[slot] = 0


@njit_lean
def next_slot(slots: Any, takes_free: Any) -> Any:
    """Returns the next slot that may be emptied, or ``NO_SLOT``. With ``takes_free``, also returns free slots."""
    state, num_slots = slots.state, slots.state[NUM_SLOTS]
    slot = state[HAND]
    for _ in range(num_slots):
        if slot >= num_slots:
            slot = 0
        is_idle = slots.flags[slot] & (HOT | LOADING) == 0 and slots.calls[slot] < state[USED_SINCE]
        if takes_free if slots.rows[slot] < 0 else is_idle:
            state[HAND] = slot + 1
            return slot
        slot += 1
    return NO_SLOT


@njit_lean
def set_place(shard: Shard, row: Any, place: Any) -> None:
    """Writes the place of a row's values."""
    keep_row(shard, row)
    shard.keys[row, PLACE] = place


@kernel()
def find_slots(shard: Shard, slots: Slots, rows: I32, row_slots: I32) -> Any:
    """Writes the slot of each row, ``MISSING`` if it has none, ``NO_SLOT`` if there is no row. Marks slots as used.

    Returns:
        Three numbers of rows: rows that are only in the file, rows that were fetched ahead, and rows that are still
        being read.
    """
    num_missing, num_fetched, num_loading = 0, 0, 0
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if row < 0:
            row_slots[i] = NO_SLOT
            continue
        place = shard.keys[row, PLACE]
        if place >= 0:
            row_slots[i] = MISSING
            num_missing += place > 0
            continue
        slot = -1 - place
        row_slots[i] = slot
        num_fetched += use_slot(slots, slot, True)
        if slots.flags[slot] & LOADING:
            num_loading += 1
    return num_missing, num_fetched, num_loading


@kernel()
def forget(shard: Shard, slots: Slots, known: I32, rows: I32, freed: I64) -> Any:
    """Discards the values of row numbers that new keys just got, because they belong to earlier keys.

    Args:
        known: int32[U], the rows that the keys had before.
        freed: int64[U], output: places in the file that are not needed any more.

    Returns:
        The number of ``freed`` places.
    """
    num_freed = 0
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if known[i] >= 0 or row < 0:
            continue
        place = shard.keys[row, PLACE]
        if place < 0:
            slot = -1 - place
            place = slots.places[slot]
            empty_slot(slots, slot)
            slots.places[slot] = 0
        if place > 0:
            freed[num_freed] = place - 1
            num_freed += 1
        set_place(shard, row, 0)
    return num_freed


@njit_lean
def _leave(shard: Shard, slots: Slots, slot: Any, leaving: SlotEvictions) -> None:
    """Empties a slot. If the file does not have the slot's record, copies the record to ``leaving`` for writing."""
    row, place = np.int64(slots.rows[slot]), slots.places[slot]
    if shard.meta[row, at.TABLE] < 0:  # the row has no key any more
        set_place(shard, row, 0)
    elif slots.flags[slot] & CHANGED:
        number = leaving.ends[NUM_LEFT]
        leaving.ends[NUM_LEFT] = number + 1
        leaving.rows[number] = row
        for word in range(slots.records.shape[1]):
            leaving.records[number, word] = slots.records[slot, word]
        set_place(shard, row, 0)  # until the record is written
    else:
        set_place(shard, row, place)
        place = 0
    if place > 0:
        leaving.freed[leaving.ends[NUM_FREED]] = place - 1
        leaving.ends[NUM_FREED] += 1
    empty_slot(slots, slot)
    slots.places[slot] = 0


@kernel()
def take_slots(
    shard: Shard, slots: Slots, rows: I32, start: int, row_slots: I32, fresh: U8, leaving: SlotEvictions
) -> Any:
    """Gives a slot to each row whose ``row_slots`` is ``MISSING``, from key ``start`` on.

    If no slot is free, another row leaves its slot.

    Args:
        fresh: uint8[U], output: 1 for rows whose slots must be filled with initial values.

    Returns:
        U, or the key at which to continue after slots were added.
    """
    for i in range(start, rows.shape[0]):
        if row_slots[i] != MISSING:
            continue
        row = np.int64(rows[i])
        place = shard.keys[row, PLACE]
        if place < 0:  # the key occurs twice in the call
            row_slots[i] = -1 - place
            continue
        slot = next_slot(slots, True)
        if slot < 0:
            return i
        if slots.rows[slot] >= 0:
            _leave(shard, slots, slot, leaving)
        fill_slot(shard, slots, slot, row)
        slots.places[slot] = place
        for word in range(_KEY_WORDS):
            slots.records[slot, word] = shard.meta[row, word]
        set_place(shard, row, -1 - slot)
        row_slots[i] = slot
        if place > 0:
            leaving.loads[leaving.ends[NUM_LOADS]] = slot
            leaving.ends[NUM_LOADS] += 1
        else:
            fresh[i] = 1
    return rows.shape[0]


@kernel()
def put_records(slots: Slots, loads: I32, records: I32x2) -> Any:
    """Fills slots, int32[K], with records of the file, int32[K, V]. Returns the first record of another key, or -1."""
    for i in range(loads.shape[0]):
        for word in range(records.shape[1]):
            if word < _KEY_WORDS and records[i, word] != slots.records[loads[i], word]:
                return i
            slots.records[loads[i], word] = records[i, word]
        slots.flags[loads[i]] &= ~LOADING & 0xFF
    return -1


@kernel()
def set_places(shard: Shard, rows: I32, places: I64) -> None:
    """Sets the places in the file, int64[K], of rows, int32[K]. Skips rows without a key."""
    for i in range(rows.shape[0]):
        set_place(shard, np.int64(rows[i]), places[i] + 1)


@kernel()
def read_slots(
    records: Shard, layout: Layout, ids: I64, tables: I32, row_slots: I32, fresh: U8, hyper: F64x2, out: F32x2
) -> None:
    """Copies the columns of rows in slots to ``out``, float32[U, W]. For keys without a slot, writes initial values.

    Args:
        records: the slots as a shard.
        fresh: uint8[U], 1 if the slot must first be filled with the initial values.
        hyper: float64[S, 8], for the initial optimizer state.
    """
    num_words = at.VALUES + out.shape[1]
    for i in range(row_slots.shape[0]):
        prefetch_ahead(records, row_slots, i, num_words)
        slot = np.int64(row_slots[i])
        if slot >= 0 and fresh[i] == 0:
            read_row(records, layout, slot, out, i)
            continue
        read_initial(layout, ids[i], np.int64(tables[i]), out[i], records.scratch_halves)
        if slot >= 0:
            write_row(records, layout, slot, out, i)
            begin_state(records, layout, slot, out[i], hyper)


@kernel()
def check_rows(shard: Shard, ids: I64, tables: I32, hints: I32, rows: I32) -> None:
    """Writes the row of every key, or ``NO_ROW``, to ``rows``. ``hints``, int32[U], are earlier rows of the keys."""
    for i in range(ids.shape[0]):
        row = np.int64(hints[i])
        rows[i] = (
            row if holds(shard, row, ids[i], tables[i]) else index.find(shard, ids[i], np.int64(tables[i]))
        )


@kernel()
def mark_changed(shard: Shard, slots: Slots, rows: I32, row_slots: I32, version: int) -> None:
    """Sets the version of rows, and marks their slots as changed, so that the file does not have their values.

    Call it before the rows change in their slots.
    """
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            row = np.int64(rows[i])
            keep_row(shard, row)
            note_changed(shard, row)
            shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(version))
            slots.flags[row_slots[i]] |= CHANGED


@kernel()
def alive(shard: Shard, slots: Slots, rows: I32, places: I64, flags: U8) -> None:
    """Writes 1 to ``flags`` if the file's record at a place, int64[K], still belongs to its row, int32[K], else 0."""
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        flags[i] = 0
        if row < 0:
            continue
        place = shard.keys[row, PLACE]
        if place < 0:
            place = slots.places[-1 - place]
        flags[i] = place == places[i] + 1


@kernel()
def move_places(shard: Shard, slots: Slots, rows: I32, places: I64) -> None:
    """Sets new places in the file, int64[K], of live rows, int32[K]."""
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        place = shard.keys[row, PLACE]
        if place < 0:
            slots.places[-1 - place] = places[i] + 1
        else:
            set_place(shard, row, places[i] + 1)
