"""Copies rows from other processes to the GPU of a dense half, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.pinned import FromDevice, Sent, ToDevice
from girih.comm.rpc import Frame
from girih.telemetry.busy import awaited


class Received(NamedTuple):
    """The reply to a pull.

    Attributes:
        staleness: earlier batches whose gradients were not applied.
        outputs: float32[·] of all outputs.
        bounds: int32[B + 1] of each whole sequence.
    """

    staleness: int
    outputs: Sequence[NDArray[np.float32] | Tensor]
    bounds: Sequence[NDArray[np.int32]]


class Staging:
    """Copies rows from other processes to the GPU of a dense half, and their gradients back.

    One thread waits for rows from embedding workers and copies them to pinned memory. A separate stream copies them to
    the GPU, while the trainer computes earlier batches. Another thread waits for gradients and sends them, while the
    trainer continues. A third stream copies these gradients after the backward pass. Each thread keeps the order of its
    requests.

    Args:
        device: the device of the dense half. On a CPU the work is the same, without streams and without a benefit.
    """

    def __init__(self, device: torch.device) -> None:
        self.to, self.back = ToDevice(device), FromDevice(device)
        self._arrivals = ThreadPoolExecutor(1, "girih-rows")
        self._departures = ThreadPoolExecutor(1, "girih-gradients")

    def bring(self, receive: Callable[[], Received]) -> Callable[[], Received]:
        """Brings rows to the device once they have arrived from a worker.

        The returned function waits until the rows are on their way to the device.

        Args:
            receive: waits for the rows, and returns arrays.
        """
        coming = self._arrivals.submit(self._bring, receive)

        def taken_over() -> Received:
            sent, received = awaited(coming)
            return received._replace(outputs=sent.taken_over())

        return taken_over

    def send(
        self,
        gradients: Sequence[Tensor | None],
        call: Callable[[Sequence[NDArray[Any] | None]], Future[Frame]],
    ) -> Future[Future[Frame]]:
        """Sends gradients once they have come from the device, after its earlier work. Never waits.

        Args:
            call: sends arrays, which it may keep.
        """
        coming = self.back.begin(gradients)

        def depart() -> Future[Frame]:
            with coming.arrived() as arrays:
                copies = [None if array is None else array.copy() for array in arrays]
            return call(copies)

        return self._departures.submit(depart)

    def drop(self, call: Callable[[], Future[Frame]]) -> Future[Future[Frame]]:
        """Sends a notice that there are no gradients, after all earlier gradients."""
        return self._departures.submit(call)

    def close(self) -> None:
        """Ends both threads, once everything that they wait for has arrived or failed."""
        self._arrivals.shutdown()
        self._departures.shutdown()

    def _bring(self, receive: Callable[[], Received]) -> tuple[Sent, Received]:
        received = receive()
        arrays: Any = received.outputs
        return self.to.send(arrays), received._replace(outputs=())
