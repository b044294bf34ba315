"""Dedup: the ids of a batch become unique keys of one shard, and each id learns its key's number.

A scratch hash table serves one table of rows after the other, and stays in L2: slots hold numbers that only grow,
so that what an earlier table or batch left is known as old and never cleared.

Shapes: B examples, F features of the group, N ids in the batch, n of one feature, U unique keys of this shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, U64, SealedI32, SealedI64
from girih.kernels.cpu.hashing import key_hash, low_bits, scaled
from girih.kernels.cpu.jit import kernel, njit_lean

MAX_NUMBER = (1 << 31) - 1


@kernel()
def count_ids(offsets: SealedI32, num_examples: int, features: I64, tables: I32) -> Any:
    """Numbers of ids: of some features together, of the feature with most, and of the table with most."""
    total, longest, of_table, most = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for f in range(len(features)):
        count = offsets[(features[f] + 1) * num_examples] - offsets[features[f] * num_examples]
        of_table = count + (of_table if f > 0 and tables[f] == tables[f - 1] else 0)
        total, longest, most = total + count, max(longest, np.int64(count)), max(most, np.int64(of_table))
    return total, longest, most


@njit_lean
def choose(ids: I64, table: Any, shard: Any, num_shards: Any, hashes: U64, own: I32) -> Any:
    """Lists in ``own`` which of ``ids``, int64[n], are this shard's; returns how many.

    ``hashes``, uint64[n], takes the hash of each id listed, in their order.
    """
    for i in range(len(ids)):
        hashes[i] = key_hash(ids[i], table)
    count = np.int64(0)
    for i in range(len(ids)):  # without a branch, which would be mispredicted every other time
        h = hashes[i]
        own[count] = i
        hashes[count] = h
        count += np.int64(scaled(h, num_shards) == shard)
    return count


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
    own: I32,
    inverse: I32,
    keys: I64,
    key_tables: I32,
    counts: I32,
    key_ends: I64,
) -> Any:
    """Finds the unique keys of some features of a batch that belong to one shard.

    Args:
        ids: int64[N] of the whole batch; offsets: int32[·], the batch's bag bounds.
        features, tables: int64[F], int32[F]: which features, and the table of each; features of one
            table stand together.
        shard, num_shards: whose keys; other ids are passed over.
        scratch: int32[S], S a power of two above the ids of any one table: ``base`` plus the number of a key. What is
            below ``base`` is a free slot.
        base: at least 1, above all that calls before wrote to ``scratch``: their ``base`` + U.
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
    num_keys = np.int64(0)
    oldest = np.int64(base)  # of this table's entries
    for f in range(len(features)):
        table = tables[f]
        if f > 0 and table != tables[f - 1]:
            oldest = base + num_keys
        start, end = offsets[features[f] * num_examples], offsets[(features[f] + 1) * num_examples]
        part, numbers = ids[start:end], inverse[start:end]
        for n in range(choose(part, table, shard, num_shards, hashes, own)):
            i = own[n]
            id_ = part[i]
            slot = low_bits(hashes[n], mask)
            while True:
                entry = np.int64(scratch[slot])
                if entry < oldest:
                    scratch[slot] = base + num_keys
                    keys[num_keys] = id_
                    key_tables[num_keys] = table
                    counts[num_keys] = 1
                    numbers[i] = first_key + num_keys
                    num_keys += 1
                    break
                key = entry - base
                if keys[key] == id_:
                    counts[key] += 1
                    numbers[i] = first_key + key
                    break
                slot = (slot + 1) & mask
        key_ends[f] = num_keys
    return num_keys


@kernel()
def sum_counts(inverse: I32, counts: SealedI32, first_key: int, out: I32) -> None:
    """Writes to ``out``, int32[U], the sum of the ``counts``, int32[N], of the ids of each key from ``first_key`` on."""
    out[:] = 0
    for n in range(len(inverse)):
        key = inverse[n] - first_key
        if 0 <= key < len(out):
            out[key] += counts[n]
