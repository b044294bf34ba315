"""Deduplicates ids on a GPU: the ids of a batch become unique keys, numbered in the order of their first occurrence.

The kernel ``_claim`` finds or takes a slot of a scratch hash table for every id. The slot keeps the first of equal ids.
A prefix sum over these first ids gives the numbers of the keys, regardless of the order of execution. The kernel
``_number`` writes the keys, and the number of each id's key. The ids of one key, in their order, are the *terms* of the
key's gradient (:func:`describe_terms`). If a key has very many terms, they are cut into pieces
(:mod:`girih.kernels.gpu.gradients`).

The *place* of an id is its number among the ids of a group's features, one feature after the other, in the group's
order. The *position* of an id is its index in the batch.

Shapes: F features of the group, B examples, n places, N positions, U unique keys, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from girih.kernels.gpu.hashing import key_hash, scaled
from girih.kernels.gpu.jit import SPARE, block_of, kernel, launch
from girih.kernels.gpu.layout import items, load

SLOTS_PER_ID = 2  # the least number, so that at least half of the slots stay free
_SPARE_MASK = constexpr(SPARE - 1)
_SUM, _MEAN, _SQRTN = constexpr(0), constexpr(1), constexpr(2)


@triton.jit
def last_not_above(bounds: tensor, count: tensor, value: tensor, mask: tensor) -> Any:
    """Returns the index of the last of ``count`` ascending ``bounds`` that is at most ``value``. Bound 0 is 0."""
    low = tl.zeros_like(value)
    high = tl.zeros_like(value) + count
    left = count
    while left > 1:
        middle = (low + high) // 2
        below = load(bounds + middle, mask & (middle < count)) <= value
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        left = (left + 1) // 2
    return low


@triton.jit
def find_slots(positions_of: tensor, place: tensor, num_features: tensor, mask: tensor) -> Any:
    """Returns the feature and the position of each place; see :func:`unique`."""
    feature = last_not_above(positions_of, num_features, place, mask)
    shift = load(positions_of + num_features + feature, mask)
    return feature, place + shift


@kernel
def _claim(
    ids: tensor, positions_of: tensor, tables: tensor, slots: tensor, slot_of: tensor, n: tensor, num_features: tensor, num_slots: tensor,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    place = items(BLOCK)
    mask = place < n
    feature, position = find_slots(positions_of, place, num_features, mask)
    key_id = load(ids + position, mask)
    table = load(tables + feature, mask)
    slot = (key_hash(key_id, table) & (num_slots - 1).to(tl.uint64)).to(tl.int32)
    waiting = mask
    left = tl.sum(waiting.to(tl.int32))
    while left > 0:
        # A plain read may return an old 0, which only costs a compare-and-swap. It never returns an old key.
        seen = tl.load(slots + slot, mask=waiting, other=1)
        free = seen == 0
        # Lanes without a key use words after the table, and compare with a value that never occurs in these words.
        swapped = tl.atomic_cas(
            slots + tl.where(free, slot, num_slots + (place & _SPARE_MASK)),
            tl.where(free, 0, -1),
            place + 1,
            sem="relaxed",
        )
        entry = seen + swapped  # at least one of the two is 0
        holder = tl.where(entry > 0, entry - 1, place)
        other, at = find_slots(positions_of, holder, num_features, waiting)
        other_id = load(ids + at, waiting)
        other_table = load(tables + other, waiting)
        mine = waiting & (other_id == key_id) & (other_table == table)
        tl.atomic_min(slots + slot, place + 1, mask=mine & (holder > place), sem="relaxed")
        tl.store(slot_of + place, slot, mask=mine)
        waiting = waiting & (mine == 0)
        slot = tl.where(waiting, (slot + 1) & (num_slots - 1), slot)
        left = tl.sum(waiting.to(tl.int32))


@kernel
def _find_first(slots: tensor, slot_of: tensor, is_first: tensor, n: tensor, BLOCK: constexpr) -> None:
    place = items(BLOCK)
    mask = place < n
    winner = load(slots + load(slot_of + place, mask), mask)
    tl.store(is_first + place, (winner == place + 1).to(tl.int32), mask=mask)


@kernel
def _number(
    ids: tensor, positions_of: tensor, tables: tensor, slots: tensor, slot_of: tensor, ranks: tensor, keys: tensor, key_tables: tensor,
    counts: tensor, numbers: tensor, inverse: tensor, n: tensor, num_features: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    place = items(BLOCK)
    mask = place < n
    feature, position = find_slots(positions_of, place, num_features, mask)
    winner = tl.load(slots + load(slot_of + place, mask), mask=mask, other=1) - 1
    key = tl.load(ranks + winner, mask=mask, other=1) - 1
    tl.store(numbers + place, key, mask=mask)
    tl.store(inverse + position, key, mask=mask)
    tl.atomic_add(counts + key, 1, mask=mask, sem="relaxed")
    first = mask & (winner == place)
    tl.store(keys + key, load(ids + position, first), mask=first)
    tl.store(key_tables + key, load(tables + feature, first), mask=first)


@dataclass(frozen=True)
class Unique:
    """The unique keys of a group's ids. Every array has room for n keys, and U entries are valid.

    Attributes:
        keys, tables, counts: int64[n], int32[n], int32[n]: the keys, and the number of times that each occurs.
        num_keys: int32[1], the number of unique keys, U.
        numbers: int32[n], the key's number for each place.
        inverse: int32[N], the key's number for each position of the group's features.
    """

    keys: Tensor
    tables: Tensor
    counts: Tensor
    num_keys: Tensor
    numbers: Tensor
    inverse: Tensor


def unique(ids: Tensor, positions_of: Tensor, tables: Tensor, n: int) -> Unique:
    """Finds the unique keys of a group's ids. Does not wait for the GPU.

    Args:
        ids: int64[N], the ids of the batch.
        positions_of: int32[2F], the first place of each feature, then for each feature the difference between its
            positions and its places.
        tables: int32[F], the table of each feature. Features of one table are adjacent.
        n: the number of places.
    """
    num_features, place = len(tables), ids.device
    num_slots = 1 << max(10, (SLOTS_PER_ID * n - 1).bit_length())
    slots = torch.zeros(num_slots + SPARE, dtype=torch.int32, device=place)
    slot_of, is_first, numbers, key_tables = (
        torch.empty(n, dtype=torch.int32, device=place) for _ in range(4)
    )
    inverse = torch.empty(len(ids), dtype=torch.int32, device=place)
    counts = torch.zeros(n, dtype=torch.int32, device=place)
    keys = torch.empty(n, dtype=torch.int64, device=place)
    block = block_of(256, n)
    launch(_claim, n, block, ids, positions_of, tables, slots, slot_of, n, num_features, num_slots)
    launch(_find_first, n, block_of(1024, n), slots, slot_of, is_first, n)
    ranks = torch.cumsum(is_first, 0, dtype=torch.int32)
    launch(
        _number, n, block, ids, positions_of, tables, slots, slot_of, ranks, keys, key_tables, counts, numbers, inverse,
        n, num_features,
    )  # fmt: skip
    num_keys = ranks[-1:].clone() if n else torch.zeros(1, dtype=torch.int32, device=place)
    return Unique(keys, key_tables, counts, num_keys, numbers, inverse)


@dataclass(frozen=True)
class BagTerms:
    """The terms of each key's gradient: its ids in their order, and the factors of their bags' gradients.

    Attributes:
        starts: int32[n+1]: key u has the terms from ``starts[u]`` to ``starts[u+1]``.
        features, examples, positions: int32[n], the feature, example and position of each term.
        factors: float32[n]. A factor is 1 if the bag is summed and its ids have no weights.
    """

    starts: Tensor
    features: Tensor
    examples: Tensor
    positions: Tensor
    factors: Tensor


@kernel
def _describe_terms(
    order: tensor, positions_of: tensor, offsets: tensor, first_bags: tensor, modes: tensor, weights: tensor, features: tensor,
    examples: tensor, positions: tensor, factors: tensor, n: tensor, num_features: tensor, num_examples: tensor,
    WEIGHTED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    term = items(BLOCK)
    mask = term < n
    place = load(order + term, mask).to(tl.int32)
    feature, position = find_slots(positions_of, place, num_features, mask)
    first_bag = load(first_bags + feature, mask)
    example = tl.zeros_like(place)
    behind = tl.zeros_like(place) + num_examples
    left = num_examples
    while (
        left > 1
    ):  # the last bag that does not begin after the position; empty bags before this bag have the same start
        middle = (example + behind) // 2
        below = load(offsets + first_bag + middle, mask) <= position
        example = tl.where(below, middle, example)
        behind = tl.where(below, behind, middle)
        left = (left + 1) // 2
    start = load(offsets + first_bag + example, mask)
    length = (load(offsets + first_bag + example + 1, mask) - start).to(tl.float32)
    mode = load(modes + feature, mask)
    factor = bag_scale(mode, length)
    if WEIGHTED:
        factor = factor * load(weights + position, mask)
    tl.store(features + term, feature, mask=mask)
    tl.store(examples + term, example, mask=mask)
    tl.store(positions + term, position, mask=mask)
    tl.store(factors + term, factor, mask=mask)


@triton.jit
def bag_scale(mode: tensor, length: tensor) -> Any:
    """Returns the factor of a bag's sum, float32: 1, 1/n or 1/√n."""
    least = tl.maximum(length, 1.0)
    one = least * 0.0 + 1.0
    mean = tl.div_rn(one, least)
    root = tl.div_rn(one, tl.sqrt_rn(least))
    return tl.where(mode == _MEAN, mean, tl.where(mode == _SQRTN, root, one))


