"""The index of a shard: key to row, exact, by open addressing with linear probing.

Deletion shifts followers back, so that there are no tombstones and a probe ends at the first free
slot. The load stays at or below 3/4; the table doubles by rehashing into fresh memory.

Shapes: C slots, a power of two; U unique keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.hashing import key_hash, low_bits
from girih.kernels.cpu.jit import njit_lean, prefetch
from girih.kernels.cpu.layout import NO_ROW

_ROW_MASK = (1 << 32) - 1
_AHEAD = 12


@njit_lean
def home_slot(slots: NDArray[np.int64], key_id: Any, table: Any) -> Any:
    """The slot at which a key's probe begins."""
    return low_bits(key_hash(key_id, table), slots.shape[0] - 1)


@njit_lean
def find_from(slots: NDArray[np.int64], slot: Any, key_id: Any, table: Any) -> Any:
    """The row of a key whose home slot is known, or ``NO_ROW``."""
    mask = slots.shape[0] - 1
    while slots[slot, 1] != 0:
        if slots[slot, 0] == key_id and (slots[slot, 1] >> 32) == table:
            return (slots[slot, 1] & _ROW_MASK) - 1
        slot = (slot + 1) & mask
    return np.int64(NO_ROW)


@njit_lean
def find(slots: NDArray[np.int64], key_id: Any, table: Any) -> Any:
    """The row of a key, or ``NO_ROW``."""
    return find_from(slots, home_slot(slots, key_id, table), key_id, table)


@njit_lean
def find_all(
    slots: NDArray[np.int64],
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    homes: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> None:
    """Writes the row of every key, or ``NO_ROW``, to ``rows``, int32[U]; ``homes`` is scratch, int64[U]."""
    num_keys = ids.shape[0]
    for i in range(num_keys + _AHEAD):
        if i < num_keys:
            homes[i] = home_slot(slots, ids[i], tables[i])
            prefetch(slots, homes[i])
        j = i - _AHEAD
        if j >= 0:
            rows[j] = find_from(slots, homes[j], ids[j], tables[j])


@njit_lean
def insert(slots: NDArray[np.int64], key_id: Any, table: Any, row: Any) -> None:
    """Adds a key that is not there; a free slot must be left."""
    mask = slots.shape[0] - 1
    slot = home_slot(slots, key_id, table)
    while slots[slot, 1] != 0:
        slot = (slot + 1) & mask
    slots[slot, 0] = key_id
    slots[slot, 1] = (np.int64(table) << 32) | (np.int64(row) + 1)


@njit_lean
def delete(slots: NDArray[np.int64], key_id: Any, table: Any) -> None:
    """Removes a key, if it is there, and closes the gap."""
    mask = slots.shape[0] - 1
    gap = home_slot(slots, key_id, table)
    while slots[gap, 1] != 0 and not (slots[gap, 0] == key_id and (slots[gap, 1] >> 32) == table):
        gap = (gap + 1) & mask
    if slots[gap, 1] == 0:
        return
    slot = (gap + 1) & mask
    while slots[slot, 1] != 0:
        home = home_slot(slots, slots[slot, 0], slots[slot, 1] >> 32)
        # It may move back only if its home does not lie between the gap and itself, around the end.
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            slots[gap, 0] = slots[slot, 0]
            slots[gap, 1] = slots[slot, 1]
            gap = slot
        slot = (slot + 1) & mask
    slots[gap, 1] = 0


@njit_lean
def rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    """Copies all keys of ``old`` into ``new``, which is empty and large enough."""
    mask = new.shape[0] - 1
    for i in range(old.shape[0]):
        if old[i, 1] != 0:
            slot = home_slot(new, old[i, 0], old[i, 1] >> 32)
            while new[slot, 1] != 0:
                slot = (slot + 1) & mask
            new[slot, 0] = old[i, 0]
            new[slot, 1] = old[i, 1]
