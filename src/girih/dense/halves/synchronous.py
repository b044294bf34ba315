"""A copy of the dense parameters among others: all take a step together, or none of them does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.dense.halves.replica import Replica
from girih.dense.spec import DenseSpec
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings


class SynchronousReplica(Replica):
    """One copy of several, which all start as rank 0's.

    Args:
        begin_alike: other tensors that are rank 0's as well from here on.
    """

    def __init__(self, spec: DenseSpec, ranks: TrainerGroup, begin_alike: Sequence[Tensor] = ()) -> None:
        super().__init__(spec)
        self.ranks = ranks
        for tensor in (*self.module.parameters(), *self.module.buffers(), *begin_alike):
            ranks.broadcast_tensor(tensor.detach())

    @property
    def counts_loss(self) -> bool:
        """Whether this trainer's loss is added to the step's: else it is another's as well."""
        return True

    def _differentiate(
        self,
        outputs: Tensor,
        mean: Tensor | None,
        value: float,
        share: float,
        embeddings: Embeddings,
        reason: NonFiniteError | None,
    ) -> tuple[float, NonFiniteError | None]:
        """The backward pass, on all trainers; what one refuses is refused by all."""
        if self.ranks.size == 1:
            value, reason = super()._differentiate(outputs, mean, value, share, embeddings, reason)
            return value, reason or nonfinite_gradient(embeddings)
        if reason is not None:  # others wait for this one's part of what crosses the wire
            mean, value = None, 0.0
        if outputs.requires_grad:
            self._backward(outputs, mean, share)
            reason = reason or self._nonfinite_gradient()
        reason = reason or nonfinite_gradient(embeddings)
        if reason is not None:
            value = 0.0
        total, num_refusing = self.ranks.vote(value if self.counts_loss else 0.0, refusing=reason is not None)
        if num_refusing:
            reason = reason or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
        return total, reason


def nonfinite_gradient(embeddings: Embeddings) -> NonFiniteError | None:
    """A refusal that names a feature whose gradient is NaN or infinite, if there is one."""
    feature = embeddings.first_nonfinite_gradient()
    return (
        None if feature is None else NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite")
    )
