"""A copy of the dense parameters among others: all take a step together, or none of them does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.dense.batch_norm import GlobalBatchNorm
from girih.dense.halves.replica import Replica
from girih.dense.spec import DenseSpec
from girih.errors import ConfigError, NonFiniteError


class SynchronousReplica(Replica):
    """One copy of several, which all start as rank 0's.

    Attributes:
        counts_loss: whether this trainer's loss is added to the step's: else it is another's as well.
    """

    checks_embeddings = True
    counts_loss = True

    def __init__(self, spec: DenseSpec, ranks: TrainerGroup) -> None:
        super().__init__(spec)
        self.ranks = ranks
        if self.device.type == "cuda" and ranks.size > 1:
            _refuse_shared_gpus(ranks, self.device)
        self._global_batch_norm = spec.global_batch_norm
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            ranks.broadcast_tensor(tensor.detach())

    def _normalizing(self, *, counted: bool) -> AbstractContextManager[object]:
        """Around a forward pass of training in which each trainer has other examples, which count or not."""
        if not self._global_batch_norm or self.ranks.size == 1:
            return nullcontext()
        return GlobalBatchNorm(self.ranks, self.stats_of_process, counted=counted)

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """See :class:`Replica`; where nothing is to be learned, others wait for what crosses the wire all the same."""
        if mean is None and outputs.requires_grad and self.ranks.size > 1:
            outputs.backward(torch.zeros_like(outputs))  # type: ignore[no-untyped-call]
        super()._backward(outputs, mean, share)

    def _agree(self, value: float, refusal: NonFiniteError | None) -> tuple[float, NonFiniteError | None]:
        """The loss over all trainers; what one refuses is refused by all."""
        if self.ranks.size == 1:
            return value, refusal
        counted = value if refusal is None and self.counts_loss else 0.0
        total, num_refusing = self.ranks.vote(counted, refusing=refusal is not None)
        if num_refusing:
            refusal = refusal or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
        return total, refusal


def _refuse_shared_gpus(ranks: TrainerGroup, device: torch.device) -> None:
    """Refuses two trainers on one GPU, which NCCL does not connect.

    Raises:
        ConfigError: on all trainers alike.
    """
    own = str(torch.cuda.get_device_properties(device).uuid)
    of_ranks = ranks.broadcast(ranks.gather(own))
    for rank, uuid in enumerate(of_ranks):
        if uuid in of_ranks[:rank]:
            raise ConfigError(
                f"train: device = 'cuda': trainers {of_ranks.index(uuid)} and {rank} would share a GPU; expected one each: set"
                f" strategy.trainers = {len(set(of_ranks))}, or train.device = 'cpu'"
            )
