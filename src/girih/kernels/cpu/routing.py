"""Routing: unique keys, table by table, become those of one place after the other, table by table in each.

Shapes: U unique keys, P places, T tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, I64x2, SealedI32
from girih.kernels.cpu.hashing import key_hash, scaled
from girih.kernels.cpu.jit import kernel, njit_lean


@kernel()
def places_of(keys: I64, tables: I32, num_shards: int, shards_each: int, places: I32, ends: I64x2) -> None:
    """Writes where each key lives, and how many keys of each table each place has.

    Args:
        num_shards: of all places together; shards_each: of one place, neighbours.
        places: int32[U], written. ends: int64[P, T], written: the number of the first routed key behind these.
    """
    ends[:] = 0
    for k in range(len(keys)):
        place = scaled(key_hash(keys[k], tables[k]), num_shards) // shards_each
        places[k] = place
        ends[place, tables[k]] += 1
    sum_up(ends)


@kernel()
def cut_places(
    inverse: I32,
    offsets: SealedI32,
    num_examples: int,
    features: I64,
    behind: I64,
    tables: I32,
    firsts: I32,
    places: I32,
    ends: I64x2,
) -> None:
    """Cuts each place into as many as there are micro-batches, by the first one that has the key.

    Args:
        inverse: int32[N], the key of each id of these features.
        behind: int64[M], the first example behind each micro-batch.
        firsts: int32[U], scratch.
        places: int32[U], as :func:`places_of` wrote it: p becomes p · M + m. ends: int64[P · M, T], written alike.
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
    """From how many keys of each table each place has to the number of the first key behind these."""
    total = np.int64(0)
    for p in range(ends.shape[0]):
        for t in range(ends.shape[1]):
            total += ends[p, t]
            ends[p, t] = total


@kernel()
def route(
    keys: I64,
    tables: I32,
    counts: I32,
    places: I32,
    ends: I64x2,
    numbers: I32,
    out_keys: I64,
    out_counts: I32,
) -> None:
    """Moves keys to where their place's begin; keys of one place and table keep their order.

    Args:
        ends: as :func:`places_of` wrote it; it is used up, and is the same again at the end.
        numbers: int32[U], written: each key's number among the routed ones.
        out_keys, out_counts: int64[U], int32[U], written.
    """
    for k in range(len(keys) - 1, -1, -1):
        ends[places[k], tables[k]] -= 1
        number = ends[places[k], tables[k]]
        numbers[k] = number
        out_keys[number] = keys[k]
        out_counts[number] = counts[k]
    total = len(keys)
    for p in range(ends.shape[0] - 1, -1, -1):  # now they are starts: each end is the next one's start
        for t in range(ends.shape[1] - 1, -1, -1):
            start = ends[p, t]
            ends[p, t] = total
            total = start


@kernel()
def renumber(inverse: I32, offsets: SealedI32, num_examples: int, features: I64, numbers: I32) -> Any:
    """Replaces the key numbers of some features' ids, in ``inverse``, by their numbers among the routed ones."""
    for f in range(len(features)):
        for n in range(offsets[features[f] * num_examples], offsets[(features[f] + 1) * num_examples]):
            inverse[n] = numbers[inverse[n]]
