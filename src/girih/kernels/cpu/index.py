"""The index of a shard: an exact map from key to row, by open addressing with linear probing, 8 bytes per slot.

A slot has the key's tag, which is 31 bits of its hash, and the number of its row. Keys with equal tags are told apart
by the keys in the rows' meta. The upper bits of a tag give the key's home. So slots are in the order of tags, and
growth copies slots from front to back.

Growth is spread over insertions. Each insertion moves at least :data:`MOVES` slots, in whole clusters, from ``slots``
to ``next_slots``, which is twice as large. Keys whose home was moved are in ``next_slots``. Growth starts after a
free slot and wraps around the end, so that no cluster is split.

Deletion shifts later entries back. So there are no tombstones, and a probe ends at the first free slot. The load is at
most 3/4. During growth it stays below 13/16.

Shapes: C slots, a power of two up to 2³¹; U unique keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import I32, I64
from girih.kernels.cpu.hashing import key_hash, low_bits
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.system import prefetch

MOVES = 16
_SLOTS_OF_LINE = 8
_TAG_MASK = (1 << at.TAG_BITS) - 1
_ROW_MASK = (1 << 32) - 1


@njit_lean
def tag_of(key_id: Any, table: Any) -> Any:
    """Returns the tag of a key: 31 bits of its hash, whose upper bits give the key's home."""
    return low_bits(key_hash(key_id, table), _TAG_MASK)


@njit_lean
def is_moved(shard: Shard, home: Any) -> Any:
    """Returns whether keys with this home, a slot of ``slots``, were moved to ``next_slots``."""
    mask = shard.slots.shape[0] - 1
    return ((home - shard.state[at.GROW_START]) & mask) < shard.state[at.GROW_MOVED]


@njit_lean
def home_of(shard: Shard, tag: Any) -> Any:
    """Returns the array of slots that has keys of a tag, the tag's home in it, and the shift that gives the home."""
    shift = shard.state[at.INDEX_SHIFT]
    if is_moved(shard, tag >> shift):
        return shard.next_slots, tag >> (shift - 1), shift - 1
    return shard.slots, tag >> shift, shift


@njit_lean
def holds_key(shard: Shard, row: Any, key_id: Any, table: Any) -> Any:
    """Returns whether a row belongs to this key. The row must have been made before."""
    return shard.keys[row, 0] == key_id and shard.meta[row, at.TABLE] == table


@njit_lean
def _slot_of(shard: Shard, slots: I64, slot: Any, tag: Any, key_id: Any, table: Any) -> Any:
    """Returns the key's slot, or the free slot at which its probe ends."""
    mask = slots.shape[0] - 1
    while slots[slot] != 0:
        entry = slots[slot]
        if (entry >> 32) == tag and holds_key(shard, (entry & _ROW_MASK) - 1, key_id, table):
            break
        slot = (slot + 1) & mask
    return slot


@njit_lean
def find_tagged(shard: Shard, tag: Any, key_id: Any, table: Any) -> Any:
    """Returns the row of a key whose tag is known, or ``NO_ROW``."""
    slots, home, _ = home_of(shard, tag)
    return (slots[_slot_of(shard, slots, home, tag, key_id, table)] & _ROW_MASK) - 1


@njit_lean
def find(shard: Shard, key_id: Any, table: Any) -> Any:
    """Returns the row of a key, or ``NO_ROW``."""
    return find_tagged(shard, tag_of(key_id, table), key_id, table)


@njit_lean
def _first_tagged(slots: I64, slot: Any, tag: Any) -> Any:
    mask = slots.shape[0] - 1
    while slots[slot] != 0 and (slots[slot] >> 32) != tag:
        slot = (slot + 1) & mask
    return (slots[slot] & _ROW_MASK) - 1


@njit_lean
def guess(shard: Shard, tag: Any) -> Any:
    """Returns the first row of a tag, or ``NO_ROW``. The first row is nearly always the key's row."""
    slots, home, _ = home_of(shard, tag)
    return _first_tagged(slots, home, tag)


@njit_lean
def prefetch_home(shard: Shard, tag: Any) -> None:
    """Prefetches the slot at which the probe of a tag begins."""
    slots, home, _ = home_of(shard, tag)
    prefetch(slots, home)


@njit_lean
def tag_all(ids: I64, tables: I32, tags: I32) -> None:
    """Writes the tag of every key, int32[U]. A loop without branches computes several hashes at the same time."""
    for i in range(ids.shape[0]):
        tags[i] = tag_of(ids[i], tables[i])


