"""The bound on gradients for optimizers with a sum of squares: 2⁵⁰, about 1.1e15.

The square of a float32 above 1.8e19 is infinite. A single infinite square makes a row's state infinite, then NaN,
forever. For gradients within ±2⁵⁰, float32 sums of any number of squares stay finite. Above 2¹²⁵, the next square, at
most 2¹⁰⁰, is less than half of the last digit and adds nothing. Gradients within the bound are not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.jit import njit_lean

LARGEST_GRADIENT = np.float32(2.0**50)


@njit_lean
def bounded(gradient: Any) -> Any:
    """Returns the gradient, float32, limited to ±2⁵⁰."""
    return max(min(gradient, LARGEST_GRADIENT), -LARGEST_GRADIENT)
