"""Row-wise Adagrad: one accumulator per row, the mean of g² over its columns, the same as in FBGEMM.

    g ← g + λ·row    s ← s + mean(g²)    row ← row - lr / (√s + eps) · g

State: s, 1 float, from ``initial_accumulator_value``.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.optimizers.bound import LARGEST_GRADIENT, bounded
from girih.kernels.cpu.vector import sum_of_squares
from girih.optim import RowwiseAdagrad


def state_columns(options: RowwiseAdagrad, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns names and widths of the state."""
    return (("sum", 1),)


def hyper(options: RowwiseAdagrad, lr_scale: float, step: int) -> tuple[float, ...]:
    """Returns lr, eps, λ."""
    return options.lr * lr_scale, options.eps, options.l2


@njit_lean
def update(row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates one row, float32[dim], and its state."""
    lr, eps, l2 = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    dim = row.shape[0]
    state[0] += sum_of_squares(grad, row, l2, LARGEST_GRADIENT) / np.float32(dim)
    root = np.sqrt(state[0]) + eps
    if root > 0:  # with eps = 0 and without a gradient so far, the row does not change
        rate = lr / root
        for d in range(dim):
            row[d] -= rate * bounded(grad[d] + l2 * row[d])
