"""Kernels on rows in immutable files that are mapped into memory. They write and check the index, and search keys.

An index is int64[C, 2], with two words per slot: an id, and ``table << 40 | row + 1``. The second word of a free slot
is 0, so new memory is an empty index. A slot has the key itself, so a search does not read rows. A *buried* key has no
row any more, and its slot has :data:`BURIED` as row. The home of a key is in a block of :data:`BLOCK` slots. The upper
half of the key's hash chooses the block, and its lowest bits choose the slot. A probe continues slot by slot, around
the end. Entries keep their slots, and at least 1/4 of the slots are free.

Shapes: C slots, K keys, U unique keys, S files of a stack, W columns of a row, B examples, F features of a batch, P
features of one output, D and E columns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import (
    I32,
    I64,
    U8,
    U16,
    U64,
    F32x2,
    I64x2,
    SealedF32x2,
    SealedI32,
    SealedI64,
    SealedI64x2,
)
from girih.kernels.cpu.hashing import key_hash, low_bits, scaled
from girih.kernels.cpu.initial import read_initial
from girih.kernels.cpu.jit import JIT_DISABLED, kernel, njit_lean, reading, types
from girih.kernels.cpu.layout import Layout
from girih.kernels.cpu.system import address_of, prefetch_address, prefetch_words, row_address
from girih.kernels.cpu.vector import copy_from

BLOCK_BITS = 8
BLOCK = 1 << BLOCK_BITS
ROW_BITS = 40
ROW_MASK = (1 << ROW_BITS) - 1
BURIED = ROW_MASK - 1  # the largest row number that fits into a slot

# Columns of ``files``.
INDEX, NUM_SLOTS, ROWS = range(3)
FILE_COLUMNS = 3
AT_ONCE = 64
"""The number of keys that are searched together."""
_SLOT_BYTES = 16
_SLOTS_AHEAD = 24
_MOST_PROBES, _MOST_PROBES_SMALL = (
    64,
    1 << 20,
)  # the most probes of a check of an index: a number for each slot on average, and an additional number

if JIT_DISABLED:

    def word_at(address: Any) -> Any:
        """Returns the int64 at an address."""
        return ctypes.c_int64.from_address(int(address)).value

else:
    word_at = reading(types.int64, 8)


@njit_lean
def home_of(key: Any, num_slots: Any) -> Any:
    """Returns the slot at which the probe of a key with this hash begins."""
    return (scaled(key, num_slots >> BLOCK_BITS) << BLOCK_BITS) + low_bits(key, BLOCK - 1)


@njit_lean
def row_in(index: Any, num_slots: Any, key: Any, key_id: Any, table: Any) -> Any:
    """Returns the row of a key with this hash in the index at an address, ``BURIED``, or ``NO_ROW``."""
    slot = home_of(key, num_slots)
    while True:
        word = word_at(index + _SLOT_BYTES * slot + 8)
        if word == 0:
            return np.int64(at.NO_ROW)
        if (word >> ROW_BITS) == table and word_at(index + _SLOT_BYTES * slot) == key_id:
            return (word & ROW_MASK) - 1
        slot += 1
        if slot == num_slots:
            slot = np.int64(0)


@njit_lean
def row_in_stack(files: I64x2, key: Any, key_id: Any, table: Any) -> Any:
    """Returns the first file that has a key with this hash, or -1, and the result of :func:`row_in` for this file."""
    for f in range(files.shape[0]):
        row = row_in(files[f, INDEX], files[f, NUM_SLOTS], key, key_id, table)
        if row != at.NO_ROW:
            return np.int64(f), row
    return np.int64(-1), np.int64(at.NO_ROW)


@njit_lean
def free_slot(index: Any, num_slots: Any, key: Any) -> Any:
    """Returns the slot for a new key with this hash. The key must not be in the index."""
    slot = home_of(key, num_slots)
    while index[slot, 1] != 0:
        slot += 1
        if slot == num_slots:
            slot = np.int64(0)
    return slot


@kernel()
def insert(index: I64x2, ids: SealedI64, tables: SealedI32, first: int, taken: U8) -> Any:
    """Adds keys to an index. An existing entry, with a row or buried, stays unchanged.

    Args:
        first: the row of the first new key. The rows of the following new keys are adjacent. -1 buries all new keys.
        taken: uint8[K], output: 1 for each new key.

    Returns:
        The number of new keys.
    """
    start, num_slots, num_new = address_of(index), index.shape[0], np.int64(0)
    num_keys = ids.shape[0]
    for begin in range(0, num_keys, AT_ONCE):
        end = min(begin + AT_ONCE, num_keys)
        for i in range(begin, end):
            home = home_of(key_hash(ids[i], np.int64(tables[i])), num_slots)
            prefetch_address(start + _SLOT_BYTES * home)
        for i in range(begin, end):
            key_id, table = ids[i], np.int64(tables[i])
            key = key_hash(key_id, table)
            taken[i] = 0
            if row_in(start, num_slots, key, key_id, table) != at.NO_ROW:
                continue
            slot = free_slot(index, num_slots, key)
            row = np.int64(BURIED) if first < 0 else np.int64(first) + num_new
            index[slot, 0] = key_id
            index[slot, 1] = (table << ROW_BITS) | (row + 1)
            taken[i] = 1
            num_new += 1
    return num_new


@kernel()
def first_unsound(index: SealedI64x2, num_rows: int, num_buried: int, num_tables: int) -> Any:
    """Returns the first slot with an invalid entry, or with a key that a lookup does not find, or -1 if all are valid.

    Returns the number of slots if no slot is free, or if the numbers of keys with rows or of buried keys differ from
    the expected numbers. In an index of girih, the time of all lookups is proportional to the number of slots. The
    check stops if it takes far longer, because the index was not made by girih.
    """
    num_slots, num_free, num_without = index.shape[0], 0, 0
    for slot in range(num_slots):
        word = index[slot, 1]
        if word == 0:
            num_free += 1
            continue
        row = (word & ROW_MASK) - 1
        table = word >> ROW_BITS
        num_without += row == BURIED
        if table < 0 or table >= num_tables or row < 0 or (row >= num_rows and row != BURIED):
            return np.int64(slot)
    if num_free == 0 or num_without != num_buried or num_slots - num_free - num_without != num_rows:
        return np.int64(num_slots)
    patience = _MOST_PROBES * num_slots + _MOST_PROBES_SMALL
    for slot in range(num_slots):
        if index[slot, 1] == 0:
            continue
        key_id, table = index[slot, 0], index[slot, 1] >> ROW_BITS
        place = home_of(key_hash(key_id, table), num_slots)
        while index[place, 1] != 0 and (index[place, 0] != key_id or index[place, 1] >> ROW_BITS != table):
            place += 1
            patience -= 1
            if place == num_slots:
                place = np.int64(0)
        if place != slot or patience < 0:
            return np.int64(slot)
    return np.int64(-1)


@kernel()
def find_unknown(files: I64x2, ids: SealedI64, tables: SealedI32, unknown: U8) -> None:
    """Writes 1 to ``unknown``, uint8[K], for each key that no file of a stack has; see :func:`read_stack`."""
    for i in range(ids.shape[0]):
        table = np.int64(tables[i])
        file, _ = row_in_stack(files, key_hash(ids[i], table), ids[i], table)
        unknown[i] = file < 0


@kernel()
def take_unknown(
    newer: I64x2,
    index: SealedI64x2,
    rows: SealedF32x2,
    target: I64x2,
    progress: I64,
    most_rows: int,
    out: int,
) -> None:
    """Adds the keys with rows of a file to another index, and copies their rows. Skips keys that a stack of files has.

    Slots of all indexes are in the order of hashes, so each index is read from front to back.

    Args:
        newer: the stack, see :func:`read_stack`. index, rows: the index and rows of the file.
        target: the index that receives the keys. It must not have any of them.
        out: the address for the first new row. The following rows are adjacent.
        progress: int64[2], the slot of ``index`` and the number of the new row at which to begin. The call replaces
            them by the slot and the number at which to continue.
        most_rows: the call stops before it would copy a row with this number.
    """
    num_slots, width, size = target.shape[0], rows.shape[1], index.shape[0]
    slot, row = progress[0], progress[1]
    first = row
    while slot < size:
        if slot + _SLOTS_AHEAD < size:
            coming = index[slot + _SLOTS_AHEAD, 1] & ROW_MASK
            if coming != 0 and coming - 1 != BURIED:
                prefetch_words(row_address(rows, coming - 1), width)
        word = index[slot, 1]
        own = (word & ROW_MASK) - 1
        if word != 0 and own != BURIED:
            key_id, table = index[slot, 0], word >> ROW_BITS
            key = key_hash(key_id, table)
            file, _ = row_in_stack(newer, key, key_id, table)
            if file < 0:
                if row == most_rows:
                    break
                place = free_slot(target, num_slots, key)
                target[place, 0] = key_id
                target[place, 1] = (table << ROW_BITS) | (row + 1)
                copy_from(out + 4 * width * (row - first), row_address(rows, own), width)
                row += 1
        slot += 1
    progress[0], progress[1] = slot, row


@kernel()
def read_stack(
    files: I64x2,
    layout: Layout,
    ids: I64,
    tables: I32,
    keys: U64,
    halves: U16,
    in_place: bool,
    file_of_key: I32,
    out: F32x2,
    addresses: I64,
) -> None:
    """Reads the row of each key from the first file of a stack that has the key.

    A key without a row, or a buried key, has its initial value.

    Args:
        files: int64[S, 3], newest first: the address of the index, its number of slots, the address of the rows.
        ids, tables: int64[U], int32[U], the keys.
        keys: scratch, uint64[U]. halves: scratch, uint16[W], for rows of 16 bits.
        in_place: True leaves rows in place; False copies them to ``out``.
        file_of_key: int32[U], output: the file that has the row, -1 for an unknown key, -2 for a buried key.
        out: float32[U, W], output for initial values and copied rows.
        addresses: int64[U], output: the address of each key's float32[W].
    """
    num_keys, num_files, dim = ids.shape[0], files.shape[0], out.shape[1]
    for first in range(0, num_keys, AT_ONCE):
        last = min(first + AT_ONCE, num_keys)
        for i in range(first, last):
            keys[i] = key_hash(ids[i], np.int64(tables[i]))
            for f in range(num_files):
                prefetch_address(files[f, INDEX] + _SLOT_BYTES * home_of(keys[i], files[f, NUM_SLOTS]))
        for i in range(first, last):
            key_id, table = ids[i], np.int64(tables[i])
            file, row = row_in_stack(files, keys[i], key_id, table)
            if file < 0 or row == BURIED:
                file_of_key[i] = -1 if file < 0 else -2
                read_initial(layout, key_id, table, out[i], halves)
                addresses[i] = row_address(out, i)
                continue
            file_of_key[i] = file
            addresses[i] = files[file, ROWS] + 4 * dim * row
            prefetch_words(addresses[i], dim)
        if not in_place:
            for i in range(first, last):  # rows were prefetched above
                if file_of_key[i] >= 0:
                    copy_from(row_address(out, i), addresses[i], dim)
                    addresses[i] = row_address(out, i)


@kernel()
def copy_each(
    files: I64x2,
    layout: Layout,
    ids: SealedI64,
    num_examples: int,
    features: I64,
    tables: I32,
    places: I64,
    keys: U64,
    halves: U16,
    made: F32x2,
    addresses: I64,
    target: int,
    dim: int,
    tail: int,
    num_tail: int,
) -> None:
    """Copies the row of every id to the vector of its bag. Each bag must have one id.

    The result is the same as from :func:`read_stack` and ``pool.stitch`` of unique keys. Ids are not deduplicated. Rows
    are prefetched while other ids are looked up. If an id equals the id of the previous example, it is not looked up
    again. Vectors are written in the order of memory.

    Args:
        files: see :func:`read_stack`.
        ids: int64[F·B], feature by feature.
        features, tables, places: int64[P], int32[P], int64[P]: the features, the table of each, and its place in the
            output.
        keys, addresses: scratch, uint64[K] and int64[K]. K ids are processed together. K is at least P.
        halves: scratch, uint16[W], for rows of 16 bits. made: scratch, float32[K, W], for initial values.
        target, dim: the address of the output, float32[B, P, D], and D.
        tail, num_tail: the address of the output for the following columns, float32[B, P, E], and E, which may be 0.
    """
    num_files, width, num_places = files.shape[0], made.shape[1], features.shape[0]
    step = addresses.shape[0] // num_places
    for first in range(0, num_examples, step):
        size = min(step, num_examples - first)
        for f in range(num_places):
            begin, table = features[f] * num_examples + first, np.int64(tables[f])
            for b in range(size):
                key = key_hash(ids[begin + b], table)
                keys[f * step + b] = key
                if b == 0 or ids[begin + b] != ids[begin + b - 1]:
                    for s in range(num_files):
                        prefetch_address(files[s, INDEX] + _SLOT_BYTES * home_of(key, files[s, NUM_SLOTS]))
        for f in range(num_places):
            begin, table = features[f] * num_examples + first, np.int64(tables[f])
            for b in range(size):
                key_id = ids[begin + b]
                place, n = b * num_places + places[f], f * step + b
                if b > 0 and key_id == ids[begin + b - 1]:
                    addresses[place] = addresses[place - num_places]
                    continue
                file, row = row_in_stack(files, keys[n], key_id, table)
                if file < 0 or row == BURIED:
                    read_initial(layout, key_id, table, made[n], halves)
                    addresses[place] = row_address(made, n)
                else:
                    addresses[place] = files[file, ROWS] + 4 * width * row
                    prefetch_words(addresses[place], dim + num_tail)
        for n in range(size * num_places):
            bag = first * num_places + n
            copy_from(target + 4 * dim * bag, addresses[n], dim)
            if num_tail > 0:
                copy_from(tail + 4 * num_tail * bag, addresses[n] + 4 * dim, num_tail)
