"""The dense half: it owns the parameters.

A half keeps no state about a batch: gradients lie on the handle that :meth:`DenseHalf.compute` returned, so several
batches may be in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from girih.checkpoint.save import SavedParameters
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings


class Computed(Protocol):
    """Loss and gradients of one batch, or of several micro-batches.

    Attributes:
        loss: 0-d, on its device: the step's mean loss, over all trainers.
        refused: 0-d bool, on its device: a loss or gradient of some trainer is NaN or infinite.
    """

    @property
    def loss(self) -> Tensor: ...

    @property
    def refused(self) -> Tensor: ...

    @property
    def reason(self) -> NonFiniteError:
        """Why the step was refused; to be asked only where it was."""
        ...

    def apply(self) -> None:
        """Moves the parameters by these gradients."""
        ...

    def discard(self) -> None:
        """Drops the gradients, and puts back what the forward pass moved."""
        ...


@dataclass(eq=False)
class KnownAtOnce:
    """The loss and the refusal of a step where the host knows them at once, as on a CPU; see :class:`Computed`."""

    value: float
    refusal: NonFiniteError | None

    @property
    def loss(self) -> Tensor:
        """The step's mean loss, float64[]."""
        return torch.tensor(self.value, dtype=torch.float64)

    @property
    def refused(self) -> Tensor:
        """Whether a loss or gradient of some trainer is NaN or infinite, bool[]."""
        return torch.tensor(self.refusal is not None)

    @property
    def reason(self) -> NonFiniteError:
        """Why the step was refused."""
        return self.refusal or NonFiniteError("this step was not refused")


class DenseHalf(SavedParameters, Protocol):
    """Owns the parameters."""

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: Any = None, *, last: bool = True
    ) -> Computed:
        """Forward, loss, backward; the embeddings collect their gradients.

        Args:
            onto: what the micro-batch of the same batch before this one returned: gradients and loss are added to it.
            last: whether no other micro-batch of the batch follows. What the trainers tell each other of a step, they tell
                with the last, once; what an earlier one returns is good for ``onto`` and ``discard`` alone.
        """
        ...

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the parameters as they are."""
        ...

    def sync(self) -> None:
        """Returns when everything that this trainer sent is applied, with the newest parameters here."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counts of this half: ``staleness_max``, the most steps between a gradient's parameters and its step."""
        ...

    def processes(self, *, spans: bool = False) -> Mapping[str, Mapping[str, Any]]:
        """Title of each process behind this half → its ``Stats.snapshot``; empty but on rank 0."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...
