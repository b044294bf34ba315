"""The dense half of a trainer that does not wait for other trainers. A dense server applies gradients as they arrive.

This is Persia's asynchronous baseline. The dense server is a thread of rank 0. It uses the optimizer and the device of
rank 0. Between GPUs, gradients and parameters go through pinned memory of the host, on separate streams
(:mod:`girih.comm.pinned`).

Shapes: P numbers of all parameters together, n parameters.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.comm.pinned import FromDevice, Parcels
from girih.comm.rpc import Client, Frame, Reply, Request
from girih.comm.service import Service, connect
from girih.dense.half import DenseSpec
from girih.dense.halves.deferred import Gradients
from girih.dense.halves.replica import Replica
from girih.dense.options import spread_over
from girih.errors import WireError
from girih.kernels.cpu.arrays import U8


class ParameterVerb(IntEnum):
    """The requests of other trainers, with the integers and arrays of each request and its reply.

    - STEP: (version,), a gradient float32[P], and uint8[n] that marks the parameters that took part in the loss →
      (version,) and the parameters, float32[P].
    - NEWEST: () → the same reply as STEP.
    """

    STEP = 1
    NEWEST = 2


@dataclass(frozen=True)
class _Sending:
    """A gradient that is sent as soon as it is on the host, unless its step is refused."""

    sent: Future[Reply | None]

    def done(self) -> bool:
        """Returns whether :meth:`wait` returns immediately."""
        if not self.sent.done() or self.sent.exception() is not None:
            return self.sent.done()
        reply = self.sent.result()
        return reply is None or reply.done()

    def wait(self) -> Frame | None:
        """Returns the server's answer, or None if nothing was sent."""
        reply = self.sent.result()
        return None if reply is None else reply.wait()


class ParameterServer(Service):
    """Owns the newest parameters and the optimizer that updates them. Methods may be called from any thread.

    Args:
        address: the address for other trainers.
        secret: proves that a peer belongs to the run.
    """

    verbs = ParameterVerb

    def __init__(self, spec: DenseSpec, *, address: str = "shm://", secret: bytes = b"") -> None:
        self.replica = Replica(spec)
        super().__init__(index=0, address=address, secret=secret, stats=self.replica.stats_of_process)
        self._parcels = Parcels(spec.device)
        self.version = 0
        self.staleness_max = 0
        self._lock = threading.Lock()

    def step(
        self,
        gradient: Tensor,
        participating: U8,
        version: int,
        move: Callable[[Gradients], object] | None = None,
    ) -> tuple[Tensor, int]:
        """Takes one optimizer step. Returns the parameters after the step, float32[P], and their version.

        Args:
            gradient: float32[P], on the device of the parameters.
            participating: uint8[n], 1 for each parameter that took part in the loss.
            version: the version of the parameters with which the gradient was computed.
            move: the function that updates the parameters, by default the replica's own method.
        """
        with self._lock:
            if not 0 <= version <= self.version:
                raise WireError(
                    f"a gradient of version {version} of the parameters; expected 0 to {self.version}"
                )
            self.staleness_max = max(self.staleness_max, self.version - version)
            parts = zip(spread_over(self.replica.parameters, gradient), participating, strict=True)
            (move or self.replica.move)([part if takes_part else None for (_, part), takes_part in parts])
            self.version += 1
            return self._flat(), self.version

    def _check(self, gradient: NDArray[Any], participating: NDArray[Any]) -> None:
        """Refuses arrays that are not a gradient of these parameters."""
        numbers, num_parameters = (
            sum(each.numel() for each in self.replica.parameters),
            len(self.replica.parameters),
        )
        came = [(each.dtype.name, *each.shape) for each in (gradient, participating)]
        if came != [("float32", numbers), ("uint8", num_parameters)]:
            raise WireError(f"{came}; expected a gradient float32[{numbers}] and uint8[{num_parameters}]")

    def newest(self) -> tuple[Tensor, int]:
        """Returns the parameters, float32[P], and their version."""
        with self._lock:
            return self._flat(), self.version

    def on_step(self, request: Request) -> None:
        """See :class:`ParameterVerb`."""
        gradient, participating = request.frame.arrays
        self._check(gradient, participating)
        there = self._parcels.there(gradient)
        self._reply(request, *self.step(there, np.array(participating), request.frame.fields[0]))

    def on_newest(self, request: Request) -> None:
        """See :class:`ParameterVerb`."""
        self._reply(request, *self.newest())

    def _reply(self, request: Request, parameters: Tensor, version: int) -> None:
        flat = self._parcels.back(parameters)
        self.stats.sent("dense", flat.nbytes)
        request.reply((version,), (flat,))

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.replica.parameters])


