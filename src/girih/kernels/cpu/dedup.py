"""Deduplicates the ids of a batch into unique keys of one shard, and gives each id the number of its key.

One scratch hash table is used for one table of rows after the other, and stays in the L2 cache. Slots contain numbers
that only grow. So entries of earlier tables or batches are recognized as old, and the hash table is never cleared. If a
table has too many ids for this, its ids are first divided by hash into parts, which use the hash table in turn.

Shapes: B examples, F features of the group, N ids in the batch, n ids of one feature, U unique keys of this shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, U64, SealedI32, SealedI64
from girih.kernels.cpu.hashing import key_hash, low_bits, scaled, word16
from girih.kernels.cpu.jit import kernel, njit_lean

MAX_NUMBER = (1 << 31) - 1
SLOTS_PER_ID = 3  # the least number: small enough for the L2 cache, large enough that most homes are free
LEAST_SLOTS = 1 << 10
MOST_TOGETHER = 1 << 13  # the most ids of a table that are not divided
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
    """Appends the indices of this shard's ids among ``ids[first:last]`` to ``positions``, which has ``count`` entries.

    ``hashes``, uint64[·], receives the hash of each listed id, in the same order. Returns the new number of listed
    ids.
    """
    part, part_hashes, places = ids[first:last], hashes[count:], positions[count:]
    for i in range(len(part)):
        part_hashes[i] = key_hash(part[i], table)
    chosen = np.int64(0)
    for i in range(len(part)):  # a branch would be mispredicted half of the time
        h = part_hashes[i]
        places[chosen] = first + i
        part_hashes[chosen] = h
        chosen += np.int64(scaled(h, num_shards) == shard)
    return count + chosen


@njit_lean
def part_of(h: Any) -> Any:
    """Returns the part of a table's ids that a hash belongs to."""
    return word16(h, 1) >> (16 - PART_BITS)


@njit_lean
def part_by_hash(hashes: U64, positions: I32, count: Any, room: Any, ends: I64) -> None:
    """Sorts the result of :func:`choose` by parts. Part p ends at ``ends[p]``.

    The sorted ids are written to the same arrays, ``room`` places later.
    """
    ends[:] = 0
    for n in range(count):
        ends[part_of(hashes[n])] += 1
    total = np.int64(room)
    for part in range(len(ends)):  # while a part is being filled, its end is the place of its next id
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
    """Numbers the keys of the ids ``positions[first:last]``. Returns the new number of keys."""
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
        oldest = base + num_keys  # the oldest entry of this table
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
    """Writes the sum of ``counts``, int32[N], over the ids of each key from ``first_key`` on to ``out``, int32[U]."""
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
        ids: int64[N], the ids of the whole batch. offsets: int32[·], the batch's bag bounds.
        features, tables: int64[F], int32[F]: the features, and the table of each. Features of one table are adjacent.
        shard, num_shards: the shard and the number of shards. Ids of other shards are skipped.
        scratch: int32[S], the hash table. S is a power of two above the number of ids of any undivided table. A slot
            has ``base`` plus the number of a key. Values below ``base`` mark free slots.
        base: at least 1, and at least ``base`` + U of each earlier call with the same ``scratch``.
        hashes, positions: scratch, uint64 and int32, with room for the ids of any table, or twice this room if a table
            has more than :data:`MOST_TOGETHER` ids.
        first_key: the number of the first key, if shards share one numbering.
        ends: scratch, int64[:data:`NUM_PARTS`].
        amounts: int32[N], the count of each id, or of length 0 if all counts are 1. With counts, ``inverse`` must be -1
            for ids of other shards.
        inverse: int32[N], output for this shard's ids: the number of each id's key.
        keys, key_tables, counts: int64, int32, int32, output, each with room for every id. The first U are written.
        key_ends: int64[F], output: the number of keys of all tables up to each feature's table.

    Returns:
        The number of unique keys, U.
    """
    num_keys = unique_keys(
        ids, offsets, num_examples, features, tables, shard, num_shards, scratch, base, hashes, first_key, positions, ends,
        inverse, keys, key_tables, counts, key_ends,
    )  # fmt: skip
    if len(amounts) > 0:
        sum_counts(inverse, amounts, first_key, counts[:num_keys])
    return num_keys
