"""Numbers as float32, as they are, or as bfloat16 in half the bytes (HT §4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs.codec import Arrays, Shape, expect, flat
from girih.kernels.cpu import tensor_codecs
from girih.kernels.cpu.arrays import sealed


@dataclass(frozen=True, slots=True)
class Float32:
    """Sends numbers as they are, without a copy."""

    name: ClassVar[str] = "float32"

    def pack(self, values: NDArray[np.float32]) -> Arrays:
        """See :class:`girih.comm.codecs.Codec`: float32[n]."""
        return (flat(values),)

    def unpack(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """See :class:`girih.comm.codecs.Codec`; a view."""
        expect(self.name, arrays, (np.float32, (math.prod(shape),)))
        return arrays[0].reshape(shape)

    def packed_bytes(self, shape: Shape) -> int:
        """4n."""
        return 4 * math.prod(shape)


@dataclass(frozen=True, slots=True)
class BFloat16:
    """Rounds to the nearest bfloat16, of two the even one, as torch does.

    What comes back differs by at most 2⁻⁸ of itself, or by 2⁻¹³⁴ where that is less. Zeros keep their sign, infinities
    stay, NaN stays NaN; from 2¹²⁸(1 − 2⁻⁹) on a number becomes infinity.
    """

    name: ClassVar[str] = "bfloat16"

    def pack(self, values: NDArray[np.float32]) -> Arrays:
        """See :class:`girih.comm.codecs.Codec`: uint16[n], the bits."""
        numbers = flat(values)
        halves = np.empty(len(numbers), np.uint16)
        tensor_codecs.narrow(sealed(numbers), halves)
        return (halves,)

    def unpack(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """See :class:`girih.comm.codecs.Codec`."""
        expect(self.name, arrays, (np.uint16, (math.prod(shape),)))
        return widened(arrays[0]).reshape(shape)

    def packed_bytes(self, shape: Shape) -> int:
        """2n."""
        return 2 * math.prod(shape)


def widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers of bfloat16's bits."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)
