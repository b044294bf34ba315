"""The dense half of one process: a model with its own parameters and optimizer.

Shapes: B examples, T labels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from girih.config.user_code import blame
from girih.data.batch import Batch
from girih.dense.accel import onednn
from girih.dense.accel.malloc import keep_freed_memory
from girih.dense.options import OptimizerFactory
from girih.dense.spec import DenseSpec
from girih.errors import ConfigError, GirihError, NonFiniteError
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.loss import Targets, loss_of

Gradients = list[Tensor | None]
"""The gradient of each parameter, or None where it took no part in the loss."""


class ReplicaComputed:
    """Loss and gradients of one batch; see :class:`girih.dense.half.Computed`."""

    def __init__(
        self,
        half: Replica,
        gradients: Gradients,
        buffers: Sequence[tuple[Tensor, Tensor]],
        loss: float,
        reason: NonFiniteError | None,
    ) -> None:
        self._half = half
        self.gradients, self.buffers = gradients, buffers
        self.value, self.refusal = loss, reason

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

    def apply(self) -> None:
        """One optimizer step."""
        self._half.move(self.gradients)
        self.gradients = []

    def discard(self) -> None:
        """Drops the gradients, and puts back the buffers that the forward pass moved."""
        for buffer, before in self.buffers:
            buffer.copy_(before)
        self.gradients = []


class Replica:
    """One copy of the dense parameters.

    Attributes:
        optimizer: the one that moves the parameters; None where there are none.
    """

    def __init__(self, spec: DenseSpec) -> None:
        self.device, self.stats_of_process = spec.device, spec.stats
        if self.device.type == "cpu":
            keep_freed_memory()
        self.module = spec.module.to(self.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = made_by(spec.optimizer, self.parameters)
        self._loss = loss_of(self.module)
        self._autocast = spec.precision == "bfloat16"
        self._clip_norm = spec.clip_norm
        self._modes: list[tuple[nn.Module, bool]] = []

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: ReplicaComputed | None = None
    ) -> ReplicaComputed:
        """Forward, loss, backward; the embeddings collect their gradients."""
        self._set_mode(True)
        # a refused step must not move running means either
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()] if onto is None else ()
        with self.stats_of_process.spans("forward"):
            outputs = self._outputs(batch, embeddings, train=True)
            targets, share = self._targets(batch)
            mean, value, reason = self._judge(outputs, targets, embeddings)
        with self.stats_of_process.spans("backward"):
            value, reason = self._differentiate(outputs, mean, value * share, share, embeddings, reason)
        computed = ReplicaComputed(self, self._taken_gradients(), buffers, value, reason)
        return computed if onto is None else self._added(onto, computed)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T]."""
        self._set_mode(False)
        return self._outputs(batch, embeddings, train=False).detach()

    def move(self, gradients: Gradients) -> None:
        """One optimizer step, after clipping."""
        if self.optimizer is None:
            return
        self._set_gradients(gradients)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def sync(self) -> None:
        """No-op: nothing is ever in flight, and nobody else moves the parameters."""

    def stats(self) -> dict[str, int]:
        """A copy that moves in its own step is never behind."""
        return {"staleness_max": 0}

    def close(self) -> None:
        """No-op: it holds nothing but memory."""

    def state(self) -> dict[str, Any]:
        """``model`` and ``optimizer`` state dicts, and the optimizer's name."""
        optimizer = self.optimizer.state_dict() if self.optimizer is not None else {}
        return {
            "model": self.module.state_dict(),
            "optimizer": optimizer,
            "optimizer_name": type(self.optimizer).__name__,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`; the optimizer's options stay those it has now.

        Raises:
            ValueError: of another optimizer, or another model's (then a RuntimeError).
        """
        found, expected = state["optimizer_name"], type(self.optimizer).__name__
        if found != expected:
            raise ValueError(f"its dense optimizer is {found}, the configuration's is {expected}")
        self.module.load_state_dict(state["model"])
        if self.optimizer is not None and state["optimizer"]:
            now = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state["optimizer"])
            for group, options in zip(self.optimizer.param_groups, now, strict=True):
                group.update(options)

    def _outputs(self, batch: Batch, embeddings: Embeddings, *, train: bool) -> Tensor:
        """Logits, float32[B, T], checked."""
        numeric = torch.from_numpy(batch.numeric).to(self.device)
        with torch.set_grad_enabled(train), self._arithmetic():
            logits = self._logits_of(numeric, to_device(embeddings, self.device), train=train)
        rows, labels = self._shape(batch, train=train)  # without labels, columns are not known
        if logits.dim() != 2 or len(logits) != rows or labels not in (0, logits.shape[1]):
            raise ConfigError(
                f"{type(self.module).__name__}.forward returned logits of shape {list(logits.shape)}; "
                f"expected {[rows, labels or 1]}: a row per example, a column per label"
            )
        return logits.float()

    def _shape(self, batch: Batch, *, train: bool) -> tuple[int, int]:
        """Examples and labels that the logits are to have."""
        return batch.num_examples, batch.labels.shape[1]

    def _targets(self, batch: Batch) -> tuple[Targets, float]:
        """The targets to compare the logits with, and the weight of their mean loss in that of the step."""
        weights = batch.example_weights
        targets = Targets(
            torch.from_numpy(batch.labels).to(self.device),
            None if weights is None else torch.from_numpy(weights).to(self.device),
        )
        return targets, 1.0 if batch.share is None else batch.share.weight

    def _judge(
        self, outputs: Tensor, targets: Targets, embeddings: Embeddings
    ) -> tuple[Tensor | None, float, NonFiniteError | None]:
        """The mean loss, its value, and why it is refused; None and 0 where there are no examples."""
        if not len(outputs):
            return None, 0.0, None
        mean = self._loss(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim() != 0:
            got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ConfigError(
                f"{type(self.module).__name__}.loss returned {got}; expected the mean loss, a 0-d tensor"
            )
        value = mean.item()
        if math.isfinite(value):
            return mean, value, None
        feature = embeddings.first_nonfinite()
        return (
            None,
            value,
            NonFiniteError(f"the loss is {value}" + (f", and so is feature {feature!r}" if feature else "")),
        )

    def _differentiate(
        self,
        outputs: Tensor,
        mean: Tensor | None,
        value: float,
        share: float,
        embeddings: Embeddings,
        reason: NonFiniteError | None,
    ) -> tuple[float, NonFiniteError | None]:
        """The backward pass; returns the step's loss, and why the step is refused.

        Args:
            mean: the mean loss; None where it is refused, or there are no examples.
            value: this trainer's part of the step's loss; share: the weight of ``mean`` in it.
        """
        if reason is None and mean is not None and mean.requires_grad:
            self._backward(outputs, mean, share)
            reason = self._nonfinite_gradient()
        return value, reason

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """Gradients of ``share`` times the mean loss; of nothing where ``mean`` is None."""
        if mean is None:
            outputs.backward(torch.zeros_like(outputs))  # type: ignore[no-untyped-call]
        else:
            mean.backward(mean.new_tensor(share))  # type: ignore[no-untyped-call]

    def _nonfinite_gradient(self) -> NonFiniteError | None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                    return NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")
        return None

    def _taken_gradients(self) -> Gradients:
        """The parameters' gradients, which are the handle's from here on."""
        gradients: Gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def _set_gradients(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _added(self, onto: ReplicaComputed, computed: ReplicaComputed) -> ReplicaComputed:
        for number, gradient in enumerate(computed.gradients):
            earlier = onto.gradients[number]
            if gradient is not None:
                onto.gradients[number] = gradient if earlier is None else earlier.add_(gradient)
        onto.value += computed.value
        onto.refusal = onto.refusal or computed.refusal
        return onto

    def _arithmetic(self) -> AbstractContextManager[object]:
        if self._autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        if self.device.type == "cpu" and onednn.available():
            return onednn.OneDNNLinear()
        return nullcontext()

    def _call(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Any:
        return self.module(numeric, embeddings)

    def _logits_of(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Tensor:
        kind = type(self.module)
        try:
            logits = self._call(numeric, embeddings, train=train)
        except GirihError:
            raise
        except Exception as error:
            if kind.__module__.startswith("girih."):
                raise
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            raise ConfigError(f"{kind.__name__}.forward failed: {blame(error, file)}") from error
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{kind.__name__}.forward returned a {type(logits).__name__}; expected logits, "
                "a tensor of a row per example and a column per label"
            )
        return logits

    def _set_mode(self, train: bool) -> None:
        """Evaluation puts every module into it; training puts each back to what the user had chosen."""
        if not train and not self._modes:
            self._modes = [(module, module.training) for module in self.module.modules()]
            self.module.eval()
        elif train and self._modes:
            for module, training in self._modes:
                module.training = training
            self._modes = []

    def _clip(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, most)


def made_by(optimizer: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of some parameters; None where there are none.

    Raises:
        ConfigError: what was made is no optimizer.
    """
    made: object = optimizer(parameters) if parameters else None
    if not isinstance(made, torch.optim.Optimizer | None):
        raise ConfigError(f"dense_optimizer made a {type(made).__name__}; expected a torch.optim.Optimizer")
    return made


def to_device(embeddings: Embeddings, device: torch.device) -> Embeddings:
    """The same tensors on a device."""
    if device.type == "cpu":
        return embeddings
    return replace(
        embeddings,
        blocks=tuple(Block(b.features, b.values.to(device)) for b in embeddings.blocks),
        first_order=tuple(Block(b.features, b.values.to(device)) for b in embeddings.first_order),
        sequences={
            k: Jagged(v.values.to(device), v.offsets.to(device)) for k, v in embeddings.sequences.items()
        },
    )
