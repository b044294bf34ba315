"""Dedup: the ids of a batch become unique keys of one shard, and each id learns its key's number.

A scratch hash table serves one table of rows after the other, and stays in L2: slots hold numbers that only grow,
so that what an earlier table or batch left is known as old and never cleared. Ids of a table that are too many for that
are parted by hash first, and each part takes its turn.

Shapes: B examples, F features of the group, N ids in the batch, n of one feature, U unique keys of this shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, U64, SealedI32, SealedI64
from girih.kernels.cpu.hashing import key_hash, low_bits, scaled, word16
from girih.kernels.cpu.jit import kernel, njit_lean

MAX_NUMBER = (1 << 31) - 1
SLOTS_PER_ID = 3  # at least: few enough to stay in L2, many enough that homes are free
LEAST_SLOTS = 1 << 10
MOST_TOGETHER = 1 << 13  # ids of a table that are not parted
PART_BITS = 4
NUM_PARTS = 1 << PART_BITS


@njit_lean
def choose(
    ids: I64,
    first: Any,
    last: Any,
    table: Any,
    shard: Any,
    num_shards: Any,
    hashes: U64,
    positions: I32,
    count: Any,
) -> Any:
    """Lists in ``positions``, from ``count`` on, which of ``ids[first:last]`` are this shard's; returns how many there are now.

    ``hashes``, uint64[·], takes the hash of each id listed, in their order.
    """
    part, part_hashes, places = ids[first:last], hashes[count:], positions[count:]
    for i in range(len(part)):
        part_hashes[i] = key_hash(part[i], table)
    chosen = np.int64(0)
    for i in range(len(part)):  # without a branch, which would be mispredicted every other time
        h = part_hashes[i]
        places[chosen] = first + i
        part_hashes[chosen] = h
        chosen += np.int64(scaled(h, num_shards) == shard)
    return count + chosen


@njit_lean
def part_of(h: Any) -> Any:
    """The part of a table's ids that a hash belongs to."""
    return word16(h, 1) >> (16 - PART_BITS)


@njit_lean
def part_by_hash(hashes: U64, positions: I32, count: Any, room: Any, ends: I64) -> None:
    """Sorts what :func:`choose` lists by parts; it lies ``room`` places further on, part p up to ``ends[p]``."""
    ends[:] = 0
    for n in range(count):
        ends[part_of(hashes[n])] += 1
    total = np.int64(room)
    for part in range(len(ends)):  # until it is filled, a part's end is where its next id goes
        total += ends[part]
        ends[part] = total - ends[part]
    for n in range(count):
        part = part_of(hashes[n])
        place = ends[part]
        hashes[place], positions[place] = hashes[n], positions[n]
        ends[part] = place + 1


@njit_lean
def number_keys(
    ids: I64,
    table: Any,
    hashes: U64,
    positions: I32,
    first: Any,
    last: Any,
    mask: Any,
    scratch: I32,
    base: Any,
    oldest: Any,
    first_key: Any,
    num_keys: Any,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
) -> Any:
    """Numbers the keys of the ids ``positions[first:last]``; returns how many keys there are now."""
    for n in range(first, last):
        i = positions[n]
        id_ = ids[i]
        slot = low_bits(hashes[n], mask)
        while True:
            entry = np.int64(scratch[slot])
            if entry < oldest:
                scratch[slot] = base + num_keys
                keys[num_keys] = id_
                key_tables[num_keys] = table
                counts[num_keys] = 1
                inverse[i] = first_key + num_keys
                num_keys += 1
                break
            key = entry - base
            if keys[key] == id_:
                counts[key] += 1
                inverse[i] = first_key + key
                break
            slot = (slot + 1) & mask
    return num_keys


