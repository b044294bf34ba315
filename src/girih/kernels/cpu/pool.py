"""Pooling bags of rows to vectors.

Weighted bags: sum is Σ w·x, mean is Σ w·x / n, sqrtn is Σ w·x / √n, with n the number of ids. An empty
bag is 0. Rows are read where they lie, by their addresses: in shards, or in a copy.

Shapes: B examples, P features of one output, N ids in the batch, U unique keys, W columns of a row,
D columns of the output's segment, L ids of a feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I8, I32, I64, F32x2, SealedF32, SealedI32
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.prefetch import LINE_BYTES, prefetch_words
from girih.kernels.cpu.vector import add_from, copy_from, sum_from

SUM, MEAN, SQRTN = 0, 1, 2
_LINES_AHEAD = 104


@njit_lean
def bag_scale(mode: Any, length: Any) -> Any:
    """The factor of a bag's sum, float32."""
    if length > 1:
        if mode == MEAN:
            return np.float32(1.0) / np.float32(length)
        if mode == SQRTN:
            return np.float32(1.0) / np.sqrt(np.float32(length))
    return np.float32(1.0)


@kernel()
def find_singles(offsets: SealedI32, num_examples: int, features: I64, firsts: I64) -> None:
    """Writes to ``firsts[f]``, for each of the features f, where its ids begin if each bag holds one, else -1."""
    for p in range(len(features)):
        start = features[p] * num_examples
        bounds = offsets[start : start + num_examples + 1]
        first = np.int64(bounds[0])
        differ = np.int64(0)
        for i in range(len(bounds)):
            differ |= bounds[i] - first - i
        firsts[features[p]] = first if differ == 0 else -1


@njit_lean
def examples_ahead(offsets: I32, features: I64, num_examples: Any, num_columns: Any) -> Any:
    """The number of examples to ask for rows ahead, so that a hundred cache lines or more are on their way."""
    num_ids = np.int64(0)
    for p in range(len(features)):
        num_ids += offsets[(features[p] + 1) * num_examples] - offsets[features[p] * num_examples]
    lines = num_ids * max(1, 4 * num_columns // LINE_BYTES)
    return 1 + _LINES_AHEAD * num_examples // max(1, lines)


@kernel()
def pool(
    addresses: I64,
    first_column: int,
    inverse: I32,
    offsets: SealedI32,
    weights: SealedF32,
    num_examples: int,
    features: I64,
    firsts: I64,
    modes: I8,
    begin: int,
    end: int,
    out: F32x2,
    tail: F32x2,
) -> None:
    """Pools the bags of examples ``begin`` to ``end``, example by example, so that memory is written in order.

    Bags of one id are copied. Where a feature has no others, their bounds are not even read: that takes as
    long as the copies, and crowds rows out of the nearest caches.

    Args:
        addresses: int64[·] by key number: where float32[W] lie, of which the segment's start at ``first_column``.
        inverse: int32[N], the key of each id; offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 where all are 1.
        features, modes: int64[P], int8[P].
        firsts: int64[P], as :func:`find_singles` finds it for each of them; -1 for all where there are weights.
        out: float32[B·P, D], written for these examples.
        tail: float32[B·P, E], the same bags of the E columns that follow, E may be 0.
    """
    num_places, dim, num_tail = len(features), out.shape[1], tail.shape[1]
    start_byte, tail_byte = 4 * first_column, 4 * (first_column + dim)
    weighted = len(weights) > 0
    ahead = examples_ahead(offsets, features, num_examples, dim + num_tail)
    for b in range(begin, end):
        later = min(b + ahead, end - 1)
        for p in range(num_places):
            vector, first = b * num_places + p, firsts[p]
            if first >= 0:
                prefetch_words(addresses[inverse[first + later]] + start_byte, dim + num_tail)
                address = addresses[inverse[first + b]]
                copy_from(out, vector, 0, address + start_byte, dim)
                if num_tail > 0:
                    copy_from(tail, vector, 0, address + tail_byte, num_tail)
                continue
            bag = features[p] * num_examples
            for i in range(offsets[bag + later], offsets[bag + later + 1]):
                prefetch_words(addresses[inverse[i]] + start_byte, dim + num_tail)
            start, stop = offsets[bag + b], offsets[bag + b + 1]
            scale = bag_scale(modes[p], stop - start)
            if weighted:
                weigh(addresses, start_byte, inverse, start, stop, weights, scale, out, vector)
                if num_tail > 0:
                    weigh(addresses, tail_byte, inverse, start, stop, weights, scale, tail, vector)
            elif stop - start == 1:
                address = addresses[inverse[start]]
                copy_from(out, vector, 0, address + start_byte, dim)
                if num_tail > 0:
                    copy_from(tail, vector, 0, address + tail_byte, num_tail)
            else:
                sum_from(out, vector, addresses, start_byte, inverse, start, stop, dim, scale)
                if num_tail > 0:
                    sum_from(tail, vector, addresses, tail_byte, inverse, start, stop, num_tail, scale)


@njit_lean
def weigh(
    addresses: I64,
    start_byte: Any,
    inverse: I32,
    start: Any,
    stop: Any,
    weights: F32,
    scale: Any,
    out: F32,
    vector: Any,
) -> None:
    """Writes ``scale`` times Σ w·row over the ids from ``start`` to ``stop`` to ``out[vector]``."""
    dim = out.shape[1]
    for d in range(dim):
        out[vector, d] = 0.0
    for i in range(start, stop):
        add_from(out, vector, 0, addresses[inverse[i]] + start_byte, dim, weights[i])
    if scale != 1.0:
        for d in range(dim):
            out[vector, d] *= scale


@kernel()
def spread(addresses: I64, first_column: int, inverse: I32, start: int, out: F32x2) -> None:
    """Copies each id's row, unpooled: float32[L, D] for the ids from ``start`` on."""
    dim, last = out.shape[1], len(out) - 1
    ahead = _LINES_AHEAD // max(1, 4 * dim // LINE_BYTES)
    for i in range(len(out)):
        prefetch_words(addresses[inverse[start + min(i + ahead, last)]] + 4 * first_column, dim)
        copy_from(out, i, 0, addresses[inverse[start + i]] + 4 * first_column, dim)
