"""Losses. A model owns its loss: a method ``loss(outputs, batch)``, binary cross-entropy of logits where it has none.

Shapes: B examples, T labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.errors import ConfigError


class Targets(NamedTuple):
    """The batch that a model's ``loss(outputs, batch)`` gets.

    ``labels`` is float32[B, T], ``example_weights`` float32[B], or None where all are 1.
    """

    labels: Tensor
    example_weights: Tensor | None


Loss = Callable[[Tensor, Targets], Tensor]
"""(outputs[B, T], targets) → the mean loss, 0-d."""


def loss_of(module: nn.Module) -> Loss:
    """The model's own loss, or binary cross-entropy of logits."""
    own = getattr(module, "loss", None)
    return own if callable(own) else lambda outputs, batch: bce_with_logits(outputs, *batch)


def bce_with_logits(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, the mean over examples and labels: Σ w_b · l_bt / (T · Σ w_b).

    Args:
        logits: [B, T].
        labels: float32[B, T], each in [0, 1].
        weights: float32[B], one per example; None where all are 1.

    Returns:
        The mean loss, float32[], with its gradient in the logits' dtype. Both are 0 where the weights sum to 0 or
        the batch is empty.

    Raises:
        ConfigError: logits and labels differ in shape.
    """
    if logits.shape != labels.shape:
        raise ConfigError(
            f"the model returned logits of shape {list(logits.shape)}; expected {list(labels.shape)}: "
            "a row per example, a column per label"
        )
    loss: Tensor = _BinaryCrossEntropy.apply(logits, labels, weights)  # type: ignore[no-untyped-call]
    return loss


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over examples, Σ w_b · v_b / Σ w_b, for the part of a loss that has a value for each of them.

    Args:
        values: float32[B]. weights: float32[B], one per example; None where all are 1.

    Returns:
        float32[]; 0 where the weights sum to 0 or there are no examples.
    """
    if weights is None:
        return values.sum() / max(1, values.numel())
    wide = weights.double()  # their sum may be more than float32 holds
    total = wide.sum()
    return (values * torch.where(total > 0, wide / total, 0.0).to(values.dtype)).sum()


class _BinaryCrossEntropy(torch.autograd.Function):
    """The gradient is computed with the loss, so that no graph of elementwise operations is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        z, y = logits.float(), labels.float()
        num_examples, num_labels = labels.shape
        if weights is None:
            share = z.new_full((num_examples, 1), 1.0 / max(1, z.numel()))
        else:
            weights = weights.double()  # their sum may be more than float32 holds
            total = weights.sum() * num_labels
            share = torch.where(total > 0, weights / total, 0.0).float()[:, None]
        loss = (F.binary_cross_entropy_with_logits(z, y, reduction="none") * share).sum()
        ctx.save_for_backward(((z.sigmoid() - y) * share).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return outer * gradient, None, None
