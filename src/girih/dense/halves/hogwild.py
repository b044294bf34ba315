"""The dense half of a trainer of which several nets train at once, and which averages with others in the background (HT §2.2).

Shapes: P numbers of all parameters together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client
from girih.data.batch import Batch
from girih.dense.averaging.buffers import average_buffers
from girih.dense.averaging.shadow import Shadow, check_averaged
from girih.dense.halves.nets import NetComputed, Nets
from girih.dense.halves.replica import Replica
from girih.dense.spec import DenseSpec
from girih.models.embeddings import Embeddings


class HogwildReplica:
    """One copy of the dense parameters, for each trainer; all begin as rank 0's.

    What is evaluated and saved is the copy itself where there is one. Of several it is what :meth:`sync` brought last: the
    parameters as the averaging algorithm has them, and the mean of the replicas' buffers. The replicas keep their own.

    Args:
        nets: threads that will compute on the copy.
        servers: those that average the copies; none where there is one copy.
        average_every_steps: steps of this trainer from one round to the next.

    Attributes:
        module: the one that is evaluated and saved.
        optimizer: the one that a schedule moves; the nets follow it. None where there are no parameters.
    """

    def __init__(
        self,
        spec: DenseSpec,
        ranks: TrainerGroup,
        *,
        nets: int,
        servers: Sequence[Client] = (),
        average_every_steps: int = 1,
    ) -> None:
        self._ranks = ranks
        self.module = spec.module
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            ranks.broadcast_tensor(tensor.detach())
        self._shadow: Shadow | None = None
        live = copy.deepcopy(self.module) if servers else self.module
        self._nets = Nets(replace(spec, module=live), nets, self._stepped)
        self._evaluated: Replica = Replica(spec) if servers else self._nets.first
        self.optimizer = self._nets.first.optimizer
        if servers:
            check_averaged(self._nets.first.named_parameters)
            parameters = self._nets.first.parameters
            self._shadow = Shadow(parameters, servers, ranks.rank, average_every_steps, spec.stats)
            self._begin_averaging(self._shadow)

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: NetComputed | None = None, *, last: bool = True
    ) -> NetComputed:
        """Forward, loss, backward, in any thread; see :class:`~girih.dense.halves.nets.Nets`."""
        return self._nets.compute(batch, embeddings, onto, last=last)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the model that is evaluated."""
        return self._evaluated.predict(batch, embeddings)

    def sync(self) -> None:
        """Brings the model of all replicas here, where there are several; no round is under way until the next step."""
        if self._shadow is None:
            return
        model = torch.from_numpy(self._shadow.meet()[0])
        parameters = self._evaluated.parameters
        with torch.no_grad():
            sizes = [each.numel() for each in parameters]
            for parameter, part in zip(parameters, model.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                parameter.copy_(part.view_as(parameter))
            for buffer, live in zip(self.module.buffers(), self._nets.first.module.buffers(), strict=True):
                buffer.copy_(live)
            average_buffers(self.module.buffers(), self._ranks)

    def leave(self) -> None:
        """Says that this trainer makes no step before the next :meth:`sync`, so that no round waits for it."""
        if self._shadow is not None:
            self._shadow.leave()

    def stats(self) -> dict[str, int]:
        """Writes of other nets between a net's read of the parameters and its write, at most."""
        return {"staleness_max": self._nets.staleness_max()}

    def processes(self, *, spans: bool = False) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of the dense servers; empty but on rank 0."""
        if self._shadow is None or not self._ranks.first:
            return {}
        return self._shadow.processes(spans=spans)

    def state(self) -> dict[str, Any]:
        """The state of the model that is evaluated, with this replica's optimizer; see :class:`~girih.dense.halves.replica.Replica`."""
        return {**self._nets.first.state(), "model": self.module.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`, for every replica and the servers; all trainers call it together."""
        if self._shadow is not None:
            self._shadow.meet()  # so that nothing is added to what is put here
        self._nets.restore(state)
        if self._shadow is not None:
            self.module.load_state_dict(state["model"])
            self._begin_averaging(self._shadow)

    def close(self) -> None:
        """Ends the averaging."""
        if self._shadow is not None:
            self._shadow.close()

    def _stepped(self) -> None:
        if self._shadow is not None:
            self._shadow.stepped()

    def _begin_averaging(self, shadow: Shadow) -> None:
        if self._ranks.first:
            shadow.begin()
        self._ranks.barrier()
