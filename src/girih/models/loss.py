"""Losses. A model may have its own method ``loss(outputs, batch)``. Otherwise each label has the loss of the schema.

Shapes: B examples, T labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.errors import ConfigError
from girih.models.layers.autograd import Context
from girih.schema import LabelLoss


class Targets(NamedTuple):
    """The batch that a model's ``loss(outputs, batch)`` receives; B examples, perhaps only a part of a step's batch.

    Attributes:
        labels: float32[B, T], 0 for a label that does not count.
        example_weights: float32[B], or None if all are 1.
        label_weights: float32[B, T], the weight of an example for a label: 0 if the label is missing or masked out.
            None if all are equal.
        label_scale: float64[T], which makes each label's loss the mean over the examples of the whole step that count
            for it; see :meth:`mean`. None if label_weights is None.
        losses: of each label: "bce", "mse" or "huber"; empty means bce.
        huber_delta: the error from which Huber's loss grows linearly.
        ids: feature → int64[B], the first id in each example, of the features in the model's ``loss_features``.
        first: the number of this part's first example in the step's whole batch.
        gather: rows of this part → rows of the whole step; see :meth:`everyone`.
    """

    labels: Tensor
    example_weights: Tensor | None
    label_weights: Tensor | None = None
    label_scale: Tensor | None = None
    losses: tuple[LabelLoss, ...] = ()
    huber_delta: float = 1.0
    ids: Mapping[str, Tensor] = MappingProxyType({})
    first: int = 0
    gather: Callable[[Tensor], Tensor] | None = None

    def everyone(self, rows: Tensor) -> Tensor:
        """Gathers rows, T[B, ...], of all trainers of the step as T[N, ...], in the order of its examples.

        Gradients flow back through it. It serves a loss over the whole batch: a model with ``loss_over_batch``. All
        trainers must call it the same number of times.
        """
        return rows if self.gather is None else self.gather(rows)

    def mean(self, losses: Tensor) -> Tensor:
        """Returns (1/T) Σ_t Σ_b w_b·m_bt·l_bt / Σ_b w_b·m_bt over the whole step.

        w are the example weights, and m the label weights. For a part of a step's batch, the result is scaled so that
        parts, weighted by their examples, add up to exactly the value of the whole batch.

        Args:
            losses: float[B, T], finite even for labels that do not count.

        Returns:
            float32[]; a label that counts for no example of the step adds 0.
        """
        return (losses.float() * self.shares(losses)).sum()

    def shares(self, like: Tensor) -> Tensor:
        """Returns the weight of each loss in :meth:`mean`, float32[B, T], or [B, 1] if all labels count equally."""
        num_examples, num_labels = self.labels.shape
        if self.example_weights is None:
            share = like.new_full((num_examples, 1), 1.0 / max(1, self.labels.numel()), dtype=torch.float32)
        else:
            weights = self.example_weights.double()  # float32 may be too small for their sum
            total = weights.sum() * num_labels
            share = torch.where(total > 0, weights / total, 0.0).float()[:, None]
        if self.label_weights is None or self.label_scale is None:
            return share
        return (share.double() * self.label_weights * self.label_scale).float()


Loss = Callable[[Tensor, Targets], Tensor]
"""(outputs[B, T], targets) → the mean loss, 0-d."""


def loss_of(module: nn.Module) -> Loss:
    """Returns the model's own loss, or :func:`label_losses`."""
    loss = getattr(module, "loss", None)
    return loss if callable(loss) else label_losses


def is_over_batch(module: nn.Module) -> bool:
    """Returns whether the model's own loss compares examples with each other, so that it needs the whole batch."""
    return bool(getattr(module, "loss_over_batch", False))


def label_losses(outputs: Tensor, batch: Targets) -> Tensor:
    """Returns the mean over examples and labels of each label's own loss; see :meth:`Targets.mean`.

    Args:
        outputs: [B, T]: logits for "bce", predictions for "mse", (o − y)², and for "huber", with e = |o − y|: e²/2 up
            to δ, δ·(e − δ/2) beyond (Huber 1964).

    Returns:
        float32[], with its gradient in the outputs' dtype. Both are 0 if no example counts.

    Raises:
        ConfigError: outputs and labels differ in shape.
    """
    labels = batch.labels
    if outputs.shape != labels.shape:
        raise ConfigError(
            f"the model returned logits of shape {list(outputs.shape)}; expected {list(labels.shape)}: "
            "a row per example, a column per label"
        )
    losses = batch.losses or ("bce",) * labels.shape[1]
    loss: Tensor = _LabelLosses.apply(  # type: ignore[no-untyped-call]
        outputs, labels, batch.shares(outputs), losses, batch.huber_delta
    )
    return loss


def bce_with_logits(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, the mean over examples and labels: Σ w_b · l_bt / (T · Σ w_b).

    Args:
        logits: [B, T], of any floating dtype.
        labels: float32[B, T], each in [0, 1].
        weights: float32[B], one per example; None if all are 1.

    Returns:
        The mean loss, float32[], with its gradient in the logits' dtype. Both are 0 if the weights sum to 0 or the batch is
        empty.

    Raises:
        ConfigError: logits and labels differ in shape.

    Examples:
        >>> import torch
        >>> from girih.models import bce_with_logits
        >>> loss = bce_with_logits(torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]))
        >>> round(loss.item(), 4)
        0.6931
    """
    return label_losses(logits, Targets(labels, weights))


def probabilities(logits: NDArray[np.float32], losses: Sequence[LabelLoss]) -> NDArray[np.float32]:
    """Returns predictions, float32[B, T]: the sigmoid of a logit, or the output itself for labels with mse or huber."""
    values = torch.sigmoid(torch.from_numpy(logits).double()).float().numpy()
    plain = [label for label, loss in enumerate(losses) if loss != "bce"]
    values[:, plain] = logits[:, plain]
    return values


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the mean over examples, Σ w_b · v_b / Σ w_b, for a part of a loss with one value per example.

    Args:
        values: float32[B]. weights: float32[B], one per example; None if all are 1.

    Returns:
        float32[]; 0 if the weights sum to 0 or there are no examples.
    """
    if weights is None:
        return values.sum() / max(1, values.numel())
    wide = weights.double()  # float32 may be too small for their sum
    total = wide.sum()
    return (values * torch.where(total > 0, wide / total, 0.0).to(values.dtype)).sum()


class _LabelLosses(torch.autograd.Function):
    """The losses of all labels, computed with the gradient.

    So no graph of elementwise operations is kept.
    """

    @staticmethod
    def forward(
        ctx: Context, outputs: Tensor, labels: Tensor, shares: Tensor, losses: Sequence[str], delta: float
    ) -> Tensor:
        z, y = outputs.float(), labels.float()
        if not set(losses) - {"bce"}:
            each, slope = _of_kind("bce", z, y, delta)
        else:
            columns = [_of_kind(loss, z[:, t], y[:, t], delta) for t, loss in enumerate(losses)]
            each, slope = (torch.stack(parts, dim=1) for parts in zip(*columns, strict=True))
        ctx.save_for_backward((slope * shares).to(outputs.dtype))
        return (each * shares).sum()

    @staticmethod
    def backward(ctx: Context, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return outer * gradient, None, None, None, None


def _of_kind(loss: str, z: Tensor, y: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of each number, and its slope."""
    if loss == "bce":
        return F.binary_cross_entropy_with_logits(z, y, reduction="none"), z.sigmoid() - y
    error = z - y
    if loss == "mse":
        return error.square(), 2 * error
    return F.huber_loss(z, y, reduction="none", delta=delta), error.clamp(-delta, delta)
