"""Codecs of activations and of their gradients between trainers and group servers (HT §4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import WireError
from girih.kernels.cpu import tensor_codecs
from girih.kernels.cpu.arrays import sealed

Shape = tuple[int, ...]


class Codec(Protocol):
    """Packs float32 arrays of any shape, and unpacks them elsewhere.

    A message in which a number is not finite arrives with one that is not, so that the step is refused there too.
    """

    @property
    def name(self) -> str: ...

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """A message, as arrays that a frame carries; they may be views of ``values``."""
        ...

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
        """The array of a message.

        Raises:
            WireError: the arrays are no message of that shape.
        """
        ...

    def packed_bytes(self, shape: Shape) -> int:
        """Bytes of the arrays of a message."""
        ...


def flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """All numbers in C order, float32[n]; a view where that serves."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def expect(name: str, arrays: tuple[NDArray[Any], ...], *expected: tuple[DTypeLike, Shape]) -> None:
    """Refuses what are not arrays of these dtypes and shapes."""
    found = [(array.dtype, array.shape) for array in arrays]
    if found != [(np.dtype(dtype), shape) for dtype, shape in expected]:
        came, wanted = (
            [f"{np.dtype(dtype)}{list(shape)}" for dtype, shape in each] for each in (found, expected)
        )
        raise WireError(f"a message by {name}: {', '.join(came) or 'nothing'}; expected {', '.join(wanted)}")


def rows_of(shape: Shape) -> Shape:
    """R and D: rows of the last dimension, and their numbers; (0, 0) where there are none."""
    num_values, dim = math.prod(shape), shape[-1] if shape else 1
    return (num_values // dim, dim) if num_values else (0, 0)


@dataclass(frozen=True, slots=True)
class Float32:
    """Sends numbers as they are, without a copy."""

    name: ClassVar[str] = "float32"

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`girih.comm.codecs.Codec`: float32[n]."""
        return (flat(values),)

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
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

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`girih.comm.codecs.Codec`: uint16[n], the bits."""
        numbers = flat(values)
        halves = np.empty(len(numbers), np.uint16)
        tensor_codecs.narrow(sealed(numbers), halves)
        return (halves,)

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
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


@dataclass(frozen=True, slots=True)
class Int8:
    """Sends the steps above its row's least number for each number, and step and least number of each row.

    What comes back differs by at most half a step, 1/510 of the row's range, but for float32's own rounding: 10⁻⁴ of a
    step and 2⁻²³ of the row's largest magnitude. The least number of a row is exact; a row whose range is below 2⁻¹⁰⁰
    comes back as it. A row in which a number is not finite, or whose range is beyond float32, comes back as NaN.
    """

    name: ClassVar[str] = "int8"

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`girih.comm.codecs.Codec`: uint8[R, D]; float32[R, 2]: step and least number."""
        num_rows, dim = rows_of(values.shape)
        codes, ranges = np.empty((num_rows, dim), np.uint8), np.empty((num_rows, 2), np.float32)
        if num_rows:
            rows = np.ascontiguousarray(values, np.float32).reshape(num_rows, dim)
            tensor_codecs.quantize_rows(sealed(rows), codes, ranges)
        return codes, ranges

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
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


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends the numbers of largest magnitude of each message with their places, of equal ones the first.

    NaN counts as larger than infinity, and that as larger than any number: where a message has such, one arrives.

    Attributes:
        share: of the numbers of a message, how many are sent, at least one; 0 < share ≤ 1.
    """

    share: float = 0.1

    name: ClassVar[str] = "topk"

    def pack(self, values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """See :class:`girih.comm.codecs.Codec`: uint32[k], the places in order; uint16[k], bits of bfloat16."""
        numbers = flat(values)
        num_kept = self._num_kept(len(numbers))
        indices, halves = np.empty(num_kept, np.uint32), np.empty(num_kept, np.uint16)
        if num_kept:
            counts = np.empty(tensor_codecs.NUM_COUNTS, np.int64)
            tensor_codecs.keep_largest(sealed(numbers), counts, indices, halves)
        return indices, halves

    def unpack(self, arrays: tuple[NDArray[Any], ...], shape: Shape) -> NDArray[np.float32]:
        """See :class:`girih.comm.codecs.Codec`; zeros where nothing was sent."""
        num_values = math.prod(shape)
        kept = (self._num_kept(num_values),)
        expect(self.name, arrays, (np.uint32, kept), (np.uint16, kept))
        indices, halves = arrays
        if indices.max(initial=0) >= max(1, num_values):
            raise WireError(f"a message by {self.name}: place {indices.max()} of {num_values} numbers")
        values = np.zeros(num_values, np.float32)
        values[indices] = widened(halves)
        return values.reshape(shape)

    def packed_bytes(self, shape: Shape) -> int:
        """6k."""
        return 6 * self._num_kept(math.prod(shape))

    def _num_kept(self, num_values: int) -> int:
        return math.ceil(self.share * num_values)


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