@njit_lean
def unique_keys(
    ids: I64,
    offsets: I32,
    num_examples: Any,
    features: I64,
    tables: I32,
    shard: Any,
    num_shards: Any,
    scratch: I32,
    base: Any,
    hashes: U64,
    first_key: Any,
    positions: I32,
    ends: I64,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
    key_ends: I64,
) -> Any:
    """Finds the unique keys of one shard; see :func:`dedup`."""
    num_keys, first = np.int64(0), np.int64(0)
    while first < len(features):
        table, num_ids, count, last = tables[first], np.int64(0), np.int64(0), first
        while last < len(features) and tables[last] == table:
            begin, end = offsets[features[last] * num_examples], offsets[(features[last] + 1) * num_examples]
            count = choose(ids, begin, end, table, shard, num_shards, hashes, positions, count)
            num_ids += end - begin
            last += 1
        oldest = base + num_keys  # of this table's entries
        if num_ids <= MOST_TOGETHER:
            num_keys = number_keys(
                ids, table, hashes, positions, 0, count, len(scratch) - 1, scratch, base, oldest, first_key, num_keys,
                inverse, keys, key_tables, counts,
            )  # fmt: skip
        else:
            part_by_hash(hashes, positions, count, num_ids, ends)
            begin = num_ids
            for part in range(len(ends)):
                num_slots = np.int64(LEAST_SLOTS)
                while num_slots < SLOTS_PER_ID * (ends[part] - begin):
                    num_slots *= 2
                mask = np.int64(min(num_slots, np.int64(len(scratch)))) - 1
                num_keys = number_keys(
                    ids, table, hashes, positions, begin, ends[part], mask, scratch, base, base + num_keys, first_key,
                    num_keys, inverse, keys, key_tables, counts,
                )  # fmt: skip
                begin = ends[part]
        for f in range(first, last):
            key_ends[f] = num_keys
        first = last
    return num_keys


@njit_lean
def sum_counts(inverse: I32, counts: I32, first_key: Any, out: I32) -> None:
    """Writes to ``out``, int32[U], the sum of the ``counts``, int32[N], of the ids of each key from ``first_key`` on."""
    out[:] = 0
    for n in range(len(inverse)):
        key = inverse[n] - first_key
        if 0 <= key < len(out):
            out[key] += counts[n]


@kernel()
def dedup(
    ids: SealedI64,
    offsets: SealedI32,
    num_examples: int,
    features: I64,
    tables: I32,
    shard: int,
    num_shards: int,
    scratch: I32,
    base: int,
    hashes: U64,
    first_key: int,
    positions: I32,
    ends: I64,
    amounts: SealedI32,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
    key_ends: I64,
) -> Any:
    """Finds the unique keys of some features of a batch that belong to one shard (Unique & Partition, PICASSO §III-B).

    Args:
        ids: int64[N] of the whole batch; offsets: int32[·], the batch's bag bounds.
        features, tables: int64[F], int32[F]: which features, and the table of each; features of one
            table stand together.
        shard, num_shards: whose keys; other ids are passed over.
        scratch: int32[S], S a power of two above the ids of any one table that is not parted: ``base`` plus the number
            of a key. What is below ``base`` is a free slot.
        base: at least 1, above all that calls before wrote to ``scratch``: their ``base`` + U.
        hashes, positions: scratch, uint64 and int32, with room for the ids of any one table; for those of a table with
            more than :data:`MOST_TOGETHER` ids twice.
        first_key: number of the first key, where shards share one numbering.
        ends: scratch, int64[:data:`NUM_PARTS`].
        amounts: int32[N], how often each id stands for itself, the numbers of ids elsewhere being -1; of length 0 where
            it is once.
        inverse: int32[N], written for this shard's ids: the number of each id's key.
        keys, key_tables, counts: int64, int32, int32, each with room for every id; written up to U.
        key_ends: int64[F], written: how many keys there are after each feature's table.

    Returns:
        U.
    """
    num_keys = unique_keys(
        ids, offsets, num_examples, features, tables, shard, num_shards, scratch, base, hashes, first_key, positions, ends,
        inverse, keys, key_tables, counts, key_ends,
    )  # fmt: skip
    if len(amounts) > 0:
        sum_counts(inverse, amounts, first_key, counts[:num_keys])
    return num_keys
