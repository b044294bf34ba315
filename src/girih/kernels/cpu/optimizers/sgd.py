"""SGD, with or without momentum, the same as ``torch.optim.SGD`` without dampening or Nesterov.

    g ← g + λ·row    v ← momentum · v + g    row ← row - lr · v

State: v, ``dim`` floats, which start at 0, so v = g in the first step. Without momentum, there is no state, and v = g.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.kernels.cpu.jit import njit_lean
from girih.optim import SGD


def state_columns(options: SGD, dim: int) -> tuple[tuple[str, int], ...]:
    """Returns names and widths of the state."""
    return (("momentum", dim),) if options.momentum else ()


def hyper(options: SGD, lr_scale: float, step: int) -> tuple[float, ...]:
    """Returns lr, momentum, λ."""
    return options.lr * lr_scale, options.momentum, options.l2


@njit_lean
def update(row: F32, state: F32, grad: F32, hyper: F64) -> None:
    """Updates one row, float32[dim], and its state."""
    lr, momentum, l2 = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    for d in range(row.shape[0]):
        g = grad[d] + l2 * row[d]
        if state.shape[0] > 0:
            g = momentum * state[d] + g
            state[d] = g
        row[d] -= lr * g
