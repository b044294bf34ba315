"""Dedup: the ids of a batch become unique keys of one shard, and each id learns its key's number.

A scratch hash table is used again for each table of rows, so that it stays in L2: slots carry the
tag of the round that wrote them and are never cleared.

Shapes: B examples, F features of the group, N ids in the batch, n of them this shard's, U unique keys of this
shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.hashing import key_hash, low_bits, scaled
from girih.kernels.cpu.jit import njit_lean

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
ROUND_BITS = 31
_KEY_MASK = (1 << 32) - 1


@njit_lean
def choose(
    ids: I64, start: Any, end: Any, table: Any, shard: Any, num_shards: Any, hashes: U64, own: I32
) -> Any:
    """Lists in ``own`` which ids from ``start`` to ``end`` are this shard's; returns how many.

    ``hashes``, uint64[end - start], takes the hash of each id listed, in their order.
    """
    for i in range(start, end):
        hashes[i - start] = key_hash(ids[i], table)
    if num_shards == 1:
        for i in range(start, end):
            own[i - start] = i
        return end - start
    count = 0
    for i in range(start, end):  # without a branch, which would be mispredicted every other time
        h = hashes[i - start]
        own[count] = i
        hashes[count] = h
        count += scaled(h, num_shards) == shard
    return count


@njit_lean
def dedup(
    ids: I64,
    offsets: I32,
    num_examples: int,
    features: I64,
    tables: I32,
    shard: int,
    num_shards: int,
    scratch: I64,
    first_round: int,
    hashes: U64,
    first_key: int,
    own: I32,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
    key_ends: I64,
) -> int:
    """Finds the unique keys of some features of a batch that belong to one shard.

    Args:
        ids: int64[N] of the whole batch; offsets: int32[·], the batch's bag bounds.
        features, tables: int64[F], int32[F]: which features, and the table of each; features of one
            table stand together.
        shard, num_shards: whose keys; other ids are passed over.
        scratch: int64[S], S a power of two above twice the ids of any one table: round << 32 | key.
        first_round: rounds up to ``first_round + F`` were never used with this scratch.
        hashes: scratch, uint64, with room for the ids of any one feature.
        first_key: number of the first key, where shards share one numbering.
        own: scratch, int32, with room for the ids of any one feature.
        inverse: int32[N], written for this shard's ids: the number of each id's key.
        keys, key_tables, counts: int64, int32, int32, each with room for every id; written up to U.
        key_ends: int64[F], written: how many keys there are after each feature; those of one table stand together.

    Returns:
        U.
    """
    mask = len(scratch) - 1
    num_keys = 0
    tag = np.int64(first_round)
    for f in range(len(features)):
        table = tables[f]
        if f > 0 and table != tables[f - 1]:
            tag += 1
        start = offsets[features[f] * num_examples]
        end = offsets[(features[f] + 1) * num_examples]
        count = choose(ids, start, end, table, shard, num_shards, hashes, own)
        for n in range(count):
            i = own[n]
            id_ = ids[i]
            slot = low_bits(hashes[n], mask)
            while True:
                entry = scratch[slot]
                if entry >> 32 != tag:
                    scratch[slot] = (tag << 32) | num_keys
                    keys[num_keys] = id_
                    key_tables[num_keys] = table
                    counts[num_keys] = 1
                    inverse[i] = first_key + num_keys
                    num_keys += 1
                    break
                key = entry & _KEY_MASK
                if keys[key] == id_:
                    counts[key] += 1
                    inverse[i] = first_key + key
                    break
                slot = (slot + 1) & mask
        key_ends[f] = num_keys
    return num_keys
