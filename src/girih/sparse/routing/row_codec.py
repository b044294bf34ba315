"""Rows and their gradients as trainers send them to each other: float32, or scaled float16 (PICASSO §V; Persia §4.2.3).

Shapes: K rows, W columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs import value_codec

_SCALE_HALVES = 2  # a float32 in the place of so many float16


@dataclass(frozen=True, slots=True)
class RowCodec:
    """Encoding of rows.

    Attributes:
        float16: each row as float16 with a scale of its own, 2·W + 4 bytes for 4·W; what is lost is bounded by
            :func:`girih.comm.codecs.value_codec.shrink`.
    """

    float16: bool = False

    @property
    def dtype(self) -> type[np.float16] | type[np.float32]:
        """The dtype of what travels."""
        return np.float16 if self.float16 else np.float32

    def width(self, dim: int) -> int:
        """Numbers of :attr:`dtype` that a packed row of ``dim`` numbers takes."""
        return dim + _SCALE_HALVES * self.float16

    def pack(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """float32[K, W] as it is, or float16[K, W + 2], of which the last two are the bits of the scale."""
        if not self.float16:
            return rows
        halves, scales = value_codec.shrink(rows)
        return np.concatenate([halves, scales.view(np.float16)], axis=1)

    def unpack(self, packed: NDArray[Any]) -> NDArray[np.float32]:
        """Undoes :meth:`pack`: float32[K, W]."""
        if not self.float16:
            return packed
        halves, scales = packed[:, :-_SCALE_HALVES], packed[:, -_SCALE_HALVES:]
        return value_codec.grow(halves, np.ascontiguousarray(scales).view(np.float32))