class ParameterServerReplica(Replica):
    """A copy of the dense parameters that a dense server updates.

    Args:
        staleness: the number of gradients that may be in flight to the server when a batch is computed.
        address: the address at which the server listens, see :func:`girih.comm.service.listen`.
        secret: the secret that proves that a peer belongs to the run.

    Attributes:
        optimizer: on rank 0, the server's optimizer. On other ranks, an optimizer that is only used for the learning
            rate schedule.
    """

    def __init__(
        self, spec: DenseSpec, ranks: TrainerGroup, *, staleness: int, address: str, secret: bytes
    ) -> None:
        super().__init__(spec)
        self._ranks, self._staleness = ranks, staleness
        self._version = 0
        self._parcels = Parcels(spec.device)
        self._under_way: deque[Reply | _Sending] = deque()
        self._server: ParameterServer | None = None  # on rank 0; the other ranks are clients
        self._client: Client | None = None
        self._closing = ExitStack()
        if not self.parameters:
            return
        if ranks.first:
            of_server = replace(spec, module=copy.deepcopy(self.module), compile=False)
            self._server = server = ParameterServer(of_server, address=address, secret=secret)
            self.optimizer = server.replica.optimizer
            if ranks.size > 1:
                ranks.broadcast(server.listen(self._closing))
        else:
            self._client = self._closing.enter_context(connect(ranks.broadcast(None), secret=secret))
        if self.deferred:  # closed before the client, because gradients are sent through the client
            self._lane = FromDevice(spec.device)
            self._departures = self._closing.enter_context(ThreadPoolExecutor(1, "girih-dense-gradients"))
        self._refresh()

    def move(self, gradients: Gradients) -> None:
        """Sends the gradients. Waits if more than ``staleness`` steps are under way."""
        if not self.parameters:
            return
        gradient, participating = self._flattened(gradients)
        if self._server is not None:
            self._set_parameters(*self._server.step(gradient, participating, self._version))
        elif self._client is not None:
            flat = self._parcels.back(gradient)
            self.stats_of_process.sent("dense", flat.nbytes)
            self._under_way.append(
                self._client.call(ParameterVerb.STEP, (self._version,), (flat, participating))
            )
            self._take_arrived(self._staleness)

    def move_masked(self, refused: Tensor, gradients: Gradients) -> Callable[[], None]:
        """Does the same as :meth:`move`, unless a flag on the device is set; see :class:`Replica`."""
        if self._client is not None:
            self._send_masked(self._client, refused, gradients)
        return (lambda: None) if self._server is None else self._moved_here(self._server, refused, gradients)

    def _moved_here(
        self, server: ParameterServer, refused: Tensor, gradients: Gradients
    ) -> Callable[[], None]:
        put_back: list[Callable[[], None]] = []

        def move(parts: Gradients) -> None:
            put_back.append(server.replica.move_masked(refused, parts))

        flat, version = server.step(*self._flattened(gradients), self._version, move)
        self._set_parameters(flat, version)

        def go_on() -> None:
            if server.version == version:  # otherwise other trainers have updated the parameters since
                put_back[0]()

        return go_on

    def _send_masked(self, client: Client, refused: Tensor, gradients: Gradients) -> None:
        gradient, participating = self._flattened(gradients)
        coming, version = self._lane.begin([gradient, refused.float().reshape(1)]), self._version

        def send() -> Reply | None:
            with coming.arrived() as (flat, is_refused):
                if flat is None or is_refused is None or is_refused[0]:
                    return None
                copy = np.array(flat)
            self.stats_of_process.sent("dense", copy.nbytes)
            return client.call(ParameterVerb.STEP, (version,), (copy, participating))

        self._under_way.append(_Sending(self._departures.submit(send)))
        self._take_arrived(self._staleness)

    def _flattened(self, gradients: Gradients) -> tuple[Tensor, U8]:
        """Returns float32[P], and uint8[n] that marks the parameters that took part in the loss."""
        participating = np.array([gradient is not None for gradient in gradients], np.uint8)
        pairs = zip(self.parameters, gradients, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]
        ), participating

    def sync(self) -> None:
        """Waits until the server has taken all steps of all trainers, and this trainer has the newest parameters."""
        self._take_arrived(0)
        self._ranks.barrier()
        self._refresh()

    def stats(self) -> dict[str, int]:
        """Returns on rank 0 the largest number of other steps between a gradient's parameters and its step."""
        return {"staleness_max": 0 if self._server is None else self._server.staleness_max}

    def restore(self, state: DenseState) -> None:
        """See :class:`Replica`."""
        super().restore(state)
        if self._server is not None:
            self._server.replica.module.load_state_dict(state["model"])

    def close(self) -> None:
        """Ends the server on rank 0. Disconnects from it on other ranks."""
        self._closing.close()

    def _refresh(self) -> None:
        """Fetches the newest parameters."""
        if self._server is not None:
            self._set_parameters(*self._server.newest())
        elif self._client is not None:
            self._take_frame(self._client.call(ParameterVerb.NEWEST).wait())

    def _take_arrived(self, most_under_way: int) -> None:
        newest = None
        while self._under_way and (self._under_way[0].done() or len(self._under_way) > most_under_way):
            answer = self._under_way.popleft().wait()
            newest = newest if answer is None else answer
        if newest is not None:
            self._take_frame(newest)

    def _take_frame(self, frame: Frame) -> None:
        self._set_parameters(self._parcels.there(frame.arrays[0]), frame.fields[0])

    def _set_parameters(self, flat: Tensor, version: int) -> None:
        with torch.no_grad():
            for parameter, part in spread_over(self.parameters, flat):
                parameter.copy_(part)
        self._version = version
