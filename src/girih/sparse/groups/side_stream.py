"""Work on a GPU that is done beside whatever else it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from girih.kernels.gpu import jit


class SideStream:
    """A stream of its own on one device, which sees what was done on the device before; none where kernels are interpreted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if jit.INTERPRETED else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[torch.cuda.Event | None]:
        """Runs what is done within on this stream; the event says when it is done, None that it is."""
        if self._stream is None:
            yield None
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield event
            event.record()


def take_over(ready: torch.cuda.Event | None, tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Has the current stream of a device wait for what was done beside it, and memory last until it is done with it too.

    Args:
        ready: as :class:`SideStream` told it; None where there is nothing to wait for.
        tensors: what was made there.
    """
    if ready is None:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
