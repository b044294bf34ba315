"""FTRL-proximal (McMahan et al. 2013, Algorithm 1), per coordinate, with exact zeros.

    σ ← (√(n + g²) - √n) / α    z ← z + s·g - σ·w    n ← n + g²
    w ← 0 if |z| ≤ λ₁, else -(z - sign(z)·λ₁) / ((β + √n) / α + λ₂)

α is ``lr``. s is the factor of the learning rate from a schedule, 1 in the paper. s multiplies the gradient, because a
changing α would rescale everything that was learned before. While w keeps its sign, it changes by -s·g / ((β + √n) / α
+ λ₂). A gradient g = 0 leaves w unchanged for any s. λ₁ applies to the scaled gradients.

The paper computes w for each prediction. This module stores w, and computes it after each update. If a row is assigned,
or does not start at 0, its z is set so that the closed form gives the row's value. While the denominator is 0
(β = λ₂ = n = 0), w does not change. State: z and n, 2 · ``dim`` floats.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.optimizers.bound import bounded
from girih.optim import FTRL


def state_columns(options: FTRL, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns names and widths of the state."""
    return (("z", dim), ("n", dim))


def hyper(options: FTRL, lr_scale: float, step: int) -> tuple[float, ...]:
    """Returns α, β, λ₁, λ₂, s."""
    return options.lr, options.beta, options.l1, options.l2, lr_scale


@njit_lean
def update(row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates one row, float32[dim], and its state."""
    alpha, beta = np.float32(hyper[0]), np.float32(hyper[1])
    l1, l2, scale = np.float32(hyper[2]), np.float32(hyper[3]), np.float32(hyper[4])
    dim = row.shape[0]
    for d in range(dim):
        g, z, n = bounded(grad[d]), state[d], state[dim + d]
        more = n + g * g
        root = np.sqrt(more)
        z += scale * g - (root - np.sqrt(n)) / alpha * row[d]
        state[d] = z
        state[dim + d] = more
        curvature = (beta + root) / alpha + l2
        if curvature > 0:
            if z > l1:
                row[d] = -(z - l1) / curvature
            elif z < -l1:
                row[d] = -(z + l1) / curvature
            else:
                row[d] = 0.0


@njit_lean
def settle(row: F32, state: F32, hyper: F64) -> None:
    """Adapts z to a row that was set from outside. n does not change."""
    alpha, beta = np.float32(hyper[0]), np.float32(hyper[1])
    l1, l2 = np.float32(hyper[2]), np.float32(hyper[3])
    dim = row.shape[0]
    for d in range(dim):
        z = -row[d] * ((beta + np.sqrt(state[dim + d])) / alpha + l2)
        if row[d] > 0:
            z -= l1
        elif row[d] < 0:
            z += l1
        state[d] = z
