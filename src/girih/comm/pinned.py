"""Copies numbers between a GPU and the wire: pinned memory that is reused, and a stream for each direction.

A copy between pinned memory and a GPU runs while the GPU computes. torch's allocator ensures that memory is reused only
after the copy that reads it. Memory with received numbers is reused after its reader has released it.

Without a GPU, streams and events are None, and the same code copies immediately.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
_ALIGNED = 64  # arrays that are copied together begin at multiples of 64 numbers, which are 256 bytes


class _CopyLane:
    """The copies in one direction, with their stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> Tensor:
        """Returns memory of the host, float32[size]. torch reuses it after the copies in progress are done."""
        return torch.empty(size, dtype=torch.float32, pin_memory=self.stream is not None)

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which kernels and copies run on the lane's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def recorded(self) -> torch.cuda.Event | None:
        """Returns an event that is reached when all earlier work of the stream is done, or None without a GPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


@dataclass(frozen=True)
class Sent:
    """Arrays that are being copied to a device.

    Attributes:
        whole: float32[·], one tensor with all arrays, allocated on the stream that copies.
        tensors: the arrays, as views of ``whole``.
        ready: the event after which the arrays have arrived.
    """

    whole: Tensor
    tensors: Sequence[Tensor]
    ready: torch.cuda.Event | None

    def taken_over(self) -> Sequence[Tensor]:
        """Returns the arrays. The current stream of the device waits for them, but the host does not."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.whole.device)
            stream.wait_event(self.ready)
            self.whole.record_stream(stream)
        return self.tensors


class ToDevice(_CopyLane):
    """Copies arrays from the wire to a device. Only one thread uses this object."""

    def send(self, arrays: Sequence[Floats]) -> Sent:
        """Begins to copy arrays, float32[...], to the device together. On return, the memory of the arrays is free."""
        places, total = _places([array.size for array in arrays])
        pinned = self.pinned(total)
        numbers = pinned.numpy()
        for start, array in zip(places, arrays, strict=True):
            np.copyto(numbers[start : start + array.size].reshape(array.shape), array)
        with self.running():
            whole = torch.empty(total, dtype=torch.float32, device=self.device)
            whole.copy_(pinned, non_blocking=True)
        parts = [
            whole[start : start + array.size].view(array.shape)
            for start, array in zip(places, arrays, strict=True)
        ]
        return Sent(whole, parts, self.recorded())


@dataclass(frozen=True)
class PendingCopy:
    """Tensors that are being copied from a device."""

    arrays: list[Floats | None]
    ready: torch.cuda.Event | None

    @contextlib.contextmanager
    def arrived(self) -> Iterator[list[Floats | None]]:
        """Waits until the arrays have arrived, and yields them. Callable from any thread."""
        if self.ready is not None:
            self.ready.synchronize()
        yield self.arrays


class FromDevice(_CopyLane):
    """Copies tensors from a device to the wire."""

    def begin(self, tensors: Sequence[Tensor | None]) -> PendingCopy:
        """Begins to copy tensors, float32[...] or None, after the earlier work of the current stream. Never waits."""
        sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        places, total = _places(sizes)
        pinned = self.pinned(total)
        arrays: list[Floats | None] = []
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.running():
            for start, size, tensor in zip(places, sizes, tensors, strict=True):
                if tensor is None:
                    arrays.append(None)
                    continue
                part = pinned[start : start + size].view(tensor.shape)
                part.copy_(tensor.detach(), non_blocking=True)
                if self.stream is not None:
                    tensor.record_stream(self.stream)
                arrays.append(part.numpy())
        return PendingCopy(arrays, self.recorded())


class Parcels:
    """Copies one array at a time between a device and separate memory for the wire. Only one thread uses it."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._to = None if on_cpu else ToDevice(device)
        self._back = None if on_cpu else FromDevice(device)

    def there(self, array: NDArray[Any]) -> Tensor:
        """Copies an array of the wire, float32[n], to the device. The current stream waits, but the host does not."""
        if self._to is None:
            return torch.from_numpy(np.array(array))
        return self._to.send([array]).taken_over()[0]

    def back(self, tensor: Tensor) -> Floats:
        """Copies a tensor of the device, float32[n], to the wire's memory. The host waits.

        Nothing else may use the tensor.
        """
        if self._back is None:
            found: Floats = tensor.numpy()
            return found
        with self._back.begin([tensor]).arrived() as (array,):
            return np.array(array)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the places of arrays of some sizes in one array that contains all of them, and the size of this array."""
    ends = np.cumsum([_ALIGNED * math.ceil(size / _ALIGNED) for size in sizes]).tolist()
    return [0, *ends][: len(sizes)], (ends[-1] if ends else 0)
