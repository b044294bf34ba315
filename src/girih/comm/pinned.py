"""Copies numbers between a GPU and the wire: pinned memory that is reused, and a stream for each direction.

A copy between pinned memory and a GPU runs while the GPU computes. So memory is reused only after the copy that reads
it, which torch's allocator ensures. Memory of arrivals is reused when their reader releases it.

Without a GPU the same code copies at once: streams and events are None.
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
_ALIGNED = 64  # numbers: arrays that travel together begin at multiples of 256 bytes


class _CopyLane:
    """One direction, with its stream."""

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
    """Arrays on their way to a device.

    Attributes:
        whole: float32[·], all of them; allocated by the copying stream.
        tensors: the arrays, which are parts of ``whole``.
        ready: the event after which they have arrived.
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
    """The way from the wire to a device; for one thread."""

    def send(self, arrays: Sequence[Floats]) -> Sent:
        """Begins to copy arrays, float32[...], to the device at once. Afterwards their memory is free."""
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
    """Tensors on their way from a device."""

    arrays: list[Floats | None]
    ready: torch.cuda.Event | None

    @contextlib.contextmanager
    def arrived(self) -> Iterator[list[Floats | None]]:
        """Yields the arrays when they have arrived. Callable from any thread."""
        if self.ready is not None:
            self.ready.synchronize()
        yield self.arrays


class FromDevice(_CopyLane):
    """The way from a device to the wire."""

    def begin(self, tensors: Sequence[Tensor | None]) -> PendingCopy:
        """Begins to copy tensors, float32[...] or None, after the current stream's earlier work. Never waits."""
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
    """Moves one array at a time between a device and the wire, which gets separate memory; for one thread."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._to = None if on_cpu else ToDevice(device)
        self._back = None if on_cpu else FromDevice(device)

    def there(self, array: NDArray[Any]) -> Tensor:
        """Returns an array of the wire, float32[n], on the device. The current stream waits; the host does not."""
        if self._to is None:
            return torch.from_numpy(np.array(array))
        return self._to.send([array]).taken_over()[0]

    def back(self, tensor: Tensor) -> Floats:
        """Returns a tensor of the device, float32[n], for the wire. The host waits. Nothing else may use the tensor."""
        if self._back is None:
            found: Floats = tensor.numpy()
            return found
        with self._back.begin([tensor]).arrived() as (array,):
            return np.array(array)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where arrays of some sizes begin in one array that holds all of them, and its size."""
    ends = np.cumsum([_ALIGNED * math.ceil(size / _ALIGNED) for size in sizes]).tolist()
    return [0, *ends][: len(sizes)], (ends[-1] if ends else 0)
