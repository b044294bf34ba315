"""The codecs of tensors between trainers and group servers in training steps (HT §4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.codecs.tensors import (
    ACTIVATIONS,
    GRADIENTS,
    BFloat16,
    Codec,
    ErrorFeedback,
    Float32,
    Int8,
    TopK,
)
from girih.comm.service import as_text, from_text, writable
from girih.errors import WireError
from girih.kernels.buffers import Take

CODECS: tuple[Codec, ...] = (Float32(), BFloat16(), Int8(), TopK())
"""Codecs, indexed by their numbers in messages. A new codec comes last."""
NUMBERS = {codec.name: number for number, codec in enumerate(CODECS)}
Coder = Codec | ErrorFeedback
Coders = Callable[[int], Coder]
"""Number of a tensor in a message → its coder."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Names of codecs. Evaluation always uses float32, so that it measures the model that is saved.

    Attributes:
        activations: forward: inputs of parts, and their outputs.
        gradients: backward, in both directions.
    """

    activations: str = "float32"
    gradients: str = "float32"

    @property
    def packs(self) -> bool:
        """Returns whether any codec compresses. Its kernels must then be compiled."""
        return (self.activations, self.gradients) != ("float32", "float32")

    def forward(self, *, train: bool) -> Coders:
        """The codec of activations."""
        codec = ACTIVATIONS[self.activations if train else "float32"]
        return lambda number: codec

    def backward(self) -> GradientStreams:
        """Makes new streams for the gradients of one net."""
        return GradientStreams(GRADIENTS[self.gradients])


PLAIN = Wire()
"""The wire that sends everything as float32."""


class GradientStreams:
    """The codecs of the gradients that one net sends.

    If the codec leaves numbers out, each tensor of each part has a separate stream. Except ``of``,
    no method may be called while gradients of the net are being written.
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
        """Notes that the step was applied. The next step will send the numbers that this step left out."""
        for stream in self._streams.values():
            stream.apply()

    def discard(self) -> None:
        """Notes that the step was dropped. Drops the numbers that it left out, and keeps those of earlier steps."""
        for stream in self._streams.values():
            stream.discard()

    def forget(self) -> None:
        """Drops the numbers that earlier steps left out, because they belong to another model."""
        self._streams.clear()

    def left(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        """The numbers that earlier steps left out: part and number of a tensor → float32[n].

        Empty if the codec leaves nothing out.
        """
        return {place: stream.left for place, stream in self._streams.items() if len(stream.left)}

    def put(self, part: str, number: int, left: NDArray[np.float32]) -> None:
        """The inverse of :meth:`left` for one tensor."""
        if isinstance(self._codec, TopK):
            self._streams[part, number] = ErrorFeedback(self._codec, left)


def codec_of(coder: Coder) -> Codec:
    """The codec of a coder."""
    return coder.codec if isinstance(coder, ErrorFeedback) else coder


MOST_DIMS = 8
_NONE = -1
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_CODED = (torch.float32, torch.bfloat16)
_CARRIERS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # unknown to numpy, or to frames


def pack(tensors: Sequence[Tensor | None], take: Take, coders: Coders | None = None) -> list[NDArray[Any]]:
    """Copies tensors into arrays for sending.

    Args:
        take: provides the arrays to fill, for example arrays of a connection, which are sent without another copy.
        coders: the coders of float32 and bfloat16 tensors, used if they make a tensor smaller.

    Raises:
        WireError: a tensor has an unsupported dtype, or more than 8 dims.
    """
    described = np.zeros((len(tensors), 4 + MOST_DIMS), np.int64)
    arrays: list[NDArray[Any]] = [described]
    for number, (row, tensor) in enumerate(zip(described, tensors, strict=True)):
        if tensor is None:
            row[0] = _NONE
            continue
        if tensor.dtype not in _DTYPES or tensor.dim() > MOST_DIMS:
            raise WireError(
                f"a tensor {tensor.dtype}{list(tensor.shape)} cannot be sent to another process; expected at most {MOST_DIMS} dims of"
                f" {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
            )
        codec, packed = _coded(number, tensor.detach(), coders)
        packed = packed or (_filled(tensor.detach(), take),)
        row[:4] = _DTYPES.index(tensor.dtype), codec, len(packed), tensor.dim()
        row[4 : 4 + tensor.dim()] = tensor.shape
        arrays += packed
    return arrays


def unpack(arrays: Sequence[NDArray[Any]]) -> list[Tensor | None]:
    """The inverse of :func:`pack`. The tensors share the memory of the arrays, so no other code may write to it."""
    description, *parts = arrays
    flat = iter(parts)
    tensors: list[Tensor | None] = []
    for number, codec, num_arrays, dims, *lengths in description.tolist():
        if number == _NONE:
            tensors.append(None)
            continue
        dtype, shape = _DTYPES[number], tuple(lengths[:dims])
        packed = tuple(islice(flat, num_arrays))
        if codec:
            tensors.append(torch.from_numpy(CODECS[codec].unpack(packed, shape)).to(dtype))
            continue
        tensor = torch.from_numpy(writable(packed[0]))
        tensors.append((tensor.view(dtype) if dtype in _CARRIERS else tensor).view(shape))
    return tensors


def num_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes of packed tensors."""
    return sum(array.nbytes for array in arrays)


def _coded(number: int, tensor: Tensor, coders: Coders | None) -> tuple[int, tuple[NDArray[Any], ...]]:
    """Returns the number of the codec and its message, or 0 and no message if the tensor is sent without a codec."""
    if coders is None or tensor.dtype not in _CODED:
        return 0, ()
    coder = coders(number)
    codec = codec_of(coder)
    if codec.packed_bytes(tuple(tensor.shape)) >= tensor.nbytes:
        return 0, ()
    return NUMBERS[codec.name], coder.pack(tensor.float().numpy())


def _filled(tensor: Tensor, take: Take) -> NDArray[Any]:
    carried = tensor.view(_CARRIERS.get(tensor.dtype, tensor.dtype))
    array = take(str(carried.dtype).removeprefix("torch."), carried.numel())
    torch.from_numpy(array).view(carried.shape).copy_(carried)
    return array


Entry = tuple[str, str | None, object]
"""Name of a parameter or buffer; None, or a key of the optimizer's state; a tensor or a plain value."""
MOST_ENTRIES = 100
"""The largest number of entries in a frame of STATE, RESTORE, EXTRA_STATE or LOAD_EXTRA_STATE."""
MOST_ENTRY_BYTES = 64 << 20
"""The largest size of a frame in bytes, unless a single tensor is larger."""


def pack_entries(entries: Sequence[Entry], take: Take) -> tuple[int, list[NDArray[Any]]]:
    """Packs the first entries, up to the limits of a frame. Also returns their number."""
    described, tensors, size = [], list[Tensor](), 0
    for name, key, value in entries[:MOST_ENTRIES]:
        if isinstance(value, Tensor):
            if tensors and size + value.nbytes > MOST_ENTRY_BYTES:
                break
            tensors.append(value)
            size += value.nbytes
        is_tensor = isinstance(value, Tensor)
        described.append((name, key, is_tensor, None if is_tensor else value))
    return len(described), [as_text(described), *pack(tensors, take)]


def unpack_entries(arrays: Sequence[NDArray[Any]]) -> list[Entry]:
    """The inverse of :func:`pack_entries`, without the number."""
    described, *packed = arrays
    tensors = iter(unpack(packed))
    entries: list[Entry] = []
    for name, key, is_tensor, value in from_text(described):
        tensor = next(tensors, None) if is_tensor else None
        if is_tensor and tensor is None:
            raise WireError(f"no tensor came with {name!r}; expected the same version of girih on all hosts")
        entries.append((name, key, tensor if is_tensor else value))
    return entries


RANDOM = "random"
"""The name of the entry of EXTRA_STATE that holds the state of the random generator, uint8[]."""


class GroupVerb(IntEnum):
    """Requests, with the integers and arrays of each.

    - FORWARD: (net, batch, call, part, train); needs int8[inputs], packed inputs → (); has int8[outputs], packed
      outputs. ``part`` is the number of a part of the server. ``call`` counts the forward passes of the batch.
      ``needs`` and ``has`` mark the tensors that have gradients.
    - BACKWARD: (net, batch, call); packed gradients of the outputs → (); text, packed gradients of the inputs. The
      text names a parameter whose gradient is not finite, or is null.
    - NORMS: (net, batch) → (); text: the norm of each gradient, by name in the whole model.
    - APPLY: (net, batch); text: the optimizer's current options and the factor for the gradients → (staleness,).
    - DISCARD: (net, batch) → ().
    - STATE: (first entry, with the optimizer's) → (next entry, entries); text, packed tensors.
    - RESTORE: (first frame,); text, packed tensors → ().
    - EXTRA_STATE: (first entry,) → (next entry, entries); text, packed tensors: the state of the random generator, if
      parts draw from it, and the numbers that top-k left out of the gradients for this trainer's nets.
    - LOAD_EXTRA_STATE: text, packed tensors → ().
    - STATS: (with spans) → text of a snapshot. The first server adds snapshots of dense servers by title.
    - BEGIN: () → (): the averaging of groups begins with these parameters.
    - MEET: () → (), once all groups have met: from this meeting to the next, evaluations and STATE use the model of
      all groups.
    - LEAVE: () → (): this trainer makes no step before the next meeting. Rounds of averaging do not wait for a group
      whose trainers have all left.
    """

    FORWARD = 1
    BACKWARD = 2
    APPLY = 3
    DISCARD = 4
    STATE = 5
    RESTORE = 6
    STATS = 7
    BEGIN = 8
    MEET = 9
    LEAVE = 10
    EXTRA_STATE = 11
    LOAD_EXTRA_STATE = 12
    NORMS = 13
