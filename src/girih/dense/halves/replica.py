"""The dense half of one process: a model with its own parameters and optimizer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from girih.data.batch import Batch
from girih.dense.accel import onednn
from girih.dense.accel.malloc import keep_freed_memory
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError, GirihError, NonFiniteError
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.user import blame
from girih.runs.spans import Spans
from girih.training.halves import Targets


class Replica:
    """One copy of the dense parameters.

    Args:
        module: ``forward(numeric, embeddings) -> logits``.
        optimizer: makes the optimizer of the module's parameters; a module without any has none.
        precision: "bfloat16" computes the forward and backward pass under autocast; parameters,
            their gradients and the optimizer stay float32.
        clip_norm: the largest norm of all dense gradients together (``clip_grad_norm_``); None clips nothing.

    Attributes:
        own_dropout: whether this copy draws masks of its own, as it sees examples of its own.
    """

    own_dropout = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        *,
        precision: str = "float32",
        device: torch.device | str = "cpu",
        clip_norm: float | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.module = module.to(self.device)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = made_by(optimizer, self.parameters)
        self.sent_bytes = 0
        """Of dense gradients and parameters."""
        self.spans: Spans | None = None
        """Where it times what it does beside the loop, if anywhere."""
        self._autocast = precision == "bfloat16"
        self._clip_norm = clip_norm
        self._logits: Tensor | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def wire_bytes(self) -> Counter[str]:
        """What this process has sent, by kind."""
        return Counter(dense=self.sent_bytes)

    @property
    def staleness_max(self) -> int:
        """A copy that moves in its own step is never behind."""
        return 0

    def forward(self, batch: Batch, embeddings: Embeddings, *, train: bool = True) -> Tensor:
        """Logits, float32[B, T], detached: :meth:`backward` takes their gradient."""
        self._set_mode(train)
        if train:  # a refused step must not move running means either
            self._buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        numeric = torch.from_numpy(batch.numeric).to(self.device)
        with torch.set_grad_enabled(train), self._arithmetic():
            logits = self._logits_of(numeric, to_device(embeddings, self.device), train=train)
        rows, labels = self.targets(batch, train=train).labels.shape  # without labels, columns are not known
        if logits.dim() != 2 or len(logits) != rows or labels not in (0, logits.shape[1]):
            raise ConfigError(
                f"{type(self.module).__name__}.forward returned logits of shape {list(logits.shape)}; "
                f"expected {[rows, labels or 1]}: a row an example, a column a label"
            )
        logits = logits.float()
        if train:
            self._logits = logits
        return logits.detach()

    def targets(self, batch: Batch, *, train: bool = True) -> Targets:
        """What the logits of :meth:`forward` are compared with."""
        weights = batch.example_weights
        return Targets(
            torch.from_numpy(batch.labels).to(self.device),
            None if weights is None else torch.from_numpy(weights).to(self.device),
            1.0 if batch.share is None else batch.share.weight,
        )

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
                "a tensor of a row an example and a column a label"
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

    def backward(
        self, logits_gradient: Tensor, loss: float = 0.0, refused: NonFiniteError | None = None
    ) -> float:
        """Adds to the parameters' gradients; the embeddings of the last forward collect theirs.

        Returns:
            ``loss``.

        Raises:
            NonFiniteError: ``refused``, or a parameter's gradient is NaN or infinite; names the parameter.
        """
        if refused is not None:
            raise refused
        logits, self._logits = self._logits, None
        if logits is None or not logits.requires_grad:
            return loss
        logits.backward(logits_gradient)  # type: ignore[no-untyped-call]
        self._check_gradients()
        return loss

    def _check_gradients(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                    raise NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")

    def apply(self) -> None:
        """One optimizer step, after clipping."""
        if self.optimizer is None:
            return
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _clip(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, most)

    def drain(self) -> None:
        """Nothing is ever in flight."""
        return

    def refresh(self) -> None:
        """Nobody else moves the parameters."""
        return

    def discard(self) -> None:
        """Clears the gradients of a refused step, and puts back the buffers that its forward moved."""
        self._logits = None
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """It holds nothing but memory."""
        return

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
