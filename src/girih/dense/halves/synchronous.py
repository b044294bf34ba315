"""A copy of the dense parameters among others: all take a step together, or none of them does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.dense.halves.replica import Replica
from girih.dense.options import OptimizerFactory
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings


class SynchronousReplica(Replica):
    """Arguments as of :class:`Replica`. Everything starts as rank 0's.

    Args:
        begin_alike: tensors that are rank 0's as well from here on.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        *,
        ranks: TrainerGroup,
        begin_alike: Sequence[Tensor] = (),
        **options: Any,
    ) -> None:
        super().__init__(module, optimizer, **options)
        self.ranks = ranks
        self._embeddings: Embeddings | None = None
        if ranks.size > 1:
            for tensor in (*module.parameters(), *module.buffers(), *begin_alike):
                ranks.broadcast_tensor(tensor.detach())

    @property
    def counts_loss(self) -> bool:
        """Whether the step's loss is the sum of this one's and others': else it is another's."""
        return True

    def forward(self, batch: Batch, embeddings: Embeddings, *, train: bool = True) -> Tensor:
        """As of :class:`Replica`."""
        self._embeddings = embeddings if train else None
        return super().forward(batch, embeddings, train=train)

    def backward(
        self, logits_gradient: Tensor, loss: float = 0.0, refused: NonFiniteError | None = None
    ) -> float:
        """As of :class:`Replica`, on all trainers; what one refuses is refused by all."""
        if self.ranks.size == 1:
            loss = super().backward(logits_gradient, loss, refused)
            self._check_embeddings()
            return loss
        if refused is not None:  # others wait for this one's part of what crosses the wire
            logits_gradient, loss = torch.zeros_like(logits_gradient), 0.0
        try:
            super().backward(logits_gradient, loss)
            self._check_embeddings()
        except NonFiniteError as error:
            refused, loss = refused or error, 0.0
        total, num_refusing = self.ranks.vote(
            loss if self.counts_loss else 0.0, refusing=refused is not None
        )
        if num_refusing:
            raise refused or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
        return total

    def _check_embeddings(self) -> None:
        embeddings, self._embeddings = self._embeddings, None
        if embeddings is not None:
            embeddings.check_gradients()
