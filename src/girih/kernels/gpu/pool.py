"""Pooling bags of rows to vectors on a GPU, and the gradients of ids' weights; modes and weights as :mod:`girih.kernels.cpu.pool`.

Rows are read where they lie, by their addresses. :func:`pool_short` has several bags a program, each read id by id;
:func:`pool_long` one bag a program, whose ids are read many at a time. Both sum in an order that is always the same.
:func:`weigh_short` and :func:`weigh_long` go the same ways.

Shapes: B examples, P features of an output, N ids of the batch, U unique keys, W columns of a row, D of an output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from girih.kernels.cpu.pool import MEAN, SQRTN
from girih.kernels.gpu.dedup import bag_scale
from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import whole_vectors
from girih.kernels.gpu.lookup import load_columns

SHORT_BAG = 16
"""Ids of the longest bag up to which a program has several."""
_LENGTHS = tl.constexpr(SHORT_BAG + 1)


def short_factors(modes: NDArray[Any]) -> NDArray[np.float32]:
    """The factor of a short bag's sum by feature and ids, float32[P, SHORT_BAG + 1]: 1, 1/n or 1/√n, as ``bag_scale`` has it.

    A division and a root for each bag would be half of what a program of short bags computes.
    """
    length = np.maximum(np.arange(SHORT_BAG + 1, dtype=np.float32), np.float32(1))
    factors = np.ones((len(modes), SHORT_BAG + 1), np.float32)
    factors[modes == MEAN] = 1 / length
    factors[modes == SQRTN] = 1 / np.sqrt(length)
    return factors


@kernel
def pool_short(
    addresses: tl.tensor, inverse: tl.tensor, offsets: tl.tensor, weights: tl.tensor, bags: tl.tensor, factors: tl.tensor, out: tl.tensor, first_bag: tl.tensor,
    num_bags: tl.tensor, num_features: tl.tensor, first_byte: tl.tensor, dim: tl.tensor, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Pools bags that are short.

    Args:
        addresses: int64[U] of each key's columns; first_byte: where those of the segment begin.
        inverse: int32[N]; offsets: int32[·], the batch's bag bounds; weights: float32[N].
        bags: int32[P]: where each feature's bounds begin. factors: float32[P, ·], see :func:`short_factors`.
        out: float32[B · P, D]: of the bags from ``first_bag`` on, ``num_bags`` are written.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = own < num_bags
    bag = own + first_bag
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    feature, example = bag % num_features, bag // num_features
    bound = tl.load(bags + feature, mask=mask, other=0) + example
    start = tl.load(offsets + bound, mask=mask, other=0)
    length = tl.load(offsets + bound + 1, mask=mask, other=0) - start
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    most = tl.max(length)
    for j in range(most):
        present = mask & (j < length)
        key = tl.load(inverse + start + j, mask=present, other=0)
        address = tl.load(addresses + key, mask=present, other=0) + first_byte
        values = load_columns(address, column, present[:, None] & (column < dim), DTYPE, ALIGNED)
        if WEIGHTED:
            values = values * tl.load(weights + start + j, mask=present, other=0.0)[:, None]
        total += values
    total = total * tl.load(factors + feature * _LENGTHS + length, mask=mask, other=0.0)[:, None]
    tl.store(out + bag.to(tl.int64)[:, None] * dim + column, total, mask=mask[:, None] & (column < dim))


@kernel
def pool_long(
    addresses: tl.tensor, inverse: tl.tensor, offsets: tl.tensor, weights: tl.tensor, bags: tl.tensor, modes: tl.tensor, out: tl.tensor, first_bag: tl.tensor,
    num_features: tl.tensor, first_byte: tl.tensor, dim: tl.tensor, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Pools one bag a program, ``AT_ONCE`` ids at a time; arguments as those of :func:`pool_short`, but ``modes``, int32[P]: poolings."""
    bag = tl.program_id(0) + first_bag
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    feature, example = bag % num_features, bag // num_features
    bound = tl.load(bags + feature) + example
    start, stop = tl.load(offsets + bound), tl.load(offsets + bound + 1)
    total = tl.zeros((AT_ONCE, COLUMNS), tl.float32)
    for first in range(start, stop, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        present = i < stop
        key = tl.load(inverse + i, mask=present, other=0)
        address = tl.load(addresses + key, mask=present, other=0) + first_byte
        values = load_columns(address, column, present[:, None] & (column < dim), DTYPE, ALIGNED)
        if WEIGHTED:
            values = values * tl.load(weights + i, mask=present, other=0.0)[:, None]
        total += values
    scale = bag_scale(tl.load(modes + feature), (stop - start).to(tl.float32))
    pooled = tl.sum(total, axis=0)[None, :] * scale
    tl.store(out + bag.to(tl.int64) * dim + column, pooled, mask=column < dim)


@kernel
def weigh_short(
    values: tl.tensor, inverse: tl.tensor, offsets: tl.tensor, gradients: tl.tensor, bags: tl.tensor, factors: tl.tensor, out: tl.tensor, num_bags: tl.tensor,
    num_features: tl.tensor, num_columns: tl.tensor, first_column: tl.tensor, dim: tl.tensor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of the weights of ids in short bags: the product of each one's columns and its bag's gradient, times the bag's factor.

    Args:
        values: float32[U, W], W being ``num_columns``.
        gradients: float32[B · P, D]; inverse, offsets, bags, factors: as those of :func:`pool_short`.
        out: float32[N], to which they are added.
    """
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = bag < num_bags
    column = tl.arange(0, COLUMNS)[None, :]
    inside = mask[:, None] & (column < dim)
    feature, example = bag % num_features, bag // num_features
    bound = tl.load(bags + feature, mask=mask, other=0) + example
    start = tl.load(offsets + bound, mask=mask, other=0)
    length = tl.load(offsets + bound + 1, mask=mask, other=0) - start
    scale = tl.load(factors + feature * _LENGTHS + length, mask=mask, other=0.0)
    place = bag.to(tl.int64)[:, None] * dim + column
    gradient = tl.load(gradients + place, mask=inside, other=0.0) * scale[:, None]
    most = tl.max(length)
    for j in range(most):
        present = mask & (j < length)
        key = tl.load(inverse + start + j, mask=present, other=0).to(tl.int64)
        row = tl.load(
            values + key[:, None] * num_columns + first_column + column,
            mask=present[:, None] & inside,
            other=0.0,
        )
        before = tl.load(out + start + j, mask=present, other=0.0)
        tl.store(out + start + j, before + tl.sum(gradient * row, axis=1), mask=present)


@kernel
def weigh_long(
    values: tl.tensor, inverse: tl.tensor, offsets: tl.tensor, gradients: tl.tensor, bags: tl.tensor, modes: tl.tensor, out: tl.tensor,
    num_features: tl.tensor, num_columns: tl.tensor, first_column: tl.tensor, dim: tl.tensor, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One bag a program, ``AT_ONCE`` ids at a time; arguments as those of :func:`weigh_short`, but ``modes``, int32[P]: poolings."""
    bag = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    feature, example = bag % num_features, bag // num_features
    bound = tl.load(bags + feature) + example
    start, stop = tl.load(offsets + bound), tl.load(offsets + bound + 1)
    scale = bag_scale(tl.load(modes + feature), (stop - start).to(tl.float32))
    place = bag.to(tl.int64) * dim + column
    gradient = tl.load(gradients + place, mask=column < dim, other=0.0) * scale
    for first in range(start, stop, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        present = i < stop
        key = tl.load(inverse + i, mask=present, other=0).to(tl.int64)
        row = tl.load(
            values + key[:, None] * num_columns + first_column + column,
            mask=present[:, None] & (column < dim),
            other=0.0,
        )
        before = tl.load(out + i, mask=present, other=0.0)
        tl.store(out + i, before + tl.sum(gradient * row, axis=1), mask=present)


@kernel
def spread(
    addresses: tl.tensor, inverse: tl.tensor, out: tl.tensor, first: tl.tensor, num_ids: tl.tensor, first_byte: tl.tensor, dim: tl.tensor,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copies the columns of each id, unpooled: float32[num_ids, D] of the ids from ``first`` on."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = own < num_ids
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    key = tl.load(inverse + first + own, mask=mask, other=0)
    address = tl.load(addresses + key, mask=mask, other=0) + first_byte
    inside = mask[:, None] & (column < dim)
    values = load_columns(address, column, inside, DTYPE, ALIGNED)
    tl.store(out + own.to(tl.int64)[:, None] * dim + column, values, mask=inside)
