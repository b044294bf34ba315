"""The dense half of a trainer that waits for no other: a dense server applies each one's gradients as they come.

Persia's asynchronous baseline. The dense server is a thread of rank 0, beside the optimizer that it uses.

Shapes: P numbers of all parameters together, n parameters.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client, Reply, Request, Server, connect, listen
from girih.dense.halves.replica import Gradients, Replica, made_by
from girih.dense.halves.synchronous import nonfinite_gradient
from girih.dense.options import OptimizerFactory
from girih.dense.spec import DenseSpec
from girih.errors import ConfigError, NonFiniteError
from girih.models.embeddings import Embeddings

STEP, NEWEST = 1, 2


class DenseServer:
    """The parameters that count, and the optimizer that moves them; its methods may be called from any thread."""

    def __init__(self, module: nn.Module, optimizer: OptimizerFactory, clip_norm: float | None) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = made_by(optimizer, self.parameters)
        self.version = 0
        self.staleness_max = 0
        self._clip_norm = clip_norm
        self._lock = threading.Lock()

    def step(
        self, gradient: NDArray[np.float32], given: NDArray[np.uint8], version: int
    ) -> tuple[NDArray[np.float32], int]:
        """One optimizer step; returns the parameters after it, float32[P], and their version.

        Args:
            gradient: float32[P]. given: uint8[n], whether each parameter took part in the loss.
            version: of the parameters that it is the gradient of.
        """
        with self._lock:
            self.staleness_max = max(self.staleness_max, self.version - version)
            parts = torch.from_numpy(gradient).split([p.numel() for p in self.parameters])  # type: ignore[no-untyped-call]
            for parameter, part, takes_part in zip(self.parameters, parts, given, strict=True):
                parameter.grad = part.view_as(parameter) if takes_part else None
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
            if self.optimizer is not None:
                self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None
            self.version += 1
            return self._flat(), self.version

    def newest(self) -> tuple[NDArray[np.float32], int]:
        """The parameters, float32[P], and their version."""
        with self._lock:
            return self._flat(), self.version

    def _flat(self) -> NDArray[np.float32]:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters]).numpy()


class ParameterServerReplica(Replica):
    """A copy of the dense parameters that a dense server moves.

    Args:
        staleness: gradients that may be on their way to the server when a batch is computed.
        address: where the server listens, see :func:`girih.comm.rpc.listen`.
        secret: proves that a peer belongs to the run.

    Attributes:
        optimizer: on rank 0 the server's; on the others one that carries the learning rate schedule alone.
    """

    def __init__(
        self, spec: DenseSpec, ranks: TrainerGroup, *, staleness: int, address: str, secret: bytes
    ) -> None:
        super().__init__(spec)
        self._ranks, self._staleness = ranks, staleness
        self._version = 0
        self._under_way: deque[Reply] = deque()
        self._server: DenseServer | None = None
        self._listening: Server | None = None
        self._client: Client | None = None
        self._pool: ThreadPoolExecutor | None = None
        if ranks.first:
            self._server = DenseServer(copy.deepcopy(self.module), spec.optimizer, spec.clip_norm)
            self.optimizer = self._server.optimizer
            if ranks.size > 1:
                self._pool = ThreadPoolExecutor(1, "girih-dense-server")
                self._listening = listen(self._handle, address=address, secret=secret)
        found = ranks.broadcast(None if self._listening is None else self._listening.address)
        if not ranks.first:
            self._client = connect(found, secret=secret)
        self._refresh()

    def move(self, gradients: Gradients) -> None:
        """Sends the gradients; waits where more than ``staleness`` steps are under way."""
        if not self.parameters:
            return
        given = np.array([gradient is not None for gradient in gradients], np.uint8)
        pairs = zip(self.parameters, gradients, strict=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]).numpy()
        if self._server is not None:
            self._take(*self._server.step(flat, given, self._version))
        elif self._client is not None:
            self.stats_of_process.sent("dense", flat.nbytes)
            self._under_way.append(self._client.call(STEP, (self._version,), (flat, given)))
            self._take_arrived(self._staleness)

    def sync(self) -> None:
        """Returns when the server has taken all steps of all trainers, with the newest parameters here."""
        self._take_arrived(0)
        self._ranks.barrier()
        self._refresh()

    def stats(self) -> dict[str, int]:
        """On rank 0: steps of others between a gradient's parameters and its step, at most."""
        return {"staleness_max": 0 if self._server is None else self._server.staleness_max}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Replica`."""
        super().restore(state)
        if self._server is not None:
            self._server.module.load_state_dict(state["model"])

    def close(self) -> None:
        """Ends the server, or leaves it."""
        for part in (self._client, self._listening):
            if part is not None:
                part.close()
        if self._pool is not None:
            self._pool.shutdown()

    def _differentiate(
        self,
        outputs: Tensor,
        mean: Tensor | None,
        value: float,
        share: float,
        embeddings: Embeddings,
        reason: NonFiniteError | None,
    ) -> tuple[float, NonFiniteError | None]:
        """The backward pass; the loss is this trainer's share's, as all shares are about equal."""
        value, reason = super()._differentiate(outputs, mean, value, share, embeddings, reason)
        return value * self._ranks.size, reason or nonfinite_gradient(embeddings)

    def _refresh(self) -> None:
        """Takes the newest parameters."""
        if not self.parameters:
            return
        if self._server is not None:
            self._take(*self._server.newest())
        elif self._client is not None:
            frame = self._client.call(NEWEST).wait()
            self._take(frame.arrays[0], frame.fields[0])

    def _take_arrived(self, most_under_way: int) -> None:
        newest = None
        while self._under_way and (self._under_way[0].done() or len(self._under_way) > most_under_way):
            newest = self._under_way.popleft().wait()
        if newest is not None:
            self._take(newest.arrays[0], newest.fields[0])

    def _take(self, flat: NDArray[np.float32], version: int) -> None:
        parts = torch.from_numpy(np.array(flat)).split([p.numel() for p in self.parameters])  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        self._version = version

    def _handle(self, request: Request) -> None:
        if self._pool is not None:
            self._pool.submit(self._serve, request)

    def _serve(self, request: Request) -> None:
        try:
            server = self._server
            if server is None:
                raise ConfigError("no dense server here")
            if request.frame.kind == STEP:
                gradient, given = (np.array(array) for array in request.frame.arrays)
                flat, version = server.step(gradient, given, request.frame.fields[0])
            else:
                flat, version = server.newest()
            self.stats_of_process.sent("dense", flat.nbytes)
            request.reply((version,), (flat,))
        except Exception as error:
            request.fail(error)
