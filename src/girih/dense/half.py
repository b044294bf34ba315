"""The dense half: it owns the parameters.

A half keeps no state about a batch: gradients lie on the handle that :meth:`DenseHalf.compute` returned, so several
batches may be in flight. The outcome of a step is its loss, or the reason of its refusal. On a GPU the host learns it one step later.
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
    """The facts of a step that is done.

    Attributes:
        loss: its mean loss, over all trainers.
        refused: why nothing was applied, or None.
        counters: those of the sparse half as they were after the step; None where the half is to be asked.
    """

    loss: float
    refused: NonFiniteError | None = None
    counters: Mapping[str, int] | None = None


class _Fetched(NamedTuple):
    """Tensors on the host, by name, there once the event has passed; None: at once."""

    tensors: Mapping[str, Tensor]
    event: Any

    @classmethod
    def of(cls, device: torch.device, **tensors: Tensor) -> Self:
        """Begins to copy tensors of a device, and waits for nothing."""
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
    """The outcome of a step, which may be on its way to the host.

    Args:
        facts: the facts, if the host knows them.
        numbers: else float64[K], on a device.
        read: the K numbers on the host → the facts; asked once, in the order of steps.
        together: trainers ask for it at the same step, since they go on alike: it is not known until they do.
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
        """Whether :meth:`facts` waits for nothing; without a GPU, once it was asked for."""
        event = None if self._fetched is None else self._fetched.event
        if self._facts is not None or event is None or self._together:
            return self._facts is not None
        return bool(event.query())

    def facts(self) -> StepFacts:
        """Waits until they are known."""
        if self._facts is None:
            if self._fetched is None or self._read is None:
                raise LookupError("an outcome is read once")
            if self._fetched.event is not None:
                self._fetched.event.synchronize()
            read, self._read = self._read, None  # lets go of what it held
            self._facts = read(self._fetched.tensors["numbers"].tolist())
        return self._facts


class ScoredSteps:
    """Counts the logits of every training step.

    Attributes:
        scores: what they are counted in.
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
        """Returns when all are counted."""
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
        vote: the vote on the step, as far as this half knows it.
    """

    @property
    def vote(self) -> Vote: ...

    def apply(self, vote: Vote) -> Outcome:
        """Moves the parameters by these gradients. A step that is refused moves nothing, buffers of the forward pass included.

        Args:
            vote: cast by the sparse half.
        """
        ...


class DenseHalf(SavedParameters, Protocol):
    """Owns the parameters.

    Attributes:
        optimizer: the one whose learning rate a schedule moves; None if there is none.
    """

    optimizer: torch.optim.Optimizer | None

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: Any = None, *, last: bool = True
    ) -> Computed:
        """Forward, loss, backward; the embeddings collect their gradients.

        Args:
            onto: what the micro-batch of the same batch before this one returned: gradients and loss are added to it.
            last: whether no other micro-batch of the batch follows. What the trainers tell each other of a step, they tell
                with the last, once; what an earlier one returns is good for ``onto`` alone.
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

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
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
        deferred: the host learns the outcome of a step one step later. Needs ``on_nonfinite`` = "stop", because the number of
            the next update does not depend on it then.
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
        """While entered, this thread's forward passes compute as the specification says."""
        return arithmetic(self.device, precision=self.precision, forward=self.forward)