def describe_terms(
    unique_keys: Unique,
    positions_of: Tensor,
    offsets: Tensor,
    first_bags: Tensor,
    modes: Tensor,
    weights: Tensor | None,
    n: int,
    num_examples: int,
) -> BagTerms:
    """Sorts the ids of a group by their keys, stably, and finds the bag of each id.

    Args:
        offsets: int32[·], the batch's bag bounds.
        first_bags: int32[F], the start of each feature's bounds. modes: int32[F], the pooling of its bags.
        weights: float32[N], or None if all are 1.
    """
    place = offsets.device
    starts = torch.zeros(n + 1, dtype=torch.int32, device=place)
    torch.cumsum(unique_keys.counts, 0, dtype=torch.int32, out=starts[1:])
    order = torch.sort(unique_keys.numbers, stable=True).indices
    features, examples, positions = (torch.empty(n, dtype=torch.int32, device=place) for _ in range(3))
    factors = torch.empty(n, dtype=torch.float32, device=place)
    launch(
        _describe_terms, n, block_of(256, n), order, positions_of, offsets, first_bags, modes,
        factors if weights is None else weights, features, examples, positions, factors, n, len(first_bags),
        num_examples, WEIGHTED=weights is not None,
    )  # fmt: skip
    return BagTerms(starts, features, examples, positions, factors)


