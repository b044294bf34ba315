"""The dense half: it owns the parameters.

A half keeps no state about a batch: gradients lie on the handle that :meth:`DenseHalf.compute` returned, so several
batches may be in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from girih.checkpoint.save import SavedParameters
from girih.data.batch import Batch
from girih.dense.options import OptimizerFactory
from girih.dense.outcome import ScoredSteps
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.schema import LabelLoss
from girih.telemetry.stats import Snapshot, Stats


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

    def processes(self, *, spans: bool = False) -> Mapping[str, Snapshot]:
        """Title of each process behind this half → its ``Stats.snapshot``; empty but on rank 0."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A model and how it learns.

    Attributes:
        module: ``forward(numeric, embeddings) -> logits``.
        optimizer: makes the optimizer of the module's parameters; a module without any has none.
        precision: "bfloat16" computes the forward and backward pass under autocast; parameters, their gradients
            and the optimizer stay float32.
        forward: "int8" computes the forward pass of linear layers with 8-bit integers, training and evaluating, on CPUs.
        on_nonfinite: "skip" has trainers agree on every step before one of them moves anything; where the run ends
            at a refused step ("stop"), a half may have them learn of it later.
        clip_norm: the largest norm of all dense gradients together (``clip_grad_norm_``); None clips nothing.
        global_batch_norm: batch norm takes the moments of all trainers' examples of a step, not of each trainer's own.
        compile: torch compiles forward and backward passes of training steps.
        stats: where spans and bytes sent are counted.
        losses: of each label, where the model has no loss of its own; bce for all where it is empty.
        huber_delta: the error from which Huber's loss grows linearly.
        scored: takes the logits of training steps; None where nobody wants them.
    """

    module: nn.Module
    optimizer: OptimizerFactory
    precision: str = "float32"
    forward: Literal["float32", "int8"] = "float32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_nonfinite: Literal["stop", "skip"] = "skip"
    clip_norm: float | None = None
    global_batch_norm: bool = False
    compile: bool = False
    stats: Stats = field(default_factory=Stats)
    losses: tuple[LabelLoss, ...] = ()
    huber_delta: float = 1.0
    scored: ScoredSteps | None = None
