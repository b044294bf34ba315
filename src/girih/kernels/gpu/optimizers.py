"""The sparse optimizers on a GPU, on tiles of rows.

Arithmetic is the same as in :mod:`girih.kernels.cpu.optimizers`, in the same order. Division and square root are
rounded to nearest. Shapes: K rows of a program, C columns of a tile, at least the D columns of a segment.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.cpu import optimizers as cpu
from girih.kernels.gpu.layout import FLOAT32, columns_at, floats_at, load

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = map(
    constexpr, (cpu.SGD, cpu.ADAGRAD, cpu.ROWWISE_ADAGRAD, cpu.ADAM, cpu.FTRL)
)
_FIRST_STATE = constexpr(cpu.HYPER_COLUMNS - 1)
_BOUND = constexpr(2.0**50)


@triton.jit
def _bounded(gradient: tensor) -> Any:
    return tl.maximum(tl.minimum(gradient, _BOUND), -_BOUND)


@triton.jit
def _number(hyper: tensor, place: constexpr) -> Any:
    return tl.load(hyper + place).to(tl.float32)


@triton.jit
def updated(
    row: tensor, gradient: tensor, state_address: tensor, hyper: tensor, dim: tensor, column: tensor, rows: tensor, OPTIMIZER: constexpr,
    STATE_WIDTH: constexpr, ALIGNED: constexpr,
) -> Any:  # fmt: skip
    """Returns the columns of rows after one step, float32[K, C]. Updates their state in place.

    Args:
        row, gradient: float32[K, C]. Columns from ``dim`` on are 0 and unused.
        state_address: int64[K], the address of the state of each row. ALIGNED: see
            :func:`girih.kernels.gpu.layout.columns_at`.
        hyper: float64[8], the hyperparameters of the segment, see each optimizer's ``hyper``.
        column: int32[1, C]. rows: bool[K, 1], True for rows that exist.
    """
    mask = rows & (column < dim)
    WIDE: constexpr = ALIGNED and STATE_WIDTH > 1
    state = columns_at(state_address, column, FLOAT32, WIDE)
    if OPTIMIZER == SGD:
        return _sgd(row, gradient, state, hyper, mask, STATE_WIDTH > 0)
    elif OPTIMIZER == ADAGRAD:
        return _adagrad(row, gradient, state, hyper, mask)
    elif OPTIMIZER == ROWWISE_ADAGRAD:
        return _rowwise_adagrad(row, gradient, floats_at(state_address)[:, None], hyper, dim, rows, mask)
    elif OPTIMIZER == ADAM:
        return _adam(row, gradient, state, hyper, dim, mask)
    else:
        return _ftrl(row, gradient, state, hyper, dim, mask)


@triton.jit
def _sgd(
    row: tensor,
    gradient: tensor,
    state: tensor,
    hyper: tensor,
    mask: tensor,
    MOMENTUM: constexpr,
) -> Any:
    lr, momentum, l2 = _number(hyper, 0), _number(hyper, 1), _number(hyper, 2)
    g = gradient + l2 * row
    if MOMENTUM:
        g = momentum * load(state, mask) + g
        tl.store(state, g, mask=mask)
    return row - lr * g


@triton.jit
def _adagrad(row: tensor, gradient: tensor, state: tensor, hyper: tensor, mask: tensor) -> Any:
    lr, eps, l2 = _number(hyper, 0), _number(hyper, 1), _number(hyper, 2)
    g = _bounded(gradient + l2 * row)
    total = load(state, mask) + g * g
    tl.store(state, total, mask=mask)
    root = tl.sqrt_rn(total) + eps
    moves = root > 0  # with eps = 0 and without a gradient so far, the row does not change
    return row - tl.where(moves, tl.div_rn(lr * g, tl.where(moves, root, 1.0)), 0.0)


@triton.jit
def _rowwise_adagrad(
    row: tensor,
    gradient: tensor,
    state_address: tensor,
    hyper: tensor,
    dim: tensor,
    rows: tensor,
    mask: tensor,
) -> Any:
    lr, eps, l2 = _number(hyper, 0), _number(hyper, 1), _number(hyper, 2)
    g = _bounded(gradient + l2 * row)
    squares = tl.sum(tl.where(mask, g * g, 0.0), axis=1)[:, None]
    width = tl.zeros_like(squares) + dim
    total = load(state_address, rows) + tl.div_rn(squares, width)
    tl.debug_barrier()  # wait until all threads have read the single word of a row
    tl.store(state_address, total, mask=rows)
    root = tl.sqrt_rn(total) + eps
    moves = root > 0
    rate = tl.where(moves, tl.div_rn(tl.zeros_like(root) + lr, tl.where(moves, root, 1.0)), 0.0)
    return row - rate * g


@triton.jit
def _adam(row: tensor, gradient: tensor, state: tensor, hyper: tensor, dim: tensor, mask: tensor) -> Any:
    size, first, second = _number(hyper, 0), _number(hyper, 1), _number(hyper, 2)
    eps, l2 = _number(hyper, 3), _number(hyper, 4)
    g = _bounded(gradient + l2 * row)
    mean = load(state, mask)
    square = load(state + dim, mask)
    mean = (g - mean) * first + mean
    square = (g * g - square) * second + square
    tl.store(state, mean, mask=mask)
    tl.store(state + dim, square, mask=mask)
    return row - size * tl.div_rn(mean, tl.sqrt_rn(square) + eps)


@triton.jit
def _ftrl(row: tensor, gradient: tensor, state: tensor, hyper: tensor, dim: tensor, mask: tensor) -> Any:
    alpha, beta = _number(hyper, 0), _number(hyper, 1)
    l1, l2, scale = _number(hyper, 2), _number(hyper, 3), _number(hyper, 4)
    g = _bounded(gradient)
    z, n = load(state, mask), load(state + dim, mask)
    more = n + g * g
    root = tl.sqrt_rn(more)
    alphas = tl.zeros_like(root) + alpha
    z = z + (scale * g - tl.div_rn(root - tl.sqrt_rn(n), alphas) * row)
    tl.store(state, z, mask=mask)
    tl.store(state + dim, more, mask=mask)
    curvature = tl.div_rn(beta + root, alphas) + l2
    curved = curvature > 0
    steep = tl.where(curved, curvature, 1.0)
    positive, negative = tl.div_rn(-(z - l1), steep), tl.div_rn(-(z + l1), steep)
    value = tl.where(z > l1, positive, tl.where(z < -l1, negative, 0.0))
    return tl.where(curved, value, row)


@triton.jit
def begin_state(
    row: tensor, state_address: tensor, hyper: tensor, dim: tensor, column: tensor, rows: tensor, OPTIMIZER: constexpr,
    STATE_WIDTH: constexpr,
) -> None:  # fmt: skip
    """Writes the state of new rows whose columns are ``row``, float32[K, C].

    Arguments are the same as in :func:`updated`.
    """
    start = tl.zeros_like(row) + _number(hyper, _FIRST_STATE)
    state = state_address + column
    if OPTIMIZER == ROWWISE_ADAGRAD:
        tl.store(state, start, mask=rows & (column < 1))
    elif STATE_WIDTH > 0:
        mask = rows & (column < dim)
        tl.store(state, start, mask=mask)
        if OPTIMIZER == ADAM or OPTIMIZER == FTRL:
            tl.store(state + dim, start, mask=mask)
        if OPTIMIZER == FTRL:
            tl.debug_barrier()  # settle reads n, which other threads write
            settle(row, state, hyper, dim, mask)


@triton.jit
def settle(row: tensor, state: tensor, hyper: tensor, dim: tensor, mask: tensor) -> None:
    """Adapts FTRL's z to rows that were set from outside. n does not change."""
    alpha, beta = _number(hyper, 0), _number(hyper, 1)
    l1, l2 = _number(hyper, 2), _number(hyper, 3)
    n = load(state + dim, mask)
    alphas = tl.zeros_like(n) + alpha
    z = -row * (tl.div_rn(beta + tl.sqrt_rn(n), alphas) + l2)
    z = tl.where(row > 0, z - l1, tl.where(row < 0, z + l1, z))
    tl.store(state, z, mask=mask)
