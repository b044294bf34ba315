"""Pooling bags of rows to vectors, and the way back: scattering their gradients onto unique keys.

Weighted bags: sum is Σ w·x, mean is Σ w·x / n, sqrtn is Σ w·x / √n, with n the number of ids. An empty
bag is 0.

Shapes: B examples, P features of one output, N ids in the batch, U unique keys, W columns of a row,
D columns of the output's segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.jit import njit_lean

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
SUM, MEAN, SQRTN = 0, 1, 2
LARGEST = np.finfo(np.float32).max


@njit_lean
def _bag_scale(mode: Any, length: Any) -> Any:
    if mode == MEAN:
        return np.float32(1.0) / np.float32(length)
    if mode == SQRTN:
        return np.float32(1.0) / np.sqrt(np.float32(length))
    return np.float32(1.0)


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
    """Pools the bags of examples ``begin`` to ``end``.

    Args:
        rows: float32[U, W]; the segment's columns start at ``first_column``.
        inverse: int32[N], the key of each id; offsets: int32, the batch's bag bounds.
        weights: float32[N], or of length 0 where all are 1.
        features, modes: int64[P], int8[P].
        out: float32[B, P, D], written for these examples.
    """
    dim = out.shape[2]
    weighted = len(weights) > 0
    for p in range(len(features)):
        base = features[p] * num_examples
        for b in range(begin, end):
            start = offsets[base + b]
            stop = offsets[base + b + 1]
            target = out[b, p]
            if stop - start == 1 and not weighted:
                row = rows[inverse[start]]
                for d in range(dim):
                    target[d] = row[first_column + d]
                continue
            for d in range(dim):
                target[d] = 0.0
            for i in range(start, stop):
                row = rows[inverse[i]]
                weight = weights[i] if weighted else np.float32(1.0)
                for d in range(dim):
                    target[d] += weight * row[first_column + d]
            if stop - start > 1 and modes[p] != SUM:
                scale = _bag_scale(modes[p], stop - start)
                for d in range(dim):
                    target[d] *= scale


@njit_lean
def scatter(
    gradients: F32,
    first_column: int,
    inverse: I32,
    offsets: I32,
    weights: F32,
    num_examples: int,
    features: I64,
    modes: NDArray[np.int8],
    first_key: int,
    last_key: int,
    out: F32,
) -> None:
    """Adds the gradients of pooled bags onto the keys ``first_key`` to ``last_key`` (others are passed over).

    Args:
        gradients: float32[B, P, D]; out: float32[U, W], added to. Others as in :func:`pool`.
    """
    dim = gradients.shape[2]
    weighted = len(weights) > 0
    for p in range(len(features)):
        base = features[p] * num_examples
        for b in range(num_examples):
            start = offsets[base + b]
            stop = offsets[base + b + 1]
            source = gradients[b, p]
            scale = _bag_scale(modes[p], stop - start) if stop - start > 1 else np.float32(1.0)
            for i in range(start, stop):
                key = inverse[i]
                if key < first_key or key >= last_key:
                    continue
                factor = scale * weights[i] if weighted else scale
                row = out[key]
                for d in range(dim):
                    row[first_column + d] += factor * source[d]


@njit_lean
def spread(rows: F32, first_column: int, inverse: I32, start: int, out: F32) -> None:
    """Copies each id's row, unpooled: float32[L, D] for the ids from ``start`` on."""
    dim = out.shape[1]
    for i in range(len(out)):
        row = rows[inverse[start + i]]
        for d in range(dim):
            out[i, d] = row[first_column + d]


@njit_lean
def gather_spread(
    gradients: F32, first_column: int, inverse: I32, start: int, first_key: int, last_key: int, out: F32
) -> None:
    """The way back of :func:`spread`: adds float32[L, D] onto the keys ``first_key`` to ``last_key``."""
    dim = gradients.shape[1]
    for i in range(len(gradients)):
        key = inverse[start + i]
        if key < first_key or key >= last_key:
            continue
        row = out[key]
        for d in range(dim):
            row[first_column + d] += gradients[i, d]


@njit_lean
def first_nonfinite(values: F32) -> int:
    """The first row of float32[U, W] that has a NaN or an infinity; -1 where none has."""
    for u in range(values.shape[0]):
        row = values[u]
        bad = 0
        for d in range(values.shape[1]):
            bad += not abs(row[d]) <= LARGEST
        if bad:
            return u
    return -1
