"""Rows from other processes on their way to the GPU of a dense half, and their gradients on the way back.

One thread waits for rows as they come from embedding workers, copies them to pinned memory and has them go to the GPU on a stream of
its own, while the trainer computes the batches before. Another one waits for gradients, which a third stream copies behind the
backward pass, and sends them, while the trainer goes on. Each does what it was asked for in that order.
"""

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
    """The answer to a pull.

    Attributes:
        staleness: earlier batches that were not applied.
        outputs: float32[·] of all outputs.
        bounds: int32[B + 1] of each whole sequence.
    """

    staleness: int
    outputs: Sequence[NDArray[np.float32] | Tensor]
    bounds: Sequence[NDArray[np.int32]]


class Staging:
    """The ways to the GPU of a dense half, for rows from other processes, and back, for their gradients.

    One thread waits for rows from embedding workers and copies them to pinned memory. They go to the GPU on a stream of its own,
    while the trainer computes the batches before. Another thread waits for gradients, which a third stream copies behind the
    backward pass, and sends them, while the trainer goes on. Each thread keeps the order of its requests.

    Args:
        device: of the dense half; on a CPU, where it is of no use, the same is done without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.to, self.back = ToDevice(device), FromDevice(device)
        self._arrivals = ThreadPoolExecutor(1, "girih-rows")
        self._departures = ThreadPoolExecutor(1, "girih-gradients")

    def bring(self, receive: Callable[[], Received]) -> Callable[[], Received]:
        """Has rows brought to the device once they are here; what is returned waits until they are on their way.

        Args:
            receive: waits for them, and gives arrays.
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
        """Has gradients sent once they have come from the device, behind what was computed so far; waits for nothing.

        Args:
            call: sends arrays that are its own.
        """
        coming = self.back.begin(gradients)

        def depart() -> Future[Frame]:
            with coming.arrived() as arrays:
                copies = [None if array is None else array.copy() for array in arrays]
            return call(copies)

        return self._departures.submit(depart)

    def drop(self, call: Callable[[], Future[Frame]]) -> Future[Future[Frame]]:
        """Has word sent, behind the gradients before, that there are none."""
        return self._departures.submit(call)

    def close(self) -> None:
        """Ends both threads; what they wait for has come by then, or has failed."""
        self._arrivals.shutdown()
        self._departures.shutdown()

    def _bring(self, receive: Callable[[], Received]) -> tuple[Sent, Received]:
        received = receive()
        arrays: Any = received.outputs
        return self.to.send(arrays), received._replace(outputs=())
