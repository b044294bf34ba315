"""Rows whose values lie in slots of memory, or in a file below: found, brought in, sent out.

The shard holds the meta of every row, and behind it one word more, its *place*: where its values are.

    0          nowhere: they are the initial ones, which nobody keeps
    n > 0      in the file, at n - 1
    n < 0      in slot -1 - n

A slot holds a whole record, meta included, so that all kernels that move rows work on slots as they do on rows; of its
meta only the key counts. The place of a slot's copy in the file stays known until the slot changes, so that a row that
was only read leaves without a write.

Slots are given out by a hand that goes around them (a clock), past those that are hot, those whose record is still
being read, and those that the last few calls have used.

Shapes: R rows, N slots, U keys, V 32-bit words of a record, K records on their way.
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
        rows: int32[N], the row that each holds, or -1.
        places: int64[N], where the file has what a slot holds, counted from 1; 0 for nowhere.
        calls: int32[N], the last call that used it.
        flags: uint8[N]. CHANGED: the file has it otherwise. HOT: stays until the hot set is chosen anew. LOADING: its
            record is still being read. FETCHED: it was asked for ahead, and nobody has read it since.
        state: int64[8]: the hand; slots in use; how many are hot and may be; the count from which a row that comes in
            is hot; the number of this call, and of the first of those whose slots stay.
    """

    records: I32x2
    rows: I32
    places: I64
    calls: I32
    flags: U8
    state: I64


class SlotEvictions(NamedTuple):
    """Work that :func:`take_slots` leaves to be done.

    Attributes:
        rows, records: int32[K], int32[K, V]: rows that had to leave, and are to be written.
        freed: int64[K], places in the file that nobody needs any more.
        loads: int32[K], slots whose record is to be read.
        ends: int64[3], how many these are: rows, freed, loads.
    """

    rows: I32
    records: I32x2
    freed: I64
    loads: I32
    ends: I64


@njit_lean
def use_slot(slots: Any, slot: Any, reads: Any) -> Any:
    """Marks a slot as used in this call; returns whether training reads what was fetched ahead.

    As the next three functions, for :class:`Slots` and for :class:`girih.kernels.cpu.device_slots.DeviceSlots`.
    """
    slots.calls[slot] = slots.state[CALL]
    if reads and slots.flags[slot] & FETCHED:
        slots.flags[slot] &= ~FETCHED & 0xFF
        return True
    return False


@njit_lean
def fill_slot(shard: Shard, slots: Any, slot: Any, row: Any) -> None:
    """Gives an empty slot to a row, which stays if it is hot."""
    state = slots.state
    slots.rows[slot] = row
    slots.calls[slot] = state[CALL]
    if state[NUM_HOT] < state[MOST_HOT] and shard.meta[row, at.COUNT] >= state[LEAST_COUNT]:
        slots.flags[slot] = HOT
        state[NUM_HOT] += 1


@njit_lean
def empty_slot(slots: Any, slot: Any) -> None:
    """Takes a slot from its row."""
    if slots.flags[slot] & HOT:
        slots.state[NUM_HOT] -= 1
    slots.rows[slot] = at.NO_ROW
    slots.flags[slot] = 0


@njit_lean
def next_slot(slots: Any, takes_free: Any) -> Any:
    """The next slot that may be emptied, or that is free if ``takes_free``; ``NO_SLOT`` if there is none."""
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
    """Writes where the values of a row are."""
    keep_row(shard, row)
    shard.keys[row, PLACE] = place


@kernel()
def find_slots(shard: Shard, slots: Slots, rows: I32, row_slots: I32) -> Any:
    """Writes the slot of each row: ``MISSING`` where it has none, ``NO_SLOT`` where there is no row; marks slots used.

    Returns:
        How many rows of the file are missing, were fetched ahead, and are still being read.
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
    """Rows that keys have just got have no values yet: what is kept for those that had their numbers goes.

    Args:
        known: int32[U], rows that keys had before.
        freed: int64[U], places in the file that nobody needs any more.

    Returns:
        How many these are.
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
    """Empties a slot; what it held is copied to be written, if the file does not have it."""
    row, place = np.int64(slots.rows[slot]), slots.places[slot]
    if shard.meta[row, at.TABLE] < 0:  # its key has left meanwhile
        set_place(shard, row, 0)
    elif slots.flags[slot] & CHANGED:
        number = leaving.ends[NUM_LEFT]
        leaving.ends[NUM_LEFT] = number + 1
        leaving.rows[number] = row
        for word in range(slots.records.shape[1]):
            leaving.records[number, word] = slots.records[slot, word]
        set_place(shard, row, 0)  # until it is written
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
    """Gives a slot, from key ``start`` on, to each row whose ``row_slots`` is ``MISSING``; others leave for it.

    Args:
        fresh: uint8[U], set where the values of a row are to be made.

    Returns:
        The key to go on from once there are more slots, or U.
    """
    for i in range(start, rows.shape[0]):
        if row_slots[i] != MISSING:
            continue
        row = np.int64(rows[i])
        place = shard.keys[row, PLACE]
        if place < 0:  # the caller sent a key twice
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
    """Fills slots, int32[K], by records of the file, int32[K, V]; returns the first that is another key's, or -1."""
    for i in range(loads.shape[0]):
        for word in range(records.shape[1]):
            if word < _KEY_WORDS and records[i, word] != slots.records[loads[i], word]:
                return i
            slots.records[loads[i], word] = records[i, word]
        slots.flags[loads[i]] &= ~LOADING & 0xFF
    return -1


@kernel()
def set_places(shard: Shard, rows: I32, places: I64) -> None:
    """Writes where the file has rows, int32[K], int64[K]; those whose key has left meanwhile have no place."""
    for i in range(rows.shape[0]):
        set_place(shard, np.int64(rows[i]), places[i] + 1)


@kernel()
def read_slots(
    records: Shard, layout: Layout, ids: I64, tables: I32, row_slots: I32, fresh: U8, hyper: F64x2, out: F32x2
) -> None:
    """Copies the columns of rows in slots to ``out``, float32[U, W]: the initial ones where there is no slot.

    Args:
        records: the slots as a shard.
        fresh: uint8[U], 1 where the slot is to be filled by the initial values first.
        hyper: float64[S, 8], for the optimizers' first state.
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
    """Writes the row of every key, or ``NO_ROW``; ``hints``, int32[U], are where they were."""
    for i in range(ids.shape[0]):
        row = np.int64(hints[i])
        rows[i] = (
            row if holds(shard, row, ids[i], tables[i]) else index.find(shard, ids[i], np.int64(tables[i]))
        )


@kernel()
def mark_changed(shard: Shard, slots: Slots, rows: I32, row_slots: I32, version: int) -> None:
    """Before rows change in their slots: sets their version, and that the file does not have them."""
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            row = np.int64(rows[i])
            keep_row(shard, row)
            note_changed(shard, row)
            shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(version))
            slots.flags[row_slots[i]] |= CHANGED


@kernel()
def alive(shard: Shard, slots: Slots, rows: I32, places: I64, flags: U8) -> None:
    """Writes whether the file's record at each place, int64[K], is still that of its row, int32[K]; not where it is -1."""
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
    """Writes where the file has rows, which are alive, from now on: int32[K], int64[K]."""
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        place = shard.keys[row, PLACE]
        if place < 0:
            slots.places[-1 - place] = places[i] + 1
        else:
            set_place(shard, row, places[i] + 1)
