"""The backward pass of pooling. Computes the gradient of each unique key from the gradients of pooled vectors.

Shapes: B examples, P features, N ids in the batch, W columns of a row, D columns of the output's segment, L ids of a
feature whose vectors are not pooled, M rows of an output's gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I8, I32, I64, F32x2, SealedF32, SealedF32x2, SealedI32
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.pool import bag_scale, examples_ahead
from girih.kernels.cpu.system import prefetch_columns
from girih.kernels.cpu.vector import add_row, add_scaled

_INFINITY_BITS = np.uint32(0x7F80_0000)
_SIGN_MASK = np.uint32(0x7FFF_FFFF)


@njit_lean
def prefetch_bag(
    rows: F32, first_column: Any, num_columns: Any, inverse: I32, offsets: I32, bag: Any
) -> None:
    """Prefetches the columns of the rows of a bag."""
    for i in range(offsets[bag], offsets[bag + 1]):
        prefetch_columns(rows, inverse[i], first_column, num_columns)


@kernel()
def scatter(
    gradient: SealedF32x2,
    tail: SealedF32x2,
    first_column: int,
    inverse: I32,
    offsets: SealedI32,
    weights: SealedF32,
    num_examples: int,
    features: I64,
    firsts: I64,
    places: I64,
    modes: I8,
    num_places: int,
    first_key: int,
    last_key: int,
    totals: F32x2,
) -> None:
    """Adds the gradients of some features' pooled bags to their keys.

    Processes example by example, in the memory order of the gradient. A key's terms are added in this order.

    Args:
        gradient: float32[M, D], M = B · ``num_places``. The segment's columns start at ``first_column``.
        tail: float32[M, E], the gradient of the following E columns. E may be 0.
        inverse: int32[N], the key of each id. offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 if all are 1.
        features, places, modes: int64[P], int64[P], int8[P]: the features, their places in the output, and their
            pooling.
        firsts: int64[P], the result of ``pool.find_singles`` for each feature, or -1 for all if there are weights.
        first_key, last_key: bounds of the key numbers. ``last_key`` is excluded. Other keys are skipped.
        totals: float32[·, W] by key number. The gradients are added to it.
    """
    dim, num_tail, num_features = gradient.shape[1], tail.shape[1], len(features)
    weighted = len(weights) > 0
    ahead = examples_ahead(offsets, features, num_examples, dim + num_tail)
    for b in range(num_examples):
        later = min(b + ahead, num_examples - 1)
        for p in range(num_features):
            # If the work is split into parts, each part reads separate ranges, which the processor does not prefetch.
            prefetch_columns(gradient, later * num_places + places[p], 0, dim)
            row, first = b * num_places + places[p], firsts[p]
            if first >= 0:
                prefetch_columns(totals, inverse[first + later], first_column, dim + num_tail)
                key = inverse[first + b]
                if first_key <= key < last_key:
                    add_row(totals, key, first_column, gradient, row, 0, dim)
                    if num_tail > 0:
                        add_row(totals, key, first_column + dim, tail, row, 0, num_tail)
                continue
            bag = features[p] * num_examples
            prefetch_bag(totals, first_column, dim + num_tail, inverse, offsets, bag + later)
            start, stop = offsets[bag + b], offsets[bag + b + 1]
            scale = bag_scale(modes[p], stop - start)
            for i in range(start, stop):
                key = inverse[i]
                if first_key <= key < last_key:
                    factor = scale * weights[i] if weighted else scale
                    add_scaled(totals, key, first_column, gradient, row, 0, dim, factor)
                    if num_tail > 0:
                        add_scaled(totals, key, first_column + dim, tail, row, 0, num_tail, factor)


@kernel()
def order_terms(
    inverse: I32,
    offsets: SealedI32,
    weights: SealedF32,
    num_examples: int,
    features: I64,
    firsts: I64,
    modes: I8,
    first_key: int,
    counts: I32,
    starts: I32,
    order: I32,
    factors: F32,
) -> None:
    """Lists the bags of each key of a shard. A key's gradient is the sum of the gradients of its bags.

    Bags are numbered example by example, b · P + p, like the rows of an output's gradient. A key's terms are in this
    order, the same as in :func:`scatter`.

    Args:
        inverse: int32[N], the key of each id. offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 if all are 1.
        features, modes: int64[P], int8[P], the features and their poolings.
        firsts: int64[P], the result of ``pool.find_singles`` for each feature, or -1 for all if there are weights.
        first_key: number of the shard's first key.
        counts: int32[U], the number of these features' ids for each key.
        starts: int32[U+1], output: key u has the terms from ``starts[u]`` to ``starts[u+1]``.
        order: int32[M], M = Σ counts, output: the bag of each term.
        factors: float32[M], or of length 0, output: the factor of each term's gradient.
    """
    num_keys, num_features = len(counts), len(features)
    weighted, scaled = len(weights) > 0, len(factors) > 0
    starts[0] = 0
    total = np.int32(0)
    for number in range(num_keys):  # while terms are written, a key's end is the place of its next term
        starts[number + 1] = total
        total += counts[number]
    for b in range(num_examples):
        for p in range(num_features):
            bag, first = b * num_features + p, firsts[p]
            if first >= 0:
                key = inverse[first + b] - first_key
                if 0 <= key < num_keys:
                    term = starts[key + 1]
                    order[term] = bag
                    starts[key + 1] = term + 1
                    if scaled:
                        factors[term] = np.float32(1.0)
                continue
            start, stop = offsets[features[p] * num_examples + b], offsets[features[p] * num_examples + b + 1]
            scale = bag_scale(modes[p], stop - start)
            for i in range(start, stop):
                key = inverse[i] - first_key
                if 0 <= key < num_keys:
                    term = starts[key + 1]
                    order[term] = bag
                    starts[key + 1] = term + 1
                    if scaled:
                        factors[term] = scale * weights[i] if weighted else scale


@kernel()
def largest(gradient: SealedF32x2, tail: SealedF32x2) -> Any:
    """Returns the bits of the largest absolute value of two matrices. A NaN counts as larger than all numbers."""
    return np.int64(max(_largest_bits(gradient), _largest_bits(tail)))


@njit_lean
def _largest_bits(matrix: F32) -> Any:
    bits = matrix.view(np.uint32)
    most = np.uint32(0)
    for m in range(bits.shape[0]):
        for d in range(bits.shape[1]):
            most = max(most, bits[m, d] & _SIGN_MASK)
    return most


@kernel()
def scatter_whole(
    gradient: SealedF32x2,
    first_column: int,
    inverse: I32,
    start: int,
    first_key: int,
    last_key: int,
    totals: F32x2,
) -> None:
    """Adds the gradients of unpooled vectors, float32[L, D], to the keys of L ids, starting at id ``start``."""
    for i in range(len(gradient)):
        key = inverse[start + i]
        if first_key <= key < last_key:
            add_row(totals, key, first_column, gradient, i, 0, gradient.shape[1])


@kernel()
def first_nonfinite(first_key: int, last_key: int, totals: SealedF32x2) -> int:
    """Returns the first key whose gradient, float32[·, W], has a NaN or an infinity, or -1 if all are finite."""
    bits = totals.view(np.uint32)
    for key in range(first_key, last_key):
        largest = np.uint32(0)
        for d in range(bits.shape[1]):
            largest = max(largest, bits[key, d] & _SIGN_MASK)
        if largest >= _INFINITY_BITS:
            return key
    return -1
