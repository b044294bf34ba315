"""Pools bags of rows into vectors.

The pooled vector of a weighted bag with n ids is Σ w·x for sum, Σ w·x / n for mean, and Σ w·x / √n for sqrtn. The
vector of an empty bag is 0. Rows are read in place by their addresses, in shards or in a copy.

Shapes: B examples, P features of one output, O passes, N ids in the batch, U unique keys, W columns of a row, D
columns of the output's segment. E columns of another segment follow them. L ids of a feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import F32, I8, I32, I64, F32x2, I64x2, SealedF32, SealedI32
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.system import LINE_BYTES, address_of, prefetch_words
from girih.kernels.cpu.vector import copy_from, sum_from, weigh_from

SUM, MEAN, SQRTN = 0, 1, 2
_LINES_AHEAD = 104


@njit_lean
def bag_scale(mode: Any, length: Any) -> Any:
    """Returns the factor of a bag's sum, float32."""
    if length > 1:
        if mode == MEAN:
            return np.float32(1.0) / np.float32(length)
        if mode == SQRTN:
            return np.float32(1.0) / np.sqrt(np.float32(length))
    return np.float32(1.0)


@kernel()
def find_singles(offsets: SealedI32, num_examples: int, features: I64, firsts: I64) -> None:
    """Writes to ``firsts[f]`` the start of the ids of each feature f if each of its bags holds one id, else -1."""
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
    """Returns the number of examples between the prefetch and the read of a row.

    The number is large enough that at least a hundred cache lines are requested at the same time.
    """
    num_ids = np.int64(0)
    for p in range(len(features)):
        num_ids += offsets[(features[p] + 1) * num_examples] - offsets[features[p] * num_examples]
    lines = num_ids * max(1, 4 * num_columns // LINE_BYTES)
    return 1 + _LINES_AHEAD * num_examples // max(1, lines)


@njit_lean
def singles_within(
    offsets: I32, num_examples: Any, features: I64, weighted: Any, begin: Any, end: Any, firsts: I64
) -> None:
    """Works like :func:`find_singles` for places in ``features`` and examples ``begin`` to ``end``.

    Writes -1 if ids are weighted.
    """
    for p in range(len(features)):
        bag = features[p] * num_examples
        first, differ = np.int64(offsets[bag + begin]) - begin, np.int64(weighted)
        for b in range(begin, end + 1):
            differ |= offsets[bag + b] - first - b
        firsts[p] = first if differ == 0 else -1


@njit_lean
def pool_bags(
    addresses: I64,
    first_column: Any,
    inverse: I32,
    offsets: I32,
    weights: F32,
    num_examples: Any,
    features: I64,
    modes: I8,
    firsts: I64,
    begin: Any,
    end: Any,
    out: Any,
    dim: Any,
    tail: Any,
    num_tail: Any,
) -> None:
    """Pools the bags of examples ``begin`` to ``end``, example by example, so that memory is written in order.

    Bags of one id are copied. If all bags of a feature have one id, their bounds are not read. Reading the bounds would
    take as long as the copies, and would displace rows from the nearest caches.
    """
    num_places = len(features)
    start_byte, tail_byte = 4 * first_column, 4 * (first_column + dim)
    weighted = len(weights) > 0
    singles_within(offsets, num_examples, features, weighted, begin, end, firsts)
    ahead = examples_ahead(offsets, features, num_examples, dim + num_tail)
    for b in range(begin, end):
        later = min(b + ahead, end - 1)
        for p in range(num_places):
            place, first = b * num_places + p, firsts[p]
            to, tail_to = out + 4 * dim * place, tail + 4 * num_tail * place
            if first >= 0:
                prefetch_words(addresses[inverse[first + later]] + start_byte, dim + num_tail)
                address = addresses[inverse[first + b]]
                copy_from(to, address + start_byte, dim)
                if num_tail > 0:
                    copy_from(tail_to, address + tail_byte, num_tail)
                continue
            bag = features[p] * num_examples
            for i in range(offsets[bag + later], offsets[bag + later + 1]):
                prefetch_words(addresses[inverse[i]] + start_byte, dim + num_tail)
            start, stop = offsets[bag + b], offsets[bag + b + 1]
            scale = bag_scale(modes[p], stop - start)
            if weighted:
                weigh_from(to, addresses, start_byte, inverse, start, stop, dim, weights, scale)
                if num_tail > 0:
                    weigh_from(tail_to, addresses, tail_byte, inverse, start, stop, num_tail, weights, scale)
            elif stop - start == 1:
                address = addresses[inverse[start]]
                copy_from(to, address + start_byte, dim)
                if num_tail > 0:
                    copy_from(tail_to, address + tail_byte, num_tail)
            else:
                sum_from(to, addresses, start_byte, inverse, start, stop, dim, scale)
                if num_tail > 0:
                    sum_from(tail_to, addresses, tail_byte, inverse, start, stop, num_tail, scale)


@njit_lean
def spread_rows(
    addresses: I64, first_column: Any, inverse: I32, start: Any, stop: Any, out: Any, dim: Any
) -> None:
    """Copies the row of each id from ``start`` to ``stop``, unpooled, to adjacent memory that begins at ``out``."""
    ahead = _LINES_AHEAD // max(1, 4 * dim // LINE_BYTES)
    for i in range(start, stop):
        prefetch_words(addresses[inverse[min(i + ahead, stop - 1)]] + 4 * first_column, dim)
        copy_from(out + 4 * dim * (i - start), addresses[inverse[i]] + 4 * first_column, dim)


@kernel()
def stitch(
    addresses: I64,
    inverse: I32,
    offsets: SealedI32,
    weights: SealedF32,
    num_examples: int,
    passes: I64x2,
    features: I64,
    modes: I8,
    targets: I64x2,
    firsts: I64,
    begin: int,
    end: int,
) -> None:
    """Computes all outputs of a group from its rows (Shuffle & Stitch, PICASSO §III-B). Rows may be in any memory.

    Processes the examples ``begin`` to ``end``, so that several threads can share the work.

    Args:
        addresses: int64[·] by key number: the address of each float32[W].
        inverse: int32[N], the key of each id. offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 if all are 1.
        passes: int64[O, 6]. Each pass computes an output, or two outputs with adjacent columns. Its numbers are: the
            begin and the end of its features in ``features``, the first column, the number of columns of each of the
            two outputs, and 1 if ids are not pooled.
        features, modes: int64, int8, the features of all passes, and their poolings.
        targets: int64[O, 2], the address of each output, float32[B·P, D], or [L, D] for unpooled ids. Then the address
            of the second output, [B·P, E].
        firsts: scratch, int64, with the size of a pass's features.
    """
    for o in range(len(passes)):
        at, behind, column, dim, num_tail = (
            passes[o, 0],
            passes[o, 1],
            passes[o, 2],
            passes[o, 3],
            passes[o, 4],
        )
        if passes[o, 5]:
            bag = features[at] * num_examples
            start, stop = np.int64(offsets[bag + begin]), np.int64(offsets[bag + end])
            out = targets[o, 0] + 4 * dim * (start - offsets[bag])
            spread_rows(addresses, column, inverse, start, stop, out, dim)
        else:
            pool_bags(
                addresses, column, inverse, offsets, weights, num_examples, features[at:behind], modes[at:behind], firsts,
                begin, end, targets[o, 0], dim, targets[o, 1], num_tail,
            )  # fmt: skip


@kernel()
def spread(addresses: I64, first_column: int, inverse: I32, start: int, out: F32x2) -> None:
    """Copies the row of each id, starting at id ``start``, unpooled, to ``out``, float32[L, D]."""
    spread_rows(addresses, first_column, inverse, start, start + len(out), address_of(out), out.shape[1])
