"""Numbers on their way between a GPU and the wire: pinned memory that is used again, and a stream for each direction.

A copy between pinned memory and a GPU is done beside whatever the GPU computes. So memory is used again only once the
copy that reads it is done, as an event tells, or once whoever reads what has arrived lets go of it.

Where there is no GPU the same code copies at once: streams and events are None.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
_ALIGNED = 64  # numbers: arrays that travel together begin at multiples of 256 bytes


class DeviceEvent(Protocol):
    """A moment in the work of a GPU, as torch has it."""

    def query(self) -> bool:
        """Whether it has come."""


@dataclass(eq=False)
class PinnedBuffer:
    """Memory of the host.

    Attributes:
        numbers: float32[·].
        busy_until: what may still read it; None where nothing does.
        is_taken: whether somebody has it.
    """

    numbers: Tensor
    busy_until: DeviceEvent | None = None
    is_taken: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it may be written."""
        return not self.is_taken and (self.busy_until is None or self.busy_until.query())


class PinnedBuffers:
    """Buffers that are used again; from any thread.

    Args:
        make: makes the memory of one, float32[n].

    Attributes:
        num_made: buffers made so far.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._buffers: list[PinnedBuffer] = []
        self._lock = threading.Lock()
        self.num_made = 0

    def __len__(self) -> int:
        """Buffers that there are."""
        return len(self._buffers)

    def take(self, size: int) -> PinnedBuffer:
        """An idle buffer of at least ``size`` numbers: the smallest one, or else a new one, in place of an idle one that is too small."""
        with self._lock:
            idle = sorted(
                (each for each in self._buffers if each.is_idle), key=lambda each: each.numbers.numel()
            )
            found = next((each for each in idle if each.numbers.numel() >= size), None)
            if found is None:
                if idle:
                    self._buffers.remove(idle[-1])
                found = PinnedBuffer(self._make(1 << max(0, size - 1).bit_length()))
                self._buffers.append(found)
                self.num_made += 1
            found.is_taken = True
            return found

    def give_back(self, buffer: PinnedBuffer, busy_until: DeviceEvent | None = None) -> None:
        """Lets others take it, once an event has come."""
        with self._lock:
            buffer.busy_until, buffer.is_taken = busy_until, False


class _CopyLane:
    """A direction, with its stream and its buffers."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.buffers = PinnedBuffers(lambda size: torch.empty(size, dtype=torch.float32, pin_memory=on_gpu))

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Has what is launched within run on the stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def recorded(self) -> torch.cuda.Event | None:
        """An event that comes when all that the stream was given until now is done."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


@dataclass(frozen=True)
class Sent:
    """Arrays on their way to a device.

    Attributes:
        whole: float32[·], all of them; its memory came from the stream that copies.
        tensors: the arrays, which are parts of it.
        ready: comes when they are there.
    """

    whole: Tensor
    tensors: Sequence[Tensor]
    ready: torch.cuda.Event | None

    def taken_over(self) -> Sequence[Tensor]:
        """The arrays, for which the current stream of the device waits; the host does not."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.whole.device)
            stream.wait_event(self.ready)
            self.whole.record_stream(stream)
        return self.tensors


class ToDevice(_CopyLane):
    """The way from the wire to a device; for one thread."""

    def send(self, arrays: Sequence[Floats]) -> Sent:
        """Copies arrays, float32[...], to the device, all at once; does not wait for it, nor for the arrays' memory any more."""
        places, total = _places([array.size for array in arrays])
        buffer = self.buffers.take(total)
        pinned = buffer.numbers[:total]
        numbers = pinned.numpy()
        for start, array in zip(places, arrays, strict=True):
            np.copyto(numbers[start : start + array.size].reshape(array.shape), array)
        with self.running():
            whole = torch.empty(total, dtype=torch.float32, device=self.device)
            whole.copy_(pinned, non_blocking=True)
        ready = self.recorded()
        self.buffers.give_back(buffer, ready)
        parts = [
            whole[start : start + array.size].view(array.shape)
            for start, array in zip(places, arrays, strict=True)
        ]
        return Sent(whole, parts, ready)


class PendingCopy:
    """Tensors on their way from a device."""

    def __init__(
        self,
        lane: FromDevice,
        buffer: PinnedBuffer,
        arrays: list[Floats | None],
        ready: torch.cuda.Event | None,
    ) -> None:
        self._lane, self._buffer, self._arrays, self._ready = lane, buffer, arrays, ready

    @contextlib.contextmanager
    def arrived(self) -> Iterator[list[Floats | None]]:
        """Waits for them; they are what they are within only, once. From any thread."""
        if self._ready is not None:
            self._ready.synchronize()
        try:
            yield self._arrays
        finally:
            self._lane.buffers.give_back(self._buffer)


class FromDevice(_CopyLane):
    """The way from a device to the wire."""

    def begin(self, tensors: Sequence[Tensor | None]) -> PendingCopy:
        """Begins to copy tensors, float32[...], or None, behind what the current stream has been given; waits for nothing."""
        sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        places, total = _places(sizes)
        buffer = self.buffers.take(total)
        arrays: list[Floats | None] = []
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.running():
            for start, size, tensor in zip(places, sizes, tensors, strict=True):
                if tensor is None:
                    arrays.append(None)
                    continue
                part = buffer.numbers[start : start + size].view(tensor.shape)
                part.copy_(tensor.detach(), non_blocking=True)
                if self.stream is not None:
                    tensor.record_stream(self.stream)
                arrays.append(part.numpy())
        return PendingCopy(self, buffer, arrays, self.recorded())


class Parcels:
    """One array at a time between a device and the wire, which gets memory of its own; for one thread."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._to = None if on_cpu else ToDevice(device)
        self._back = None if on_cpu else FromDevice(device)

    def there(self, array: NDArray[Any]) -> Tensor:
        """An array of the wire, float32[n], on the device, behind which the current stream comes; the host does not wait."""
        if self._to is None:
            return torch.from_numpy(np.array(array))
        return self._to.send([array]).taken_over()[0]

    def back(self, tensor: Tensor) -> Floats:
        """A tensor of the device, float32[n], which nothing else uses, for the wire; the host waits for it."""
        if self._back is None:
            found: Floats = tensor.numpy()
            return found
        with self._back.begin([tensor]).arrived() as (array,):
            return np.array(array)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where arrays of some sizes begin in one that holds all of them, and its size."""
    ends = np.cumsum([_ALIGNED * math.ceil(size / _ALIGNED) for size in sizes]).tolist()
    return [0, *ends][: len(sizes)], (ends[-1] if ends else 0)
