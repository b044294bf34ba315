"""Pooling bags of rows to vectors.

Weighted bags: sum is Σ w·x, mean is Σ w·x / n, sqrtn is Σ w·x / √n, with n the number of ids. An empty
bag is 0.

Shapes: B examples, P features of one output, N ids in the batch, U unique keys, W columns of a row,
D columns of the output's segment, L ids of a feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.jit import njit_lean, prefetch_at
from girih.kernels.cpu.vector import add_row, add_scaled, copy_row

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
SUM, MEAN, SQRTN = 0, 1, 2
_FLOATS_AHEAD, _LINE = 1664, 64


@njit_lean
def bag_scale(mode: Any, length: Any) -> Any:
    """What a bag's sum is multiplied by, float32."""
    if length > 1:
        if mode == MEAN:
            return np.float32(1.0) / np.float32(length)
        if mode == SQRTN:
            return np.float32(1.0) / np.sqrt(np.float32(length))
    return np.float32(1.0)


@njit_lean
def examples_ahead(num_places: Any, dim: Any) -> Any:
    """How many examples ahead to ask for rows, so that about a hundred cache lines are on their way."""
    return max(1, _FLOATS_AHEAD // max(1, num_places * dim))


@njit_lean
def prefetch_columns(rows: F32, row: Any, first_column: Any, dim: Any) -> None:
    """Asks for the cache lines of a row's columns."""
    for byte in range(4 * first_column, 4 * (first_column + dim), _LINE):
        prefetch_at(rows, row, byte)


@njit_lean
def pool(
    rows: F32,
    first_column: int,
    inverse: I32,
    offsets: I32,
    weights: F32,
    num_examples: int,
    features: I64,
    modes: NDArray[np.int8],
    begin: int,
    end: int,
    out: F32,
) -> None:
    """Pools the bags of examples ``begin`` to ``end``, example by example, so that memory is written in order.

    Args:
        rows: float32[·, W] by key number; the segment's columns start at ``first_column``.
        inverse: int32[N], the key of each id; offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 where all are 1.
        features, modes: int64[P], int8[P].
        out: float32[B·P, D], written for these examples.
    """
    num_places, dim = len(features), out.shape[1]
    weighted = len(weights) > 0
    ahead = examples_ahead(num_places, dim)
    for b in range(begin, end):
        for p in range(num_places):
            bag = features[p] * num_examples + b
            start, stop = offsets[bag], offsets[bag + 1]
            if b + ahead < end and offsets[bag + ahead] < offsets[bag + ahead + 1]:
                prefetch_columns(rows, inverse[offsets[bag + ahead]], first_column, dim)
            vector = b * num_places + p
            if stop - start == 1 and not weighted:
                copy_row(out, vector, 0, rows, inverse[start], first_column, dim)
                continue
            for d in range(dim):
                out[vector, d] = 0.0
            for i in range(start, stop):
                if weighted:
                    add_scaled(out, vector, 0, rows, inverse[i], first_column, dim, weights[i])
                else:
                    add_row(out, vector, 0, rows, inverse[i], first_column, dim)
            if stop - start > 1 and modes[p] != SUM:
                scale = bag_scale(modes[p], stop - start)
                for d in range(dim):
                    out[vector, d] *= scale


@njit_lean
def spread(rows: F32, first_column: int, inverse: I32, start: int, out: F32) -> None:
    """Copies each id's row, unpooled: float32[L, D] for the ids from ``start`` on."""
    for i in range(len(out)):
        copy_row(out, i, 0, rows, inverse[start + i], first_column, out.shape[1])
