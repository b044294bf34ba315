"""Gradients as their largest numbers, and what was left out in the next message (HT §4.2).

HT sends the numbers of largest magnitude and compensates the bias by "error correction techniques": error feedback
(Karimireddy et al., ICML 2019, Algorithm 2: p_t = γ g_t + e_t; Δ_t = C(p_t); e_{t+1} = p_t − Δ_t). Here the learning rate γ
is the receiver's, who multiplies what has arrived.

Numbers go as bfloat16: what rounding cuts off is left out like the rest, and comes with a later message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs.codec import Arrays, Shape, expect, flat
from girih.comm.codecs.floats import widened
from girih.errors import WireError
from girih.kernels.cpu import tensor_codecs
from girih.kernels.cpu.arrays import sealed


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends the numbers of largest magnitude of each message with their places, of equal ones the first.

    NaN counts as larger than infinity, and that as larger than any number: where a message has such, one arrives.

    Attributes:
        share: of the numbers of a message, how many are sent, at least one; 0 < share ≤ 1.
    """

    share: float = 0.1

    name: ClassVar[str] = "topk"

    def pack(self, values: NDArray[np.float32]) -> Arrays:
        """See :class:`girih.comm.codecs.Codec`: uint32[k], the places in order; uint16[k], bits of bfloat16."""
        numbers = flat(values)
        num_kept = self._num_kept(len(numbers))
        indices, halves = np.empty(num_kept, np.uint32), np.empty(num_kept, np.uint16)
        if num_kept:
            counts = np.empty(tensor_codecs.NUM_COUNTS, np.int64)
            tensor_codecs.keep_largest(sealed(numbers), counts, indices, halves)
        return indices, halves

    def unpack(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
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

    def pack(self, gradients: NDArray[np.float32]) -> Arrays:
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
