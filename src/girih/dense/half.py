"""The dense half: it owns the parameters.

A half keeps no state about a batch. :meth:`DenseHalf.compute` returns a handle that holds the gradients, so several
batches may be in flight. The outcome of a step is its loss, or the reason of its refusal. On a GPU, the host learns
the outcome one step later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from girih.checkpoint.save import SavedParameters
from girih.comm.group.trainers import Numbers, Vote
from girih.data.batch import Batch
from girih.dense.accel.arithmetic import arithmetic
from girih.dense.options import OptimizerFactory
from girih.errors import NonFiniteError
from girih.metrics.progressive import ProgressiveScores
from girih.models.embeddings import Embeddings
from girih.models.loss import Targets
from girih.schema import LabelLoss
from girih.telemetry.stats import Stats, StatsSnapshot


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of a finished step.

    Attributes:
        loss: the mean loss over all trainers.
        refused: why nothing was applied, or None.
        counters: the counters of the sparse half after the step; None if the caller must ask the sparse half.
    """

    loss: float
    refused: NonFiniteError | None = None
    counters: Mapping[str, int] | None = None


class _Fetched(NamedTuple):
    """Tensors on the host, by name. They are valid after the event, or at once if the event is None."""

    tensors: Mapping[str, Tensor]
    event: Any

    @classmethod
    def of(cls, device: torch.device, **tensors: Tensor) -> Self:
        """Starts copying tensors of a device to the host, without waiting."""
        if device.type == "cpu":
            return cls(tensors, None)
        copies = {
            name: torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for name, each in tensors.items()
        }
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(copies, event)


class Outcome:
    """The outcome of a step, which may still be on its way to the host.

    Args:
        facts: the facts, if the host knows them.
        numbers: otherwise float64[K], on a device.
        read: makes the facts from the K numbers on the host; called once, in the order of steps.
        together: trainers ask for the outcome at the same step, because they must take the same decision. It counts as
            unknown until then.
    """

    def __init__(
        self,
        facts: StepFacts | None,
        numbers: Tensor | None = None,
        read: Callable[[Numbers], StepFacts] | None = None,
        *,
        together: bool = False,
    ) -> None:
        self._facts, self._read, self._together = facts, read, together
        self._fetched = None if numbers is None else _Fetched.of(numbers.device, numbers=numbers)

    def known(self) -> bool:
        """Returns whether :meth:`facts` returns without waiting. Without a GPU: whether it was called before."""
        event = None if self._fetched is None else self._fetched.event
        if self._facts is not None or event is None or self._together:
            return self._facts is not None
        return bool(event.query())

    def facts(self) -> StepFacts:
        """Waits for the facts and returns them."""
        if self._facts is None:
            if self._fetched is None or self._read is None:
                raise LookupError("an outcome is read once")
            if self._fetched.event is not None:
                self._fetched.event.synchronize()
            read, self._read = self._read, None  # releases what the function refers to
            self._facts = read(self._fetched.tensors["numbers"].tolist())
        return self._facts


class ScoredSteps:
    """Counts the logits of every training step.

    Attributes:
        scores: the scores that receive the logits.
    """

    def __init__(self, scores: ProgressiveScores) -> None:
        self.scores = scores
        self._lock = threading.Lock()
        self._under_way: deque[_Fetched] = deque()

    def add(self, outputs: Tensor, targets: Targets) -> None:
        """Adds B examples: logits [B, T], on any device."""
        columns = {
            "logits": outputs.detach().float(),
            "labels": targets.labels,
            "weights": targets.example_weights,
            "label_weights": targets.label_weights,
        }
        tensors = {name: each for name, each in columns.items() if each is not None}
        if outputs.device.type == "cpu":
            self._count(tensors)
            return
        with self._lock:
            self._under_way.append(_Fetched.of(outputs.device, **tensors))
            while self._under_way[0].event.query():
                self._count(self._under_way.popleft().tensors)
                if not self._under_way:
                    return

    def settle(self) -> None:
        """Returns when all logits are counted."""
        with self._lock:
            while self._under_way:
                fetched = self._under_way.popleft()
                fetched.event.synchronize()
                self._count(fetched.tensors)

    def _count(self, tensors: Mapping[str, Tensor]) -> None:
        if len(tensors["logits"]):
            self.scores.add(**{name: each.numpy() for name, each in tensors.items()})


class Computed(Protocol):
    """Loss and gradients of one batch, or of several micro-batches.

    Attributes:
        vote: this half's vote on the step.
    """

    @property
    def vote(self) -> Vote: ...

    def add(self, batch: Batch, embeddings: Embeddings, *, last: bool) -> Computed:
        """Runs the passes for the next micro-batch of the same batch; see :meth:`DenseHalf.compute`.

        Returns:
            The summed loss and gradients. They replace this object.
        """
        ...

    def apply(self, vote: Vote) -> Outcome:
        """Moves the parameters by these gradients. A refused step moves neither parameters nor buffers.

        Args:
            vote: the vote of the sparse half.
        """
        ...


class DenseHalf(SavedParameters, Protocol):
    """Owns the parameters.

    Attributes:
        optimizer: the optimizer whose learning rate a schedule changes; None if there is none.
    """

    optimizer: torch.optim.Optimizer | None

    def compute(self, batch: Batch, embeddings: Embeddings, *, last: bool = True) -> Computed:
        """Runs forward pass, loss and backward pass. The embeddings collect their gradients.

        Args:
            last: whether this is the last micro-batch of the batch. Trainers communicate about a step once, with its
                last micro-batch. To the result for an earlier micro-batch, the next one must be added.
        """
        ...

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T], of the current parameters."""
        ...

    def sync(self) -> None:
        """Returns when everything that this trainer sent is applied and it has the newest parameters."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counts of this half: ``staleness_max``, the most steps between a gradient's parameters and its step."""
        ...

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Maps the title of each process behind this half to its ``Stats.snapshot``. Empty except on rank 0."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A model and its training options.

    Attributes:
        module: ``forward(numeric, embeddings) -> logits``.
        optimizer: makes the optimizer of the module's parameters; a module without parameters has no optimizer.
        precision: "bfloat16" computes the forward and backward pass under autocast; parameters, their gradients and
            the optimizer stay float32.
        forward: "int8" computes the forward pass of linear layers with 8-bit integers, in training and evaluation, on
            CPUs.
        on_nonfinite: with "skip", trainers agree on every step before any trainer moves anything. With "stop", the run
            ends at a refused step, and trainers may learn of the refusal later.
        clip_norm: the largest norm of all dense gradients together (``clip_grad_norm_``); None disables clipping.
        global_batch_norm: batch norm uses the moments of all trainers' examples of a step, not of each trainer alone.
        compile: torch compiles forward and backward passes of training steps.
        stats: counts spans and bytes sent.
        losses: the loss of each label, for models without a loss method; empty means bce for all labels.
        huber_delta: the error from which Huber's loss grows linearly.
        scored: receives the logits of training steps; None if they are not needed.
        deferred: the host learns the outcome of a step one step later. Needs ``on_nonfinite`` = "stop", because then
            the number of the next update does not depend on the outcome.
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
    deferred: bool = False

    def arithmetic(self) -> AbstractContextManager[object]:
        """While entered, this thread's forward passes use the specified arithmetic."""
        return arithmetic(self.device, precision=self.precision, forward=self.forward)
