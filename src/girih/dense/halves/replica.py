"""The dense half of one process: a model with its own parameters and optimizer.

Shapes: B examples, T labels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.checkpoint.save import DenseState
from girih.config.user_code import blame
from girih.data.batch import Batch, label_scale
from girih.dense.accel.arithmetic import arithmetic
from girih.dense.accel.compiled import CompiledModel
from girih.dense.accel.process_settings import keep_freed_memory
from girih.dense.half import DenseSpec, KnownAtOnce
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError, GirihError, NonFiniteError, kind_of
from girih.models.embeddings import Embeddings, Jagged
from girih.models.loss import Targets, is_over_batch, loss_of
from girih.telemetry.stats import StatsSnapshot

Gradients = list[Tensor | None]
"""The gradient of each parameter, or None where it took no part in the loss."""
Buffers = Sequence[tuple[Tensor, Tensor]]
"""A model's buffers, each with a copy of what it was before a batch."""


class Begun(Protocol):
    """Gradients and buffers as earlier micro-batches of a batch have left them."""

    @property
    def gradients(self) -> Gradients: ...

    @property
    def buffers(self) -> Buffers: ...


@dataclass(eq=False)
class ReplicaComputed(KnownAtOnce):
    """Loss and gradients of one batch, or of several micro-batches.

    Attributes:
        buffers: those of the model, as they were before the batch.
    """

    half: Replica
    gradients: Gradients
    buffers: Buffers

    def apply(self) -> None:
        """One optimizer step."""
        self.half.move(self.gradients)
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
        checks_embeddings: whether their gradients are looked at here, because what the sparse half finds comes too late.
    """

    checks_embeddings: ClassVar[bool] = False

    def __init__(self, spec: DenseSpec) -> None:
        self.device, self.stats_of_process = spec.device, spec.stats
        if self.device.type == "cpu":
            keep_freed_memory()
        self.module = spec.module.to(self.device)
        self._kind: type[nn.Module] = type(spec.module)  # that errors name
        self.named_parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named_parameters]
        self.optimizer = made_by(spec.optimizer, self.parameters)
        self._compiled: CompiledModel | None = None
        if spec.compile:
            self._compiled = CompiledModel(self.module, replays=self.device.type == "cuda")
        self._loss = loss_of(self.module)
        self._precision, self._forward = spec.precision, spec.forward
        self._clip_norm, self._scored = spec.clip_norm, spec.scored
        self._label_losses, self._huber_delta = spec.losses, spec.huber_delta
        self._to_logits: Callable[[Tensor], Tensor] | None = getattr(self.module, "logits", None)
        self._loss_features = _places(self.module)
        # a loss over the whole batch is each trainer's part of the step's, and needs all trainers in it
        self.whole_batch = is_over_batch(self.module)
        self._modes: list[tuple[nn.Module, bool]] = []

    def compute(
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: ReplicaComputed | None = None,
        *,
        last: bool = True,
    ) -> ReplicaComputed:
        """Forward, loss, backward; the embeddings collect their gradients, and parameters those of all micro-batches."""
        buffers = self._begin_step(onto)
        with self._phase("forward"):
            outputs = self._outputs(batch, embeddings, train=True)
            targets, share = self._targets(batch)
            self._score(outputs, targets)
            mean, value, refusal = self._judge(outputs, targets, embeddings)
        with self._phase("backward"):
            self._backward(outputs, mean, share)
            # asked even where the loss is refused: the trainers may talk to each other in it
            feature = self._nonfinite_gradient(embeddings)
            value, refusal = value * share, refusal or feature
            if onto is not None:
                value, refusal = onto.value + value, onto.refusal or refusal
            if last:
                value, refusal = self._agree(value, refusal)
        return ReplicaComputed(value, refusal, self, self._taken_gradients(), buffers)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, T]."""
        return self.logits(self.outputs(batch, embeddings))

    def outputs(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """The model's outputs, float32[B, ...], which are its logits unless it has a method ``logits(outputs)``."""
        self._set_mode(False)
        return self._outputs(batch, embeddings, train=False).detach()

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits, float32[B, T], of the model's outputs."""
        return outputs if self._to_logits is None else self._to_logits(outputs)

    def move(self, gradients: Gradients) -> None:
        """One optimizer step, after clipping."""
        if self.optimizer is None:
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def sync(self) -> None:
        """No-op: nothing is ever in flight, and nobody else moves the parameters."""

    def stats(self) -> dict[str, int]:
        """A copy that moves in its own step is never behind."""
        return {"staleness_max": 0}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Empty: there is this process alone."""
        return {}

    def close(self) -> None:
        """No-op: it holds nothing but memory."""

    def state(self) -> DenseState:
        """``model`` and ``optimizer`` state dicts, and the optimizer's name."""
        return {
            "model": self.module.state_dict(),
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
        }

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`; the optimizer's options stay those it has now.

        Raises:
            ValueError: of another optimizer, or another model's (then a RuntimeError).
        """
        saved_name, expected = state["optimizer_name"], type(self.optimizer).__name__
        if saved_name != expected:
            raise ValueError(f"its dense optimizer is {saved_name}, the configuration's is {expected}")
        self.module.load_state_dict(state["model"])
        if self.optimizer is not None and state["optimizer"]:
            now = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            saved = state["optimizer"]
            groups = saved["param_groups"]
            if len(groups) == len(now):
                # by these goes, while loading, whether updates are counted on the device
                kinds = [{k: own[k] for k in ("fused", "capturable") if k in own} for own in now]
                groups = [group | kind for group, kind in zip(groups, kinds, strict=True)]
            self.optimizer.load_state_dict({**saved, "param_groups": groups})
            for group, options in zip(self.optimizer.param_groups, now, strict=True):
                group.update(options)

    def _begin_step(self, onto: Begun | None) -> Buffers:
        """Gives parameters the gradients of earlier micro-batches; returns the buffers as they were before the batch."""
        self._set_mode(True)
        earlier: Gradients = [None] * len(self.parameters) if onto is None else onto.gradients
        for parameter, gradient in zip(self.parameters, earlier, strict=True):
            parameter.grad = (
                gradient  # else that of a step that an error broke off, or of a loop of the user's
            )
        if onto is None:  # a refused step must not move running means either
            return [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        return onto.buffers

    def _outputs(self, batch: Batch, embeddings: Embeddings, *, train: bool) -> Tensor:
        """The model's outputs, float32[B, T] where they are logits, checked."""
        numeric = moved(batch.numeric, self.device)
        with torch.set_grad_enabled(train), self._arithmetic(train=train):
            logits = self._logits_of(numeric, to_device(embeddings, self.device), train=train)
        rows = self._num_outputs(batch.num_examples, train=train)
        labels = batch.labels.shape[1]  # without labels, columns are not known
        if (
            logits.dim() != 2
            or len(logits) != rows
            or (labels not in (0, logits.shape[1]) and self._to_logits is None)
        ):
            raise ConfigError(
                f"{self._kind.__name__}.forward returned logits of shape {list(logits.shape)}; "
                f"expected {[rows, labels or 1]}: a row per example, a column per label"
            )
        return logits.float()

    def _num_outputs(self, num_examples: int, *, train: bool) -> int:
        """Examples of a batch that this trainer computes logits of."""
        return num_examples

    def _targets(self, batch: Batch) -> tuple[Targets, float]:
        """The targets to compare the logits with, and the weight of their mean loss in that of the step."""
        weights, of_labels, scale = (
            None if each is None else moved(each, self.device)
            for each in (batch.example_weights, batch.label_weights, label_scale(batch))
        )
        labels = moved(batch.labels, self.device)
        targets = Targets(labels, weights, of_labels, scale, self._label_losses, self._huber_delta)
        if self.whole_batch:
            return self._over_batch(targets, batch), 1.0
        return targets, 1.0 if batch.share is None else batch.share.weight

    def _over_batch(self, targets: Targets, batch: Batch) -> Targets:
        """The targets for a loss over the whole batch, with the ids that it reads."""
        ids = {name: batch.first_ids(place) for name, place in self._loss_features.items()}
        return targets._replace(
            ids={name: torch.from_numpy(each).to(self.device) for name, each in ids.items()}
        )

    def _score(self, outputs: Tensor, targets: Targets) -> None:
        """Has the logits of a step counted, where somebody wants them."""
        if self._scored is not None:
            self._scored.add(self.logits(outputs.detach()), targets)

    def _judge(
        self, outputs: Tensor, targets: Targets, embeddings: Embeddings
    ) -> tuple[Tensor | None, float, NonFiniteError | None]:
        """The mean loss, its value, and why it is refused; None and 0 where there are no examples."""
        if not self._has_loss(outputs):
            return None, 0.0, None
        mean = self._mean_loss(outputs, targets)
        value = mean.item()
        if math.isfinite(value):
            return mean, value, None
        feature = embeddings.first_nonfinite()
        named = f", and so is feature {feature!r}" if feature else ""
        # where others wait for gradients of this trainer's loss, they get those that are not finite
        return mean if self.whole_batch else None, value, NonFiniteError(f"the loss is {value}{named}")

    def _has_loss(self, outputs: Tensor) -> bool:
        """Whether a loss is asked for: without examples only where all trainers take part in it."""
        return len(outputs) > 0 or self.whole_batch

    def _mean_loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """The mean loss, 0-d, checked."""
        mean = self._loss(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim() != 0:
            got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ConfigError(
                f"{self._kind.__name__}.loss returned {got}; expected the mean loss, a 0-d tensor"
            )
        return mean

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """Gradients of ``share`` times the mean loss, which is None where it is refused, or there are no examples."""
        if mean is not None and mean.requires_grad:
            mean.backward(torch.full_like(mean, share))  # type: ignore[no-untyped-call]

    def _nonfinite_gradient(self, embeddings: Embeddings) -> NonFiniteError | None:
        """A refusal that names a parameter or a feature whose gradient is NaN or infinite, if there is one."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and not torch.isfinite(torch.stack(torch._foreach_norm(gradients))).all():
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                    return NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")
        feature = embeddings.first_nonfinite_gradient() if self.checks_embeddings else None
        return NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite") if feature else None

    def _agree(self, value: float, refusal: NonFiniteError | None) -> tuple[float, NonFiniteError | None]:
        """The step's loss, of this trainer's part of it, and why the step is refused."""
        return value, refusal

    def _taken_gradients(self) -> Gradients:
        """The parameters' gradients, which are the handle's from here on."""
        gradients: Gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients if self._compiled is None else self._compiled.kept(gradients)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of a training step."""
        spans = self.stats_of_process.spans
        return spans(name) if self._compiled is None else self._compiled.phase(name, spans)

    def _arithmetic(self, *, train: bool) -> AbstractContextManager[object]:
        if train and self._compiled is not None and self._precision == "float32":
            return nullcontext()  # what is compiled has products of its own
        return arithmetic(self.device, precision=self._precision, forward=self._forward)

    def _module(self, *, train: bool) -> nn.Module:
        """The model, as this half computes it."""
        return self._compiled if train and self._compiled is not None else self.module

    def _logits_of(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Tensor:
        kind = self._kind
        try:
            logits = self._module(train=train)(numeric, embeddings)
        except GirihError:
            raise
        except Exception as error:
            if kind.__module__.startswith("girih."):
                raise
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            raise ConfigError(f"{kind.__name__}.forward failed: {blame(error, file)}") from error
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{kind.__name__}.forward returned {kind_of(logits)}; expected logits, "
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


def _places(module: nn.Module) -> dict[str, int]:
    """The features whose ids the model's loss reads, and their places among those of a batch."""
    wanted = getattr(module, "loss_features", ())
    schema: Any = getattr(module, "schema", None)
    names = [feature.name for feature in schema.sparse] if wanted else []
    return {name: names.index(name) for name in wanted}


def made_by(optimizer: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of some parameters; None where there are none.

    Raises:
        ConfigError: what was made is no optimizer.
    """
    made: object = optimizer(parameters) if parameters else None
    if not isinstance(made, torch.optim.Optimizer | None):
        raise ConfigError(f"dense_optimizer made {kind_of(made)}; expected a torch.optim.Optimizer")
    return made


def to_device(embeddings: Embeddings, device: torch.device) -> Embeddings:
    """The same tensors on a device."""
    tensors = [block.values for block in (*embeddings.blocks, *embeddings.first_order)]
    tensors += [sequence.values for sequence in embeddings.sequences.values()]
    if device.type == "cpu" and all(values.device.type == "cpu" for values in tensors):
        return embeddings
    return embeddings.mapped(
        lambda bags: bags.to(device),
        lambda each: Jagged(each.values.to(device), _sent(each.offsets, device)),
    )


def moved(array: NDArray[np.floating], device: torch.device) -> Tensor:
    """An array as a tensor on a device; its own memory on a CPU."""
    return _sent(torch.from_numpy(array), device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; on its way there it waits for nothing, for which it has to be pinned."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
