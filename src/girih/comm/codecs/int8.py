"""Activations in a quarter of the bytes: each row in 255 steps of its own (HT §4.2).

The paper quantises activations of the forward pass only, since gradients bear it badly. A row, an example's outputs of a
layer, has a step and a zero point of its own: an outlier costs its own example only, what arrives of an example does
not depend on which others it came with, and one pass over memory is enough. For that 8 bytes go with each row. The zero
point is the row's least number as float32, so that the zeros behind a ReLU stay zeros, and a row of one number is exact.

Shapes: R rows, D numbers in each: all dimensions before the last, and the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs.codec import Arrays, Shape, expect, rows_of
from girih.kernels.cpu import tensor_codecs
from girih.kernels.cpu.arrays import sealed


@dataclass(frozen=True, slots=True)
class Int8:
    """Sends the steps above its row's least number for each number, and step and least number of each row.

    What comes back differs by at most half a step, 1/510 of the row's range, but for float32's own rounding: 10⁻⁴ of a
    step and 2⁻²³ of the row's largest magnitude. The least number of a row is exact; a row whose range is below 2⁻¹⁰⁰
    comes back as it. A row in which a number is not finite, or whose range is beyond float32, comes back as NaN.
    """

    name: ClassVar[str] = "int8"

    def pack(self, values: NDArray[np.float32]) -> Arrays:
        """See :class:`girih.comm.codecs.Codec`: uint8[R, D]; float32[R, 2]: step and least number."""
        num_rows, dim = rows_of(values.shape)
        codes, ranges = np.empty((num_rows, dim), np.uint8), np.empty((num_rows, 2), np.float32)
        if num_rows:
            rows = np.ascontiguousarray(values, np.float32).reshape(num_rows, dim)
            tensor_codecs.quantize_rows(sealed(rows), codes, ranges)
        return codes, ranges

    def unpack(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """See :class:`girih.comm.codecs.Codec`."""
        num_rows, dim = rows_of(shape)
        expect(self.name, arrays, (np.uint8, (num_rows, dim)), (np.float32, (num_rows, 2)))
        codes, ranges = arrays
        values: NDArray[np.float32] = codes.astype(np.float32)
        with np.errstate(over="ignore"):  # beside the largest float32
            values *= ranges[:, :1]
            values += ranges[:, 1:]
        return values.reshape(shape)

    def packed_bytes(self, shape: Shape) -> int:
        """R·D + 8R."""
        num_rows, dim = rows_of(shape)
        return num_rows * (dim + 8)
