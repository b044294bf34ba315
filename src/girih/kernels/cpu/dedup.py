"""Dedup: the ids of a batch become unique keys, and each id learns its key's number.

A scratch hash table is used again for each table of rows, so that it stays in L2: slots carry the
tag of the round that wrote them and are never cleared.

Shapes: B examples, F features of the group, N ids in the batch, U unique keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.hashing import key_hash, low_bits
from girih.kernels.cpu.jit import njit_lean

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
ROUND_BITS = 31


@njit_lean
def dedup(
    ids: I64,
    offsets: I32,
    num_examples: int,
    features: I64,
    tables: I32,
    scratch: I64,
    first_round: int,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
) -> int:
    """Finds the unique keys of some features of a batch.

    Args:
        ids: int64[N] of the whole batch; offsets: int32[·], the batch's bag bounds.
        features, tables: int64[F], int32[F]: which features, and the table of each; features of one
            table stand together.
        scratch: int64[S, 2], S a power of two above twice the ids of any one table: (id, round << 32 | key).
        first_round: rounds up to ``first_round + F`` were never used with this scratch.
        inverse: int32[N], written for the ids of these features: the number of each id's key.
        keys, key_tables, counts: int64, int32, int32, each with room for every id; written up to U.

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
        for i in range(start, end):
            id_ = ids[i]
            slot = low_bits(key_hash(id_, table), mask)
            while True:
                entry = scratch[slot, 1]
                if entry >> 32 != tag:
                    scratch[slot, 0] = id_
                    scratch[slot, 1] = (tag << 32) | num_keys
                    keys[num_keys] = id_
                    key_tables[num_keys] = table
                    counts[num_keys] = 1
                    inverse[i] = num_keys
                    num_keys += 1
                    break
                if scratch[slot, 0] == id_:
                    key = entry & 0xFFFFFFFF
                    counts[key] += 1
                    inverse[i] = key
                    break
                slot = (slot + 1) & mask
    return num_keys


@njit_lean
def order_by_shard(shards: I32, num_shards: int, order: I64, bounds: I64) -> None:
    """Counting sort: ``order`` int64[U] lists keys shard by shard, shard s has ``order[bounds[s]:bounds[s+1]]``."""
    bounds[:] = 0
    for u in range(len(shards)):
        bounds[shards[u] + 1] += 1
    for s in range(num_shards):
        bounds[s + 1] += bounds[s]
    for u in range(len(shards)):
        s = shards[u]
        order[bounds[s]] = u
        bounds[s] += 1
    for s in range(num_shards, 0, -1):
        bounds[s] = bounds[s - 1]
    bounds[0] = 0


@njit_lean
def renumber(inverse: I32, offsets: I32, num_examples: int, features: I64, position: I32) -> None:
    """Replaces key numbers by ``position[number]`` for the ids of some features, in place."""
    for f in range(len(features)):
        start = offsets[features[f] * num_examples]
        end = offsets[(features[f] + 1) * num_examples]
        for i in range(start, end):
            inverse[i] = position[inverse[i]]