@kernel
def _find_sections(
    keys: tensor, tables: tensor, num_keys: tensor, sections: tensor, n: tensor, num_places: tensor,
    num_tables: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    i = items(BLOCK)
    known = i < tl.load(num_keys)
    key_id = load(keys + i, known)
    table = load(tables + i, known)
    # The arithmetic must be the same as in shards_of_keys in kernels/cpu/hashing.py, because checkpoints depend on it.
    place = scaled(key_hash(key_id, table), tl.zeros_like(table) + num_places).to(tl.int32)
    behind = tl.zeros_like(table) + num_places * num_tables
    tl.store(sections + i, tl.where(known, place * num_tables + table, behind), mask=i < n)


def route(unique_keys: Unique, num_places: int, num_tables: int) -> tuple[Tensor, Tensor]:
    """Orders keys by owner and then by table, and otherwise keeps their order. Does not wait for the GPU.

    Args:
        num_places: the number of processes, P. Each has one shard.

    Returns:
        The numbers of the keys in this order, int64[n]. And the number of keys up to and including each place and
        table, int64[P · T].
    """
    n, there = len(unique_keys.keys), unique_keys.keys.device
    sections = torch.empty(n, dtype=torch.int32, device=there)
    launch(
        _find_sections, n, block_of(256, n), unique_keys.keys, unique_keys.tables, unique_keys.num_keys, sections, n, num_places, num_tables
    )  # fmt: skip
    ordered, order = torch.sort(sections, stable=True)
    all_sections = torch.arange(num_places * num_tables, dtype=torch.int32, device=there)
    return order, torch.searchsorted(ordered, all_sections, right=True)
