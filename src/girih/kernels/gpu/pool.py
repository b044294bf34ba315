"""Pools bags of rows into vectors on a GPU, and computes the gradients of ids' weights.

Modes and weights are the same as in :mod:`girih.kernels.cpu.pool`.

Rows are read in place by their addresses. In :func:`pool_short`, a program pools several bags, each bag id by id. In
:func:`pool_long`, a program pools one bag, many ids at a time. Both sum in a fixed order. :func:`weigh_short` and
:func:`weigh_long` divide the work in the same ways.

Shapes: B examples, P features of an output, N ids of the batch, U unique keys, W columns of a row, D columns of an
output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language import constexpr, tensor

from girih.kernels.cpu.pool import MEAN, SQRTN
from girih.kernels.gpu.dedup import bag_scale
from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import items, load, whole_vectors
from girih.kernels.gpu.lookup import load_columns

SHORT_BAG = 16
"""The maximum number of ids in a short bag. A program pools several short bags."""
_LENGTHS = constexpr(SHORT_BAG + 1)


def short_factors(modes: NDArray[Any]) -> NDArray[np.float32]:
    """Returns a table of the factors of short bags' sums, by feature and number of ids, float32[P, SHORT_BAG + 1].

    The factor is 1, 1/n or 1/√n, the same as in ``bag_scale``. Without the table, a division and a root for each bag
    would be half of the arithmetic for short bags.
    """
    length = np.maximum(np.arange(SHORT_BAG + 1, dtype=np.float32), np.float32(1))
    factors = np.ones((len(modes), SHORT_BAG + 1), np.float32)
    factors[modes == MEAN] = 1 / length
    factors[modes == SQRTN] = 1 / np.sqrt(length)
    return factors


@triton.jit
def _ids_of(bag: tensor, bags: tensor, offsets: tensor, num_features: tensor, mask: tensor) -> Any:
    """Returns the feature of each bag, its first id, and its number of ids."""
    feature, example = bag % num_features, bag // num_features
    bound = load(bags + feature, mask) + example
    start = load(offsets + bound, mask)
    return feature, start, load(offsets + bound + 1, mask) - start


@kernel
def pool_short(
    addresses: tensor, inverse: tensor, offsets: tensor, weights: tensor, bags: tensor, factors: tensor, out: tensor, first_bag: tensor,
    num_bags: tensor, num_features: tensor, first_byte: tensor, dim: tensor, WEIGHTED: constexpr, DTYPE: constexpr,
    ALIGNED: constexpr, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Pools short bags.

    Args:
        addresses: int64[U], the address of each key's columns. first_byte: the start of the segment's columns.
        inverse: int32[N], the key of each id. offsets: int32[·], the batch's bag bounds. weights: float32[N].
        bags: int32[P], the start of each feature's bounds. factors: float32[P, ·], see :func:`short_factors`.
        out: float32[B · P, D], output. ``num_bags`` bags are written, from ``first_bag`` on.
    """
    own = items(BLOCK)
    mask = own < num_bags
    bag = own + first_bag
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    feature, start, length = _ids_of(bag, bags, offsets, num_features, mask)
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    most = tl.max(length)
    for j in range(most):
        present = mask & (j < length)
        key = load(inverse + start + j, present)
        address = load(addresses + key, present) + first_byte
        values = load_columns(address, column, present[:, None] & (column < dim), DTYPE, ALIGNED)
        if WEIGHTED:
            values = values * load(weights + start + j, present)[:, None]
        total += values
    total = total * load(factors + feature * _LENGTHS + length, mask)[:, None]
    tl.store(out + bag.to(tl.int64)[:, None] * dim + column, total, mask=mask[:, None] & (column < dim))


