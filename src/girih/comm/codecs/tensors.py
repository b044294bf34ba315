"""Codecs of activations and of their gradients between trainers and group servers (HT §4.2)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import WireError
from girih.kernels.cpu import tensor_codecs
from girih.kernels.cpu.arrays import sealed

Shape = tuple[int, ...]
Layout = tuple[tuple[DTypeLike, Shape], ...]


class Codec(ABC):
    """Packs float32 arrays of any shape, and unpacks them in another process.

    If an array has a number that is not finite, the unpacked array also has such a number. So the receiver refuses the
    step too.
    """

    name: ClassVar[str]

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """Returns the dtype and shape of each array of a message."""

    @abstractmethod
    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """Returns a message, as arrays for a frame. They may be views of ``values``."""

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
        """Returns the array of a message.

        Raises:
            WireError: the arrays are not a message of this shape.
        """
        layout = [(np.dtype(dtype), size) for dtype, size in self.layout(shape)]
        found = [(array.dtype, array.shape) for array in arrays]
        if found != layout:
            came, expected = ([f"{dtype}{list(size)}" for dtype, size in each] for each in (found, layout))
            raise WireError(
                f"a message by {self.name}: {', '.join(came) or 'nothing'}; expected {', '.join(expected)}"
            )
        return self._unpack(*arrays, num_values=math.prod(shape)).reshape(shape)

    @abstractmethod
    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        """Returns the numbers of a message in any shape. The layout of the message is correct."""

    def packed_bytes(self, shape: Shape) -> int:
        """Returns the size of a message's arrays in bytes."""
        return sum(np.dtype(dtype).itemsize * math.prod(size) for dtype, size in self.layout(shape))

    def _empty(self, shape: Shape) -> tuple[NDArray[Any], ...]:
        """Returns uninitialized arrays for a message."""
        return tuple(np.empty(size, dtype) for dtype, size in self.layout(shape))


def flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns all numbers in C order, float32[n], as a view if possible."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def rows_of(shape: Shape) -> Shape:
    """Returns (R, D): the number of rows along the last dimension, and their length, or (0, 0) for empty arrays."""
    num_values, dim = math.prod(shape), shape[-1] if shape else 1
    return (num_values // dim, dim) if num_values else (0, 0)


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """Sends numbers unchanged, without a copy."""

    name: ClassVar[str] = "float32"

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of the numbers, float32[n]."""
        return ((np.float32, (math.prod(shape),)),)

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        return (flat(values),)

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        return arrays[0]


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """Rounds to the nearest bfloat16. Ties go to the even number, as in torch.

    The decoded value differs by at most 2⁻⁸ of the number, or by 2⁻¹³⁴ if that is more. Zeros keep their sign,
    infinities stay, NaN stays NaN. A number of at least 2¹²⁸(1 − 2⁻⁹) becomes infinity.
    """

    name: ClassVar[str] = "bfloat16"

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of the bits, uint16[n]."""
        return ((np.uint16, (math.prod(shape),)),)

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        arrays = self._empty(values.shape)
        tensor_codecs.narrow(sealed(flat(values)), *arrays)
        return arrays

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        return widened(arrays[0])


def widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Converts bits of bfloat16 to float32."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Sends each number as a number of steps, 0 to 255, above the least number of its row.

    A message also has the step and the least number of each row. The decoded value differs by at most half a step,
    which is 1/510 of the row's range. Float32's rounding adds 10⁻⁴ of a step and 2⁻²³ of the row's largest magnitude.
    The least number of a row is exact. If a row's range is below 2⁻¹⁰⁰, all numbers of the row become its least number.
    If a row has a number that is not finite, or a range beyond float32, all numbers of the row become NaN.
    """

    name: ClassVar[str] = "int8"

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of the codes, uint8[R, D], and of the steps and least numbers, float32[R, 2]."""
        num_rows, dim = rows_of(shape)
        return (np.uint8, (num_rows, dim)), (np.float32, (num_rows, 2))

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        arrays = self._empty(values.shape)
        if values.size:
            tensor_codecs.quantize_rows(sealed(flat(values).reshape(arrays[0].shape)), *arrays)
        return arrays

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        codes, ranges = arrays
        values: NDArray[np.float32] = codes.astype(np.float32)
        with np.errstate(over="ignore"):  # a sum close to the largest float32 may overflow
            values *= ranges[:, :1]
            values += ranges[:, 1:]
        return values


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """Sends the numbers of largest magnitude with their places. Among equal magnitudes, the first numbers are sent.

    NaN counts as larger than infinity, and infinity as larger than any number. So if an array has NaN or infinity, at
    least one of them is sent.

    Attributes:
        share: the part of the numbers that is sent, at least one number. 0 < share ≤ 1.
    """

    share: float = 0.1

    name: ClassVar[str] = "topk"

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of the places in ascending order, uint32[k], and of the bits of bfloat16, uint16[k]."""
        kept = (math.ceil(self.share * math.prod(shape)),)
        return (np.uint32, kept), (np.uint16, kept)

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        arrays = self._empty(values.shape)
        if values.size:
            counts = np.empty(tensor_codecs.NUM_COUNTS, np.int64)
            tensor_codecs.keep_largest(sealed(flat(values)), counts, *arrays)
        return arrays

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        """Returns all numbers. Numbers that were not sent are zero."""
        indices, halves = arrays
        if indices.max(initial=0) >= max(1, num_values):
            raise WireError(f"a message by {self.name}: place {indices.max()} of {num_values} numbers")
        values = np.zeros(num_values, np.float32)
        values[indices] = widened(halves)
        return values


class ErrorFeedback:
    """One stream of gradients, from one net to one part, with error feedback.

    A place has the same meaning in every message. A message is packed from the sum of the gradient and the numbers that
    earlier messages left out. If the step is applied (:meth:`apply`), the numbers that its messages left out are added
    to the next message. If the step is refused (:meth:`discard`), the stream returns to its state before the step, so
    that a refused gradient has no later effect. If a step sends several messages, for example one per micro-batch, each
    continues from the message before.

    A shorter message, for example in an epoch's last batch, uses the first places. The numbers of the remaining places
    wait for a longer message.

    Args:
        left: the initial :attr:`left` of a resumed stream.
    """

    def __init__(self, codec: TopK, left: NDArray[np.float32] | None = None) -> None:
        self.codec = codec
        self._left = np.zeros(0, np.float32) if left is None else left
        self._of_step: NDArray[np.float32] | None = None

    @property
    def left(self) -> NDArray[np.float32]:
        """The numbers that applied steps have left out, float32, with the length of the longest message. Read-only."""
        return self._left

    def pack(self, gradients: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """Packs a message with the stream's codec."""
        numbers = flat(gradients)
        before = self._left if self._of_step is None else self._of_step
        total = np.zeros(max(len(before), len(numbers)), np.float32)
        total[: len(before)] = before
        total[: len(numbers)] += numbers
        arrays = self.codec.pack(total[: len(numbers)])
        indices, halves = arrays
        with np.errstate(invalid="ignore"):  # for infinity minus infinity, in a step that will be refused
            total[indices] -= widened(halves)
        self._of_step = total
        return arrays

    def apply(self) -> None:
        """Keeps the numbers that the step left out, for the next step."""
        if self._of_step is not None:
            self._left, self._of_step = self._of_step, None

    def discard(self) -> None:
        """Returns to the state before the step, because the step was refused."""
        self._of_step = None


ACTIVATIONS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}
)
"""The codecs of activations, by their names in a config."""
GRADIENTS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), TopK())}
)
"""The codecs of gradients, by their names in a config."""
