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
    """Packs float32 arrays of any shape, and unpacks them elsewhere.

    A message in which a number is not finite arrives with one that is not, so that the step is refused there too.
    """

    name: ClassVar[str]

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """Dtype and shape of each array of a message."""

    @abstractmethod
    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """A message, as arrays that a frame carries; they may be views of ``values``."""

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
        """The array of a message.

        Raises:
            WireError: the arrays are no message of that shape.
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
        """The numbers of a message whose layout is right, in any shape."""

    def packed_bytes(self, shape: Shape) -> int:
        """Bytes of the arrays of a message."""
        return sum(np.dtype(dtype).itemsize * math.prod(size) for dtype, size in self.layout(shape))

    def _empty(self, shape: Shape) -> tuple[NDArray[Any], ...]:
        """Arrays for a message."""
        return tuple(np.empty(size, dtype) for dtype, size in self.layout(shape))


def flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """All numbers in C order, float32[n]; a view where that serves."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def rows_of(shape: Shape) -> Shape:
    """R and D: rows of the last dimension, and their numbers; (0, 0) where there are none."""
    num_values, dim = math.prod(shape), shape[-1] if shape else 1
    return (num_values // dim, dim) if num_values else (0, 0)


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """Sends numbers as they are, without a copy."""

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
    """Rounds to the nearest bfloat16, of two the even one, as torch does.

    What comes back differs by at most 2⁻⁸ of itself, or by 2⁻¹³⁴ where that is less. Zeros keep their sign, infinities
    stay, NaN stays NaN; from 2¹²⁸(1 − 2⁻⁹) on a number becomes infinity.
    """

    name: ClassVar[str] = "bfloat16"

    def layout(self, shape: Shape) -> Layout:
        """uint16[n], the bits."""
        return ((np.uint16, (math.prod(shape),)),)

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`Codec`."""
        arrays = self._empty(values.shape)
        tensor_codecs.narrow(sealed(flat(values)), *arrays)
        return arrays

    def _unpack(self, *arrays: NDArray[Any], num_values: int) -> NDArray[np.float32]:
        return widened(arrays[0])


def widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers of bfloat16's bits."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Sends the steps above its row's least number for each number, and step and least number of each row.

    What comes back differs by at most half a step, 1/510 of the row's range, but for float32's own rounding: 10⁻⁴ of a
    step and 2⁻²³ of the row's largest magnitude. The least number of a row is exact; a row whose range is below 2⁻¹⁰⁰
    comes back as it. A row in which a number is not finite, or whose range is beyond float32, comes back as NaN.
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
        with np.errstate(over="ignore"):  # beside the largest float32
            values *= ranges[:, :1]
            values += ranges[:, 1:]
        return values


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """Sends the numbers of largest magnitude of each message with their places, of equal ones the first.

    NaN counts as larger than infinity, and that as larger than any number: where a message has such, one arrives.

    Attributes:
        share: of the numbers of a message, how many are sent, at least one; 0 < share ≤ 1.
    """

    share: float = 0.1

    name: ClassVar[str] = "topk"

    def layout(self, shape: Shape) -> Layout:
        """uint32[k], the places in order; uint16[k], bits of bfloat16."""
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
        """Zeros where nothing was sent."""
        indices, halves = arrays
        if indices.max(initial=0) >= max(1, num_values):
            raise WireError(f"a message by {self.name}: place {indices.max()} of {num_values} numbers")
        values = np.zeros(num_values, np.float32)
        values[indices] = widened(halves)
        return values


class ErrorFeedback:
    """One stream of gradients: a net's to one part, whose numbers mean the same from message to message.

    A message holds numbers of the gradient and of what was left out before. What becomes of the rest follows the step:
    after :meth:`apply` it waits for the next message, after :meth:`discard` the stream is as it was before the step, so
    that a refused gradient moves nothing later either. What earlier steps left out stays. Several messages of a step,
    as of micro-batches, build on each other.

    A shorter message, as that of an epoch's last batch, takes part with the first of the numbers; the rest of them wait.

    Args:
        left: see :attr:`left`, of a stream that goes on.
    """

    def __init__(self, codec: TopK, left: NDArray[np.float32] | None = None) -> None:
        self.codec = codec
        self._left = np.zeros(0, np.float32) if left is None else left
        self._of_step: NDArray[np.float32] | None = None

    @property
    def left(self) -> NDArray[np.float32]:
        """The gradients that applied steps have left out, float32 of the longest message's length; not to be written."""
        return self._left

    def pack(self, gradients: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """A message by the stream's codec."""
        numbers = flat(gradients)
        before = self._left if self._of_step is None else self._of_step
        total = np.zeros(max(len(before), len(numbers)), np.float32)
        total[: len(before)] = before
        total[: len(numbers)] += numbers
        arrays = self.codec.pack(total[: len(numbers)])
        indices, halves = arrays
        with np.errstate(invalid="ignore"):  # infinity less itself, in a step that will be refused
            total[indices] -= widened(halves)
        self._of_step = total
        return arrays

    def apply(self) -> None:
        """Keeps what the step has left out for the next one."""
        if self._of_step is not None:
            self._left, self._of_step = self._of_step, None

    def discard(self) -> None:
        """Forgets the step."""
        self._of_step = None


ACTIVATIONS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}
)
"""Name in a config → codec of what goes forward."""
GRADIENTS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), TopK())}
)
"""Name in a config → codec of what goes backward."""