@kernel
def pool_long(
    addresses: tensor, inverse: tensor, offsets: tensor, weights: tensor, bags: tensor, modes: tensor, out: tensor, first_bag: tensor,
    num_features: tensor, first_byte: tensor, dim: tensor, WEIGHTED: constexpr, DTYPE: constexpr,
    ALIGNED: constexpr, COLUMNS: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Pools one bag per program, ``AT_ONCE`` ids at a time.

    Arguments are the same as in :func:`pool_short`. In addition, ``modes``, int32[P], has the poolings.
    """
    bag = tl.program_id(0) + first_bag
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    feature, start, length = _ids_of(bag, bags, offsets, num_features, bag >= 0)
    stop = start + length
    total = tl.zeros((AT_ONCE, COLUMNS), tl.float32)
    for first in range(start, stop, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        present = i < stop
        key = load(inverse + i, present)
        address = load(addresses + key, present) + first_byte
        values = load_columns(address, column, present[:, None] & (column < dim), DTYPE, ALIGNED)
        if WEIGHTED:
            values = values * load(weights + i, present)[:, None]
        total += values
    scale = bag_scale(tl.load(modes + feature), length.to(tl.float32))
    pooled = tl.sum(total, axis=0)[None, :] * scale
    tl.store(out + bag.to(tl.int64) * dim + column, pooled, mask=column < dim)


@kernel
def weigh_short(
    values: tensor, inverse: tensor, offsets: tensor, gradients: tensor, bags: tensor, factors: tensor, out: tensor, num_bags: tensor,
    num_features: tensor, num_columns: tensor, first_column: tensor, dim: tensor, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Adds the gradients of the weights of ids in short bags.

    The gradient is the product of an id's columns and its bag's gradient, times the bag's factor.

    Args:
        values: float32[U, W]. W is ``num_columns``.
        gradients: float32[B · P, D]. inverse, offsets, bags, factors: the same as in :func:`pool_short`.
        out: float32[N], to which the gradients are added.
    """
    bag = items(BLOCK)
    mask = bag < num_bags
    column = tl.arange(0, COLUMNS)[None, :]
    inside = mask[:, None] & (column < dim)
    feature, start, length = _ids_of(bag, bags, offsets, num_features, mask)
    scale = load(factors + feature * _LENGTHS + length, mask)
    place = bag.to(tl.int64)[:, None] * dim + column
    gradient = load(gradients + place, inside) * scale[:, None]
    most = tl.max(length)
    for j in range(most):
        present = mask & (j < length)
        key = load(inverse + start + j, present).to(tl.int64)
        row = load(values + key[:, None] * num_columns + first_column + column, present[:, None] & inside)
        before = load(out + start + j, present)
        tl.store(out + start + j, before + tl.sum(gradient * row, axis=1), mask=present)


@kernel
def weigh_long(
    values: tensor, inverse: tensor, offsets: tensor, gradients: tensor, bags: tensor, modes: tensor, out: tensor,
    num_features: tensor, num_columns: tensor, first_column: tensor, dim: tensor, COLUMNS: constexpr,
    AT_ONCE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Adds the gradients of weights for one bag per program, ``AT_ONCE`` ids at a time.

    Arguments are the same as in :func:`weigh_short`. In addition, ``modes``, int32[P], has the poolings.
    """
    bag = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    feature, start, length = _ids_of(bag, bags, offsets, num_features, bag >= 0)
    stop = start + length
    scale = bag_scale(tl.load(modes + feature), length.to(tl.float32))
    place = bag.to(tl.int64) * dim + column
    gradient = load(gradients + place, column < dim) * scale
    for first in range(start, stop, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        present = i < stop
        key = load(inverse + i, present).to(tl.int64)
        row = load(
            values + key[:, None] * num_columns + first_column + column, present[:, None] & (column < dim)
        )
        before = load(out + i, present)
        tl.store(out + i, before + tl.sum(gradient * row, axis=1), mask=present)


@kernel
def spread(
    addresses: tensor, inverse: tensor, out: tensor, first: tensor, num_ids: tensor, first_byte: tensor, dim: tensor,
    DTYPE: constexpr, ALIGNED: constexpr, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Copies the columns of each id, unpooled, to float32[num_ids, D], starting at id ``first``."""
    own = items(BLOCK)
    mask = own < num_ids
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    key = load(inverse + first + own, mask)
    address = load(addresses + key, mask) + first_byte
    inside = mask[:, None] & (column < dim)
    values = load_columns(address, column, inside, DTYPE, ALIGNED)
    tl.store(out + own.to(tl.int64)[:, None] * dim + column, values, mask=inside)
