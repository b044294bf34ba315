"""The dense half of one process on a GPU, of which the host learns loss and refusal a step late.

A step that is refused is refused on the device: a flag there keeps rows and parameters where they are, and those of the steps
that were launched before the host learned of it. So no step waits for the GPU.

Shapes: P parameters with a gradient, K groups of tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from girih.data.batch import Batch
from girih.dense.halves.replica import Buffers, Gradients, Replica
from girih.dense.outcome import Late
from girih.dense.spec import DenseSpec
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings

NameOf = Callable[[int, int], str]


class Counts(Protocol):
    """Counters on their way to the host; :class:`girih.sparse.halves.late.LateCounts`."""

    @property
    def numbers(self) -> Tensor: ...

    @property
    def by_name(self) -> Callable[[Sequence[float]], Mapping[str, int]]: ...


class Update(Protocol):
    """The update of a step's rows, which is launched; :class:`girih.sparse.halves.late.LateUpdate`.

    Attributes:
        refused: 0-d bool, on the device: the step moves nothing.
        nonfinite_keys: int32[1] of each of K groups: a key whose gradient is not finite, or -1.
        counts: counters after it, where the device has all of them.
    """

    @property
    def refused(self) -> Tensor: ...

    @property
    def counts(self) -> Counts | None: ...

    @property
    def nonfinite_keys(self) -> Sequence[Tensor]: ...

    @property
    def name_of(self) -> NameOf:
        """(group, key) → name of a feature that has it."""
        ...

    def take_back(self) -> None:
        """Undoes on the host what the step changed there, once the host learns that it was refused."""
        ...


@dataclass(eq=False)
class LateComputed:
    """Loss and gradients of one batch, or of several micro-batches, as far as they are launched.

    Attributes:
        loss: 0-d, on the device.
        refused: 0-d bool, on the device: a loss or gradient is NaN or infinite, or a step before was refused.
        names, largest: P names, and float32[P], the largest absolute value of each gradient.
        embeddings: those of each micro-batch.
    """

    half: LateReplica
    loss: Tensor
    refused: Tensor
    gradients: Gradients
    buffers: Buffers
    names: Sequence[str]
    largest: Tensor
    embeddings: Sequence[Embeddings]

    @property
    def reason(self) -> NonFiniteError:
        """Why the step is refused: waits for the device."""
        numbers = self._told(()).tolist()
        return self._explain(numbers, _NoRows.name_of) or NonFiniteError("this step is not refused")

    def apply(self) -> None:
        """One optimizer step, where nothing here refuses it."""
        self.apply_unless(_NoRows(self.refused))

    def apply_unless(self, rows: Update) -> Late:
        """One optimizer step, which moves nothing where that of the rows does not."""
        told, counts = self._told(rows.nonfinite_keys), rows.counts
        num_own = len(told)
        put_back = self.half.move_unless(rows.refused, self.gradients, self.buffers)
        self.gradients, self.buffers = [], []

        def explain(numbers: Sequence[float]) -> NonFiniteError | None:
            reason = self._explain(numbers[:num_own], rows.name_of)
            if reason is not None:
                put_back()
                rows.take_back()
            return reason

        if counts is None:
            return Late(told, explain)
        by_name = counts.by_name
        return Late(torch.cat([told, counts.numbers]), explain, lambda numbers: by_name(numbers[num_own:]))

    def discard(self) -> None:
        """Drops the gradients, and puts back the buffers that the forward pass moved."""
        for buffer, before in self.buffers:
            buffer.copy_(before)
        self.gradients, self.buffers = [], []

    def _told(self, nonfinite_keys: Sequence[Tensor]) -> Tensor:
        """float64[2 + P + K]: what the host needs to know."""
        parts = (self.loss.reshape(1), self.half.stopped.reshape(1), self.largest, *nonfinite_keys)
        return torch.cat([part.double() for part in parts])

    def _explain(self, numbers: Sequence[float], name_of: NameOf) -> NonFiniteError | None:
        """Why a step that told these numbers was refused; None where it was not."""
        loss, stopped, *rest = numbers
        largest, keys = rest[: len(self.names)], rest[len(self.names) :]
        if stopped:
            return NonFiniteError("a step before it was refused")
        if not math.isfinite(loss):
            features = (part.first_nonfinite() for part in self.embeddings)
            feature = next((each for each in features if each), None)
            named = f", and so is feature {feature!r}" if feature else ""
            return NonFiniteError(f"the loss is {loss}{named}")
        for name, value in zip(self.names, largest, strict=True):
            if not math.isfinite(value):
                return NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")
        for group, key in enumerate(keys):
            if key >= 0:
                return NonFiniteError(
                    f"the gradient of feature {name_of(group, int(key))!r} is NaN or infinite"
                )
        return None


@dataclass(frozen=True)
class _NoRows:
    """No rows beside a step."""

    refused: Tensor
    nonfinite_keys: Sequence[Tensor] = ()
    counts: None = None

    @staticmethod
    def name_of(number: int, key: int) -> str:
        """Never asked."""
        raise LookupError(f"group {number}, key {key}")

    def take_back(self) -> None:
        """No-op."""


class LateReplica(Replica):
    """One copy of the dense parameters, moved by decisions of the device; see the module.

    Attributes:
        stopped: 0-d bool on the device: a step was refused, and the host does not know it yet.
    """

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__(spec)
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        self._begun: set[torch.nn.Parameter] = set()

    def compute(  # type: ignore[override]
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: LateComputed | None = None,
        *,
        last: bool = True,
    ) -> LateComputed:
        """Launches forward, loss and backward; see :class:`Replica`."""
        buffers = self._begin(onto)
        with self._phase("forward"):
            outputs = self._outputs(batch, embeddings, train=True)
            targets, share = self._targets(batch)
            mean = self._mean_loss(outputs, targets) if len(outputs) else outputs.new_zeros(())
        with self._phase("backward"):
            if mean.requires_grad:
                mean.backward(torch.full_like(mean, share))  # type: ignore[no-untyped-call]
            loss = mean.detach().double() * share
            refused = ~torch.isfinite(loss)
            if onto is None:
                refused = refused | self.stopped
            else:
                loss, refused = onto.loss + loss, onto.refused | refused
            gradients = self._taken_gradients()
            largest = _largest(gradients, self.device) if last else loss.new_empty(0)
            refused = refused | ~torch.isfinite(largest).all()
        named = zip(self.named_parameters, gradients, strict=True)
        names = [name for (name, _), gradient in named if gradient is not None] if last else []
        given = [embeddings] if onto is None else [*onto.embeddings, embeddings]
        return LateComputed(self, loss, refused, gradients, buffers, names, largest, given)

    def move_unless(self, refused: Tensor, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """One optimizer step, after clipping, which leaves all as it was where the flag is set.

        Returns:
            What the host is to do once it learns that the flag was set.
        """
        self.stopped.logical_or_(refused)
        for buffer, before in buffers:
            torch.where(refused, before, buffer, out=buffer)
        optimizer = self.optimizer
        if optimizer is None:
            return self._go_on
        learning = {p for p, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None}
        # whose state the optimizer makes in this step; or who knows what it keeps, and where
        if not learning <= self._begun or not _keeps_state_as_torch(optimizer):
            self._begun |= learning
            if not refused:
                self.move(gradients)
            return self._go_on
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # one kernel for the whole step, which reads the flag itself
            scaled: Any = optimizer
            scaled.grad_scale, scaled.found_inf = None, refused.float()
            try:
                self.move(gradients)
            finally:
                del scaled.grad_scale, scaled.found_inf
            return self._go_on
        kept, put_back = self._kept(optimizer)
        self.move(gradients)
        for tensor, before in kept:
            torch.where(refused, before, tensor, out=tensor)

        def go_on() -> None:
            put_back()
            self._go_on()

        return go_on

    def _kept(self, optimizer: torch.optim.Optimizer) -> tuple[Buffers, Callable[[], None]]:
        """Copies of parameters and state on the device; and what puts back the state that the host has."""
        tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        numbers = []
        for state in optimizer.state.values():
            tensors += [each for each in state.values() if isinstance(each, Tensor)]
            numbers.append((state, {k: v for k, v in state.items() if not isinstance(v, Tensor)}))
        kept = [(each, each.clone()) for each in tensors]
        there = self.device.type
        host = [(each, before) for each, before in kept if each.device.type != there]

        def put_back() -> None:
            for state, before in numbers:
                state.update(before)
            for tensor, copy in host:
                tensor.copy_(copy)

        return [pair for pair in kept if pair[0].device.type == there], put_back

    def _go_on(self) -> None:
        """Has steps move parameters again, once the host knows that one was refused."""
        self.stopped.zero_()


def _keeps_state_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that its steps move are parameters and the tensors and numbers of their states."""
    return type(optimizer).__module__.startswith(("torch.optim.", "girih."))


def _largest(gradients: Gradients, device: torch.device) -> Tensor:
    """float32[P]: of each gradient the largest absolute value; NaN where it has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return torch.empty(0, device=device)
    return torch.stack(torch._foreach_norm(given, math.inf))
