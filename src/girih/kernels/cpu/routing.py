"""Routes unique keys to places. Keys ordered by table become keys ordered by place, and by table in each place.

Shapes: F features, N ids in the batch, U unique keys, P places, M micro-batches, T tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, U64, I64x2, SealedI32, SealedI64
from girih.kernels.cpu.dedup import unique_keys
from girih.kernels.cpu.hashing import key_hash, scaled
from girih.kernels.cpu.jit import kernel, njit_lean


@njit_lean
def places_of(keys: I64, tables: I32, num_shards: Any, shards_each: Any, places: I32, ends: I64) -> None:
    """Writes the place of each key, and counts each place's keys of each table.

    Args:
        num_shards: the number of shards of all places. shards_each: the number of adjacent shards of one place.
        places: int32[U], output. ends: int64[P, T], output: for each place and table, the number of the first routed
            key after its keys.
    """
    ends[:] = 0
    for k in range(len(keys)):
        place = scaled(key_hash(keys[k], tables[k]), num_shards) // shards_each
        places[k] = place
        ends[place, tables[k]] += 1
    sum_up(ends)


@njit_lean
def cut_places(
    inverse: I32,
    offsets: I32,
    num_examples: Any,
    features: I64,
    behind: I64,
    tables: I32,
    firsts: I32,
    places: I32,
    ends: I64,
) -> None:
    """Divides each place into one part per micro-batch, by the first micro-batch that has the key.

    Args:
        inverse: int32[N], the key of each id of these features.
        behind: int64[M], the first example after each micro-batch.
        firsts: int32[U], scratch.
        places: int32[U], the places that :func:`places_of` wrote. This call replaces p by p · M + m.
        ends: int64[P · M, T], output, as in :func:`places_of`.
    """
    num_parts = len(behind)
    firsts[:] = num_parts
    for f in range(len(features)):
        bag, begin = features[f] * num_examples, np.int64(0)
        for part in range(num_parts):
            for n in range(offsets[bag + begin], offsets[bag + behind[part]]):
                firsts[inverse[n]] = min(firsts[inverse[n]], part)
            begin = behind[part]
    ends[:] = 0
    for k in range(len(places)):
        places[k] = places[k] * num_parts + firsts[k]
        ends[places[k], tables[k]] += 1
    sum_up(ends)


@njit_lean
def sum_up(ends: Any) -> None:
    """Replaces the number of keys of each place and table by the number of the first key after them."""
    total = np.int64(0)
    for p in range(ends.shape[0]):
        for t in range(ends.shape[1]):
            total += ends[p, t]
            ends[p, t] = total


@njit_lean
def route(
    keys: I64,
    tables: I32,
    counts: I32,
    places: I32,
    ends: I64,
    numbers: I32,
    out_keys: I64,
    out_counts: I32,
) -> None:
    """Copies keys to the range of their place. Keys of one place and table keep their order.

    Args:
        ends: the ends that :func:`places_of` wrote. They are changed during the call, and restored at the end.
        numbers: int32[U], output: each key's number among the routed keys.
        out_keys, out_counts: int64[U], int32[U], output.
    """
    for k in range(len(keys) - 1, -1, -1):
        ends[places[k], tables[k]] -= 1
        number = ends[places[k], tables[k]]
        numbers[k] = number
        out_keys[number] = keys[k]
        out_counts[number] = counts[k]
    total = len(keys)
    for p in range(ends.shape[0] - 1, -1, -1):  # ``ends`` has the starts now; each end is the next start
        for t in range(ends.shape[1] - 1, -1, -1):
            start = ends[p, t]
            ends[p, t] = total
            total = start


@njit_lean
def renumber(inverse: I32, offsets: I32, num_examples: Any, features: I64, numbers: I32) -> None:
    """Replaces the key numbers of some features' ids, in ``inverse``, by their numbers among the routed keys."""
    for f in range(len(features)):
        for n in range(offsets[features[f] * num_examples], offsets[(features[f] + 1) * num_examples]):
            inverse[n] = numbers[inverse[n]]


@kernel()
def unique_and_partition(
    ids: SealedI64,
    offsets: SealedI32,
    num_examples: int,
    features: I64,
    tables: I32,
    num_shards: int,
    shards_each: int,
    scratch: I32,
    base: int,
    hashes: U64,
    positions: I32,
    part_ends: I64,
    unrouted: I64,
    unrouted_tables: I32,
    unrouted_counts: I32,
    unrouted_ends: I64,
    places: I32,
    numbers: I32,
    behind: I64,
    ends: I64x2,
    inverse: I32,
    keys: I64,
    counts: I32,
) -> Any:
    """Finds the unique keys of some features of a batch, and routes them to the places that own them.

    This is Unique & Partition (PICASSO §III-B).

    Args:
        ids, offsets, features, tables, scratch, base, hashes, positions, part_ends: see
            :func:`~girih.kernels.cpu.dedup.dedup`.
        num_shards: the number of shards of all places. shards_each: the number of adjacent shards of one place.
        unrouted, unrouted_tables, unrouted_counts, unrouted_ends, places, numbers: scratch, int64 and int32, with room
            for every id. ``unrouted_ends`` has room for every feature.
        behind: int64[M], the first example after each micro-batch.
        ends: int64[P · M, T], output: the number of the first routed key after the keys of each place, micro-batch
            and table.
        inverse: int32[N], output for the features' ids: the number of each id's routed key.
        keys, counts: int64, int32, output, with room for every id. The first U entries are written.

    Returns:
        The number of unique keys, U.
    """
    size = unique_keys(
        ids, offsets, num_examples, features, tables, 0, 1, scratch, base, hashes, 0, positions, part_ends, inverse, unrouted,
        unrouted_tables, unrouted_counts, unrouted_ends,
    )  # fmt: skip
    num_places = len(ends) // len(behind)
    places_of(unrouted[:size], unrouted_tables[:size], num_shards, shards_each, places, ends[:num_places])
    if len(behind) > 1:
        cut_places(
            inverse,
            offsets,
            num_examples,
            features,
            behind,
            unrouted_tables[:size],
            numbers[:size],
            places[:size],
            ends,
        )
    route(
        unrouted[:size], unrouted_tables[:size], unrouted_counts[:size], places, ends, numbers, keys, counts
    )
    renumber(inverse, offsets, num_examples, features, numbers)
    return size
