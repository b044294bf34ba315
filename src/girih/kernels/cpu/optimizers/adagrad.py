"""Adagrad (Duchi et al. 2011), element by element, the same as ``torch.optim.Adagrad``.

    g ← g + λ·row    s ← s + g²    row ← row - lr · g / (√s + eps)

State: s, ``dim`` floats, from ``initial_accumulator_value``.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.optimizers.bound import bounded
from girih.optim import Adagrad


def state_columns(options: Adagrad, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns names and widths of the state."""
    return (("sum", dim),)


def hyper(options: Adagrad, lr_scale: float, step: int) -> tuple[float, ...]:
    """Returns lr, eps, λ."""
    return options.lr * lr_scale, options.eps, options.l2


@njit_lean
def update(row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates one row, float32[dim], and its state."""
    lr, eps, l2 = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    for d in range(row.shape[0]):
        g = bounded(grad[d] + l2 * row[d])
        state[d] += g * g
        root = np.sqrt(state[d]) + eps
        if root > 0:  # with eps = 0 and without a gradient so far, the row does not change
            row[d] -= lr * g / root
