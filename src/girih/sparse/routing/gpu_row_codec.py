"""Rows and their gradients as trainers send them from GPU to GPU: as :mod:`girih.sparse.routing.row_codec` has it, bit
for bit but for rows without a number of at least 2⁻¹⁰⁰, which lose at most 2⁻¹¹² here.

Shapes: K rows, W columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from girih.kernels.cpu.wire_codecs import KAPPA, SMALL

_SCALE_HALVES = 2  # a float32 in the place of so many float16


@dataclass(frozen=True, slots=True)
class GpuRowCodec:
    """Encoding of rows; see :class:`girih.sparse.routing.row_codec.RowCodec`."""

    float16: bool = False

    def width(self, dim: int) -> int:
        """Numbers that a packed row of ``dim`` numbers takes."""
        return dim + _SCALE_HALVES * self.float16

    def pack(self, rows: Tensor) -> Tensor:
        """float32[K, W] as it is, or float16[K, W + 2], of which the last two are the bits of the scale."""
        if not self.float16:
            return rows
        sizes = torch.where(rows.isfinite(), rows, 0.0).abs()
        scales = sizes.amax(dim=1, keepdim=True).clamp(min=SMALL)
        halves = (rows * (KAPPA / scales)).half()
        return torch.cat([halves, scales.view(torch.float16)], dim=1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Undoes :meth:`pack`: float32[K, W]."""
        if not self.float16:
            return packed
        halves, scales = packed[:, :-_SCALE_HALVES], packed[:, -_SCALE_HALVES:]
        bits = scales.clone(memory_format=torch.contiguous_format)
        return halves.float() * (bits.view(torch.float32) * (1 / KAPPA))