@njit_lean
def _put(slots: I64, slot: Any, entry: Any) -> None:
    mask = slots.shape[0] - 1
    while slots[slot] != 0:
        slot = (slot + 1) & mask
    slots[slot] = entry


@njit_lean
def insert(shard: Shard, key_id: Any, table: Any, row: Any) -> None:
    """Adds a key that is not in the index. A free slot must remain."""
    tag = np.int64(tag_of(key_id, table))
    entry = (tag << 32) | (np.int64(row) + 1)
    slots, home, _ = home_of(shard, tag)
    _put(slots, home, entry)


@njit_lean
def _close_gap(slots: I64, gap: Any, shift: Any) -> None:
    mask = slots.shape[0] - 1
    slot = (gap + 1) & mask
    while slots[slot] != 0:
        home = (slots[slot] >> 32) >> shift
        # An entry may shift back only if its home is not between the gap and its slot, also around the end.
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            slots[gap] = slots[slot]
            gap = slot
        slot = (slot + 1) & mask
    slots[gap] = 0


@njit_lean
def delete(shard: Shard, key_id: Any, table: Any) -> None:
    """Removes a key, if it is in the index, and closes the gap."""
    tag = tag_of(key_id, table)
    slots, home, shift = home_of(shard, tag)
    slot = _slot_of(shard, slots, home, tag, key_id, table)
    if slots[slot] != 0:
        _close_gap(slots, slot, shift)


@kernel()
def after_free_slot(slots: I64) -> Any:
    """Returns the first slot after a free slot, where growth may begin."""
    slot = 0
    while slots[slot] != 0:
        slot += 1
    return (slot + 1) & (slots.shape[0] - 1)


@njit_lean
def move(shard: Shard, at_least: Any) -> None:
    """Moves at least ``at_least`` slots to ``next_slots``, in whole clusters, and frees the slots that it moved.

    Moves fewer if the memory claimed so far for ``next_slots`` has no room for more. Clusters stay whole in this case
    too. :meth:`girih.store.memory.shard_memory.ShardMemory.grow_index` claims more memory.
    """
    slots, num_slots = shard.slots, shard.slots.shape[0]
    mask, shift = num_slots - 1, shard.state[at.INDEX_SHIFT]
    start, moved = shard.state[at.GROW_START], shard.state[at.GROW_MOVED]
    stop = min(moved + at_least, shard.state[at.GROW_CLAIMED])
    while moved < stop or (moved > shard.state[at.GROW_MOVED] and slots[(start + moved) & mask] != 0):
        slot = (start + moved) & mask
        entry = slots[slot]
        if entry != 0:
            slots[slot] = 0
            home = (entry >> 32) >> shift
            if ((home - start) & mask) > moved:  # the entry wrapped around from the other end
                _put(slots, home, entry)
            else:
                _put(shard.next_slots, (entry >> 32) >> (shift - 1), entry)
        moved += 1
    shard.state[at.GROW_MOVED] = moved
    # Prefetch for the next call. It comes after random accesses, so the processor does not recognize the two streams.
    slot = (start + moved) & mask
    for line in range(0, 2 * MOVES, _SLOTS_OF_LINE):
        prefetch(slots, (slot + line // 2) & mask)
        prefetch(shard.next_slots, 2 * slot + line)


@kernel()
def move_slots(shard: Shard, at_least: int) -> None:
    """Moves slots like :func:`move`."""
    move(shard, at_least)


@njit_lean
def is_full(shard: Shard) -> Any:
    """Returns whether no key may be added now. The index must first start to grow, claim more memory, or end growth."""
    if shard.state[at.GROWING] == 0:
        return 4 * (shard.state[at.NUM_ROWS] + 1) > 3 * shard.slots.shape[0]
    return shard.state[at.GROW_MOVED] >= shard.state[at.GROW_CLAIMED]


@kernel()
def insert_all(shard: Shard, rows: I32) -> None:
    """Adds the keys of rows, int32[K], which must not be in the index.

    The index must have room and must not be growing.
    """
    for i in range(rows.shape[0]):
        insert(shard, shard.keys[rows[i], 0], np.int64(shard.meta[rows[i], at.TABLE]), rows[i])


@kernel()
def find_all(shard: Shard, ids: I64, tables: I32, rows: I32) -> None:
    """Writes the row of every key, or ``NO_ROW``, to ``rows``, int32[U]."""
    for i in range(ids.shape[0]):
        rows[i] = find(shard, ids[i], np.int64(tables[i]))
