"""Rows whose values are in slots of a device's memory, or on the host. Kernels give slots to rows, and empty slots.

The host's shard has the meta of every row. :class:`DeviceSlots` records which rows have a slot, but not the values in
the slots. Free slots are taken from a stack. If the stack is empty, a clock hand goes around the slots and empties one
of them. It skips hot slots and recently used slots.

Shapes: R rows, N slots, U keys, K rows in transit, V 32-bit words of a record.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import I32, I64, U8, I32x2
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.rows import prefetch_ahead
from girih.kernels.cpu.saving import keep_row
from girih.kernels.cpu.tiers import CHANGED, MISSING, NO_SLOT, empty_slot, fill_slot, next_slot, use_slot
from girih.kernels.cpu.update import row_to_move

NUM_FREE = 7  # the entry of ``state`` that follows the entries of :mod:`girih.kernels.cpu.tiers`
NUM_LEFT = 0  # the only entry of ``ends``


class DeviceSlots(NamedTuple):
    """The host's record of slots on a device.

    Attributes:
        slot_of: int32[R], the slot with a row's values + 1, or 0 if the host has them.
        rows: int32[N], the row in each slot, or -1.
        calls: int32[N], the last call that used the slot.
        flags: uint8[N], see :class:`girih.kernels.cpu.tiers.Slots`. CHANGED means that the host has old values.
        free: int32[N]. Its first entries are the free slots.
        state: int64[8], see :class:`girih.kernels.cpu.tiers.Slots`. The last entry is the number of free slots.
    """

    slot_of: I32
    rows: I32
    calls: I32
    flags: U8
    free: I32
    state: I64


class EvictedSlots(NamedTuple):
    """Rows that leave their slots: ``slots``, int32[K], ``rows``, int32[K], and in ``ends`` their number, int64[1]."""

    slots: I32
    rows: I32
    ends: I64


@kernel()
def find(slots: DeviceSlots, rows: I32, known: I32, reads: bool, row_slots: I32) -> Any:
    """Writes the slot of each row, ``MISSING`` if it has none, ``NO_SLOT`` if there is no row. Marks slots as used.

    Args:
        known: int32[U], the rows that existed before this call made new rows.
        reads: True if training reads the rows. A read removes their FETCHED flag.

    Returns:
        The number of rows without a slot, and the number of existing rows whose values came or must come from the
        host.
    """
    num_missing, num_cold = 0, 0
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if row < 0:
            row_slots[i] = NO_SLOT
            continue
        slot = np.int64(slots.slot_of[row]) - 1
        if slot < 0:
            row_slots[i] = MISSING
            num_missing += 1
            num_cold += known[i] >= 0
            continue
        row_slots[i] = slot
        num_cold += use_slot(slots, slot, reads)
    return num_missing, num_cold


@njit_lean
def _empty(slots: DeviceSlots, slot: Any) -> None:
    slots.slot_of[slots.rows[slot]] = 0
    empty_slot(slots, slot)
    slots.free[slots.state[NUM_FREE]] = slot
    slots.state[NUM_FREE] += 1


@kernel()
def forget(slots: DeviceSlots, known: I32, rows: I32) -> None:
    """Empties the slots of row numbers that new keys just got, because these slots hold values of earlier keys."""
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if known[i] < 0 and row >= 0 and slots.slot_of[row] > 0:
            _empty(slots, np.int64(slots.slot_of[row]) - 1)


@kernel()
def give_up(slots: DeviceSlots, emptied: I32) -> None:
    """Empties slots, int32[K]."""
    for i in range(emptied.shape[0]):
        _empty(slots, np.int64(emptied[i]))


@njit_lean
def _free_one(shard: Shard, slots: DeviceSlots, leaving: EvictedSlots) -> Any:
    """Empties the next slot that may be emptied. Returns False if there is none.

    If only the slot has the current values of its row, the row is recorded in ``leaving``.
    """
    slot = next_slot(slots, False)
    if slot < 0:
        return False
    row = np.int64(slots.rows[slot])
    if slots.flags[slot] & CHANGED and shard.meta[row, at.TABLE] >= 0:  # a removed row needs no values
        number = leaving.ends[NUM_LEFT]
        leaving.slots[number] = slot
        leaving.rows[number] = row
        leaving.ends[NUM_LEFT] = number + 1
    _empty(slots, slot)
    return True


@kernel()
def take(
    shard: Shard, slots: DeviceSlots, rows: I32, start: int, row_slots: I32, leaving: EvictedSlots
) -> Any:
    """Gives a slot to each row whose ``row_slots`` is ``MISSING``, from key ``start`` on.

    If no slot is free, another row leaves its slot.

    Returns:
        U, or the key at which to continue after slots were added.
    """
    state = slots.state
    for i in range(start, rows.shape[0]):
        if row_slots[i] != MISSING:
            continue
        row = np.int64(rows[i])
        if state[NUM_FREE] == 0 and not _free_one(shard, slots, leaving):
            return i
        state[NUM_FREE] -= 1
        slot = np.int64(slots.free[state[NUM_FREE]])
        fill_slot(shard, slots, slot, row)
        slots.slot_of[row] = slot + 1
        row_slots[i] = slot
    return rows.shape[0]


@kernel()
def free_some(shard: Shard, slots: DeviceSlots, wanted: int, leaving: EvictedSlots) -> Any:
    """Empties slots until ``wanted`` slots are free. Returns the number of missing slots, 0 on success."""
    while slots.state[NUM_FREE] < wanted and _free_one(shard, slots, leaving):
        pass
    return max(0, wanted - slots.state[NUM_FREE])


@kernel()
def note_updates(shard: Shard, ids: I64, tables: I32, rows: I32, step: int, moving: I32) -> None:
    """Writes the row number of every key, or -1, to ``moving``.

    Checks the hint in ``rows``, counts the key, and marks the row as updated in this step.
    """
    for i in range(ids.shape[0]):
        prefetch_ahead(shard, rows, i, at.META_COLUMNS)
        moving[i] = row_to_move(shard, ids[i], np.int64(tables[i]), np.int64(rows[i]), step)


@kernel()
def note_versions(shard: Shard, rows: I32, version: int) -> None:
    """Marks existing rows as changed in a step."""
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            row = np.int64(rows[i])
            keep_row(shard, row)
            shard.meta[row, at.VERSION] = max(shard.meta[row, at.VERSION], np.int32(version))


@kernel()
def copy_values(shard: Shard, rows: I32, out: I32x2) -> None:
    """Copies the words after the meta of rows, int32[K], to ``out``, int32[K, V - 8]."""
    for i in range(rows.shape[0]):
        prefetch_ahead(shard, rows, i, shard.meta.shape[1])
        for word in range(out.shape[1]):
            out[i, word] = shard.meta[rows[i], at.META_COLUMNS + word]


@kernel()
def put_values(shard: Shard, rows: I32, values: I32x2) -> None:
    """Writes ``values``, int32[K, V - 8], to the words after the meta of rows, int32[K]."""
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        keep_row(shard, row)
        for word in range(values.shape[1]):
            shard.meta[row, at.META_COLUMNS + word] = values[i, word]
