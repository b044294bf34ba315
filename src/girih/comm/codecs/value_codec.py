"""Embeddings and gradients in half the bytes, with a small loss (Persia §4.2.3).

A vector v is scaled by κ/‖v‖∞ and rounded to float16; ‖v‖∞ goes with it as float32. So the range of float16 lies
where the vector's numbers are, however large or small they are.

κ = 2¹⁵: a power of two, so that the largest number of a vector comes back exactly, and the largest one that leaves
room to round below float16's 65,504. The upper half of float16's range, from 2¹⁵ to 65,504, has twice the spacing of
the range below, so that a larger κ would gain nothing at the top of a vector.

Shapes: D the last dim.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from girih.errors import WireError
from girih.kernels.cpu import wire_codecs
from girih.kernels.cpu.arrays import sealed

KAPPA = wire_codecs.KAPPA


def shrink(values: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Halves of float32[..., D].

    What comes back differs by at most 2⁻¹²(1 + 2⁻⁹)‖v‖∞, and, of a number of at least 2⁻²⁹‖v‖∞, by at
    most about 2⁻¹¹ of itself; for denormal results, by at most half the spacing of denormal float32 more. Zeros stay
    zeros with their sign. NaN stays NaN and infinities stay themselves; ‖v‖∞ is then that of the vector's finite
    numbers, which are coded as ever.

    Returns:
        float16[..., D] and ‖v‖∞ of each vector, float32[..., 1]; [..., 0] where D is 0.
    """
    dim = values.shape[-1]
    halves = np.empty(values.shape, np.uint16)
    scales = np.empty((*values.shape[:-1], min(dim, 1)), np.float32)
    if values.size:
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, dim)
        scaled = np.empty(dim, np.float32)
        wire_codecs.shrink_blocks(sealed(rows), scaled, halves.reshape(-1, dim), scales.reshape(-1))
    return halves.view(np.float16), scales


def grow(halves: NDArray[np.float16], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undoes ``shrink``: float16[..., D], float32[..., 1] → float32[..., D].

    Raises:
        WireError: the two do not fit together.
    """
    fits = halves.dtype == np.float16 and scales.dtype == np.float32 and halves.ndim == scales.ndim > 0
    if not fits or (halves.size and scales.shape != (*halves.shape[:-1], 1)):
        raise WireError(
            f"{halves.dtype}{list(halves.shape)} with scales {scales.dtype}{list(scales.shape)}; expected"
            " float16[..., D] and float32[..., 1]"
        )
    bits = np.ascontiguousarray(halves)
    values: NDArray[np.float32] = bits.astype(np.float32)
    if not halves.size:
        return values
    dim = halves.shape[-1]
    rows, scale = values.reshape(-1, dim), np.ascontiguousarray(scales).reshape(-1, 1)
    wide = ~(scale[:, 0] >= wire_codecs.SMALL)  # the factor is beyond float32
    with np.errstate(invalid="ignore", over="ignore"):
        rows *= scale * np.float32(1 / KAPPA)
        if wide.any():
            rows[wide] = bits.reshape(-1, dim)[wide] * (scale[wide].astype(np.float64) / KAPPA)
    return values
