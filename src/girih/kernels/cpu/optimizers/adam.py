"""Lazy Adam (Kingma and Ba 2015), the same as ``torch.optim.SparseAdam``. Rows without a gradient do not change.

    g ← g + λ·row    m ← m + (1-β₁)(g-m)    v ← v + (1-β₂)(g²-v)
    row ← row - lr · √(1-β₂ᵗ) / (1-β₁ᵗ) · m / (√v + eps)

t is the optimizer's step, the same for all rows. State: m and v, 2 · ``dim`` floats, from 0.
"""

from __future__ import annotations

import math

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.optimizers.bound import bounded
from girih.optim import Adam


def state_columns(options: Adam, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns names and widths of the state."""
    return (("exp_avg", dim), ("exp_avg_sq", dim))


def hyper(options: Adam, lr_scale: float, step: int) -> tuple[float, ...]:
    """Returns the step size with its bias correction, 1-β₁, 1-β₂, eps, λ."""
    first, second = options.betas
    size = options.lr * lr_scale * math.sqrt(1 - second**step) / (1 - first**step)
    return size, 1 - first, 1 - second, options.eps, options.l2


@njit_lean
def update(row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates one row, float32[dim], and its state."""
    size, first, second = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    eps, l2 = np.float32(hyper[3]), np.float32(hyper[4])
    dim = row.shape[0]
    means, squares = state[:dim], state[dim : 2 * dim]  # separate arrays, so that the loop is vectorized
    for d in range(dim):
        g = bounded(grad[d] + l2 * row[d])
        m = (g - means[d]) * first + means[d]
        v = (g * g - squares[d]) * second + squares[d]
        means[d] = m
        squares[d] = v
        row[d] -= size * (m / (np.sqrt(v) + eps))
