"""The index of a shard in GPU memory: an exact map from key to row, by open addressing with linear probing.

A slot has 8 bytes. It is free (0), or its key was removed (:data:`LEFT`, until the index is rebuilt), or it has 31 bits
of a key's hash and the row's number + 1. Keys with equal bits are told apart by the keys in the rows' records. Keys of
a call are unique, so new keys compete only for free slots. One key takes the slot, and the remaining keys continue.
Growth builds a new index from the records.

Shapes: C slots, a power of two; U keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from girih.kernels.gpu.hashing import key_hash
from girih.kernels.gpu.jit import SPARE, block_of, kernel, launch
from girih.kernels.gpu.layout import ID, NO_ROW, TABLE, holds_key, items, load, longs_at, record, words_at

LEFT = constexpr(-1)
_SPARE_MASK = constexpr(SPARE - 1)
_TAG_MASK = constexpr((1 << 31) - 1)
_ROW_MASK = constexpr((1 << 32) - 1)


@triton.jit
def find_rows(
    slots: tensor, num_slots: tensor, chunks: tensor, key_id: tensor, table: tensor, mask: tensor, CHUNK_BITS: constexpr,
    STRIDE: constexpr,
) -> Any:  # fmt: skip
    """Returns the row of each key, int32, or ``NO_ROW`` if it has none or ``mask`` is false."""
    hashed = key_hash(key_id, table)
    tag = (hashed & _TAG_MASK).to(tl.int64)
    slot = (hashed >> 31).to(tl.int64) & (num_slots - 1)
    row = tl.full(key_id.shape, NO_ROW, tl.int32)
    waiting = mask
    left = tl.sum(waiting.to(tl.int32))
    while left > 0:
        entry = load(slots + slot, waiting)
        alike = waiting & (entry > 0) & ((entry >> 32) == tag)
        guessed = ((entry & _ROW_MASK) - 1).to(tl.int32)
        address = record(chunks, guessed, alike, CHUNK_BITS, STRIDE)
        mine = holds_key(address, key_id, table, alike)
        row = tl.where(mine, guessed, row)
        waiting = waiting & (entry != 0) & (mine == 0)
        slot = (slot + 1) & (num_slots - 1)
        left = tl.sum(waiting.to(tl.int32))
    return row


@triton.jit
def insert_rows(
    slots: tensor,
    num_slots: tensor,
    key_id: tensor,
    table: tensor,
    row: tensor,
    mask: tensor,
) -> None:
    """Adds keys that are not in the index. ``slots`` has :data:`SPARE` words after the index."""
    hashed = key_hash(key_id, table)
    tag = (hashed & _TAG_MASK).to(tl.int64)
    slot = (hashed >> 31).to(tl.int64) & (num_slots - 1)
    entry = (tag << 32) | (row.to(tl.int64) + 1)
    waiting = mask
    left = tl.sum(waiting.to(tl.int32))
    while left > 0:
        # Idle lanes use words after the slots, and compare with a value that never occurs in these words.
        found = tl.atomic_cas(
            slots + tl.where(waiting, slot, num_slots + (key_id & _SPARE_MASK)),
            tl.where(waiting, 0, LEFT).to(tl.int64),
            entry,
            sem="relaxed",
        )
        waiting = waiting & (found != 0)
        slot = tl.where(waiting, (slot + 1) & (num_slots - 1), slot)
        left = tl.sum(waiting.to(tl.int32))


@kernel
def _rebuild(
    slots: tensor, num_slots: tensor, chunks: tensor, rows_ever: tensor, CHUNK_BITS: constexpr, STRIDE: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    row = items(BLOCK)
    mask = row < rows_ever
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    table = tl.load(words_at(address) + TABLE, mask=mask, other=NO_ROW)
    live = mask & (table >= 0)
    key_id = load(longs_at(address) + ID, live)
    insert_rows(slots, num_slots, key_id, table, row, live)


def rebuild(num_slots: int, chunks: Tensor, rows_ever: int, chunk_bits: int, stride: int) -> Tensor:
    """Returns a new index, int64[C + SPARE], of all rows that have keys."""
    slots = torch.zeros(num_slots + SPARE, dtype=torch.int64, device=chunks.device)
    launch(
        _rebuild,
        rows_ever,
        block_of(256, rows_ever),
        slots,
        num_slots,
        chunks,
        rows_ever,
        CHUNK_BITS=chunk_bits,
        STRIDE=stride,
    )
    return slots


@kernel
def _remove(
    slots: tensor, num_slots: tensor, chunks: tensor, rows: tensor, num_rows: tensor, CHUNK_BITS: constexpr,
    STRIDE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    at = items(BLOCK)
    row = tl.load(rows + at, mask=at < num_rows, other=NO_ROW)
    mask = row >= 0
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    key_id = load(longs_at(address) + ID, mask)
    table = load(words_at(address) + TABLE, mask)
    hashed = key_hash(key_id, table)
    tag = (hashed & _TAG_MASK).to(tl.int64)
    slot = (hashed >> 31).to(tl.int64) & (num_slots - 1)
    entry = (tag << 32) | (row.to(tl.int64) + 1)
    waiting = mask
    left = tl.sum(waiting.to(tl.int32))
    while left > 0:
        found = load(slots + slot, waiting)
        mine = waiting & (found == entry)
        left_behind = tl.full(slot.shape, LEFT, tl.int64)
        tl.store(slots + slot, left_behind, mask=mine)
        waiting = waiting & (mine == 0) & (found != 0)
        slot = (slot + 1) & (num_slots - 1)
        left = tl.sum(waiting.to(tl.int32))
    tl.store(words_at(address) + TABLE, tl.full(row.shape, NO_ROW, tl.int32), mask=mask)


def remove(slots: Tensor, chunks: Tensor, rows: Tensor, chunk_bits: int, stride: int) -> None:
    """Removes the keys of some rows, int32[·], from the index, and marks their records as free."""
    launch(
        _remove, len(rows), block_of(256, len(rows)), slots, len(slots) - SPARE, chunks, rows, len(rows), CHUNK_BITS=chunk_bits,
        STRIDE=stride,
    )  # fmt: skip
