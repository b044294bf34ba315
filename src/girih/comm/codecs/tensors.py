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

    If a message has a number that is not finite, the unpacked array has a non-finite number too. So the receiver
    refuses the step as well.
    """

    name: ClassVar[str]

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """Returns dtype and shape of each array of a message."""

    @abstractmethod
    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """Returns a message as arrays that a frame carries. They may be views of ``values``."""

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
        """Returns the numbers of a message whose layout is right, in any shape."""

    def packed_bytes(self, shape: Shape) -> int:
        """Returns the size of a message's arrays in bytes."""
        return sum(np.dtype(dtype).itemsize * math.prod(size) for dtype, size in self.layout(shape))

    def _empty(self, shape: Shape) -> tuple[NDArray[Any], ...]:
        """Returns uninitialized arrays for a message."""
        return tuple(np.empty(size, dtype) for dtype, size in self.layout(shape))


def flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns all numbers in C order, float32[n]; a view if possible."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def rows_of(shape: Shape) -> Shape:
    """Returns R and D: the number of rows of the last dimension, and their length; (0, 0) for an empty array."""
    num_values, dim = math.prod(shape), shape[-1] if shape else 1
    return (num_values // dim, dim) if num_values else (0, 0)


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """Sends numbers unchanged, without a copy."""

    name: ClassVar[str] = "float32"

    def layout(self, shape: Shape) -> Layout:
        """float32[n]."""
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
        """uint16[n]: the bits."""
        return ((np.uint16, (math.prod(shape),)),)

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        arrays = self._empty(values.shape)
        tensor_codecs.narrow(sealed(flat(values)), *arrays)
        return arrays

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        return widened(arrays[0])


def widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Returns the numbers that bits of bfloat16 stand for."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Sends each number as a count of steps above the least number of its row, and each row's step and least number.

    The decoded value differs by at most half a step: 1/510 of the row's range. Float32's rounding adds 10⁻⁴ of a step
    and 2⁻²³ of the row's largest magnitude. The least number of a row is exact. If a row's range is below 2⁻¹⁰⁰, all
    its numbers become the least one. If a row has a number that is not finite, or a range beyond float32, it becomes
    NaN.
    """

    name: ClassVar[str] = "int8"

    def layout(self, shape: Shape) -> Layout:
        """uint8[R, D]; float32[R, 2]: step and least number."""
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
    """Sends the numbers of largest magnitude of each message with their places. Among equal numbers, the first are sent.

    NaN counts as larger than infinity, and infinity as larger than any number. So if a message has NaN or infinity, one
    of them arrives.

    Attributes:
        share: the part of a message's numbers that is sent, at least one number; 0 < share ≤ 1.
    """

    share: float = 0.1

    name: ClassVar[str] = "topk"

    def layout(self, shape: Shape) -> Layout:
        """uint32[k]: the places, in order; uint16[k]: the bits of bfloat16."""
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
        """Returns the numbers, with zeros for those that were not sent."""
        indices, halves = arrays
        if indices.max(initial=0) >= max(1, num_values):
            raise WireError(f"a message by {self.name}: place {indices.max()} of {num_values} numbers")
        values = np.zeros(num_values, np.float32)
        values[indices] = widened(halves)
        return values


class ErrorFeedback:
    """One stream of gradients, from one net to one part. Its numbers mean the same in every message.

    A message carries numbers of the gradient plus what earlier messages left out. The rest follows the outcome of the
    step. After :meth:`apply` it waits for the next message. After :meth:`discard` the stream is as it was before the
    step, so that a refused gradient has no later effect. It keeps what earlier steps left out. If a step sends several
    messages, for example one per micro-batch, each continues from the one before.

    A shorter message, for example that of an epoch's last batch, uses the first of the numbers. The others wait.

    Args:
        left: the initial :attr:`left`, when a stream is resumed.
    """

    def __init__(self, codec: TopK, left: NDArray[np.float32] | None = None) -> None:
        self.codec = codec
        self._left = np.zeros(0, np.float32) if left is None else left
        self._of_step: NDArray[np.float32] | None = None

    @property
    def left(self) -> NDArray[np.float32]:
        """The gradients that applied steps have left out: float32, as long as the longest message. Read-only."""
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
        with np.errstate(invalid="ignore"):  # infinity minus infinity, in a step that will be refused
            total[indices] -= widened(halves)
        self._of_step = total
        return arrays

    def apply(self) -> None:
        """Keeps the numbers that the step left out for the next step."""
        if self._of_step is not None:
            self._left, self._of_step = self._of_step, None

    def discard(self) -> None:
        """Forgets the step."""
        self._of_step = None


ACTIVATIONS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}
)
"""Name in a config → codec of activations."""
GRADIENTS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), TopK())}
)
"""Name in a config → codec of gradients."""
