"""The codecs by which training steps write tensors between trainers and group servers (HT §4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs import ACTIVATIONS, GRADIENTS, BFloat16, Codec, ErrorFeedback, Float32, Int8, TopK

CODECS: tuple[Codec, ...] = (Float32(), BFloat16(), Int8(), TopK())
"""By the numbers that messages have for them."""
NUMBERS = {codec.name: number for number, codec in enumerate(CODECS)}
Coder = Codec | ErrorFeedback
Coders = Callable[[int], Coder]
"""Number of a tensor among those of a message → what writes it."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Names of codecs. Evaluation goes as float32, whatever they are: what is measured there is the model that is saved.

    Attributes:
        activations: forward: inputs of parts, and their outputs. gradients: backward, both ways.
    """

    activations: str = "float32"
    gradients: str = "float32"

    @property
    def packs(self) -> bool:
        """Whether anything is sent in fewer bytes, by kernels that want to be compiled."""
        return (self.activations, self.gradients) != ("float32", "float32")

    def forward(self, *, train: bool) -> Coders:
        """The codec of activations."""
        codec = ACTIVATIONS[self.activations if train else "float32"]
        return lambda number: codec

    def backward(self) -> GradientStreams:
        """New streams for the gradients of one net."""
        return GradientStreams(GRADIENTS[self.gradients])


PLAIN = Wire()
"""Everything as float32."""


class GradientStreams:
    """Writes the gradients that one net sends; where that leaves numbers out, each tensor of each part has a stream of its own.

    Methods but ``of`` are called while nothing of the net is being written.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._streams: dict[tuple[str, int], ErrorFeedback] = {}

    def of(self, part: str) -> Coders:
        """The codecs of the tensors of a part."""
        codec = self._codec
        if not isinstance(codec, TopK):
            return lambda number: codec
        return lambda number: self._streams.setdefault((part, number), ErrorFeedback(codec))

    def apply(self) -> None:
        """The step was applied: what it left out comes with the next one."""
        for stream in self._streams.values():
            stream.apply()

    def discard(self) -> None:
        """The step was dropped: what it left out is, what earlier ones left out stays."""
        for stream in self._streams.values():
            stream.discard()

    def forget(self) -> None:
        """Drops what earlier steps left out, which is of another model."""
        self._streams.clear()

    def left(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        """The numbers that earlier steps left out: part and number of a tensor → float32[n]; empty where a codec leaves nothing out."""
        return {place: stream.left for place, stream in self._streams.items() if len(stream.left)}

    def put(self, part: str, number: int, left: NDArray[np.float32]) -> None:
        """The inverse of :meth:`left` for one tensor."""
        if isinstance(self._codec, TopK):
            self._streams[part, number] = ErrorFeedback(self._codec, left)


def codec_of(coder: Coder) -> Codec:
    """The codec of a message."""
    return coder.codec if isinstance(coder, ErrorFeedback) else coder
