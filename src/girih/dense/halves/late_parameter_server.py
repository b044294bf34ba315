"""The dense half of a trainer that waits for no other, nor for its GPU: it learns loss and refusal a step late.

Where the dense server is, the device moves its parameters, or does not. Elsewhere a thread waits for the gradient and for whether the step is
refused, which a stream of their own brings to the host, and sends the one or nothing, while the trainer goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.pinned import FromDevice
from girih.comm.rpc import Client, Frame, Reply
from girih.dense.halves.late_replica import LateReplica
from girih.dense.halves.parameter_server import STEP, ParameterServer, ParameterServerReplica
from girih.dense.halves.replica import Buffers, Gradients
from girih.dense.spec import DenseSpec


@dataclass(frozen=True)
class _PendingSend:
    """A gradient that is sent once it is on the host, unless its step is refused."""

    sent: Future[Reply | None]

    def done(self) -> bool:
        """See :class:`~girih.dense.halves.parameter_server.Asked`."""
        if not self.sent.done() or self.sent.exception() is not None:
            return self.sent.done()
        reply = self.sent.result()
        return reply is None or reply.done()

    def wait(self) -> Frame | None:
        """See :class:`~girih.dense.halves.parameter_server.Asked`."""
        reply = self.sent.result()
        return None if reply is None else reply.wait()


class LateParameterServerReplica(ParameterServerReplica, LateReplica):
    """A copy of the dense parameters that a dense server moves; see the module, and :class:`ParameterServerReplica`."""

    kind_of_server = LateReplica

    def __init__(
        self, spec: DenseSpec, ranks: TrainerGroup, *, staleness: int, address: str, secret: bytes
    ) -> None:
        super().__init__(spec, ranks, staleness=staleness, address=address, secret=secret)
        self._lane = FromDevice(spec.device)
        self._departures = self._closing.enter_context(ThreadPoolExecutor(1, "girih-dense-gradients"))

    def move_unless(self, refused: Tensor, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """Has the server take a step, after clipping, or leaves all as it was where the flag is set; see :class:`LateReplica`."""
        self.stopped.logical_or_(refused)
        for buffer, before in buffers:
            torch.where(refused, before, buffer, out=buffer)
        if self._server is not None:
            return self._moved_here(self._server, refused, gradients)
        if self._client is not None:
            self._sent_unless(self._client, refused, gradients)
        return self._go_on

    def _moved_here(
        self, server: ParameterServer, refused: Tensor, gradients: Gradients
    ) -> Callable[[], None]:
        half = server.replica
        put_back: list[Callable[[], None]] = []

        def move(parts: Gradients) -> None:
            if isinstance(half, LateReplica):
                put_back.append(half.move_unless(refused, parts, ()))

        flat, version = server.step(*self._flattened(gradients), self._version, move)
        self._take(flat, version)

        def go_on() -> None:
            if server.version == version:  # else the host's numbers are those of steps that others took since
                put_back[0]()
            self._go_on()

        return go_on

    def _sent_unless(self, client: Client, refused: Tensor, gradients: Gradients) -> None:
        gradient, given = self._flattened(gradients)
        coming, version = self._lane.begin([gradient, refused.float().reshape(1)]), self._version

        def send() -> Reply | None:
            with coming.arrived() as (flat, is_refused):
                if flat is None or is_refused is None or is_refused[0]:
                    return None
                own = np.array(flat)
            self.stats_of_process.sent("dense", own.nbytes)
            return client.call(STEP, (version,), (own, given))

        self._under_way.append(_PendingSend(self._departures.submit(send)))
        self._take_arrived(self._staleness)
