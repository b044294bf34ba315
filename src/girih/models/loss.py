"""Losses with their gradients: the cut needs the gradient of the logits, so no graph is built for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.errors import ConfigError


@torch.no_grad()
def bce_with_logits(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy, the mean over examples and labels: Σ w_b · l_bt / (T · Σ w_b).

    Args:
        logits: [B, T].
        labels: float32[B, T], each in [0, 1].
        weights: float32[B], one an example; None where all are 1.

    Returns:
        The mean loss, float32[], and its gradient [B, T] in the logits' dtype. Both are 0 where the
        weights sum to 0 or the batch is empty.

    Raises:
        ConfigError: logits and labels differ in shape.
    """
    if logits.shape != labels.shape:
        raise ConfigError(
            f"the model returned logits of shape {list(logits.shape)}; expected {list(labels.shape)}: "
            "a row an example, a column a label"
        )
    z, y = logits.float(), labels.float()
    num_examples, num_labels = labels.shape
    if weights is None:
        share = z.new_full((num_examples, 1), 1.0 / max(1, z.numel()))
    else:
        total = weights.float().sum()
        share = torch.where(total > 0, weights.float() / (total * num_labels), 0.0)[:, None]
    loss = (F.binary_cross_entropy_with_logits(z, y, reduction="none") * share).sum()
    gradient = (z.sigmoid() - y) * share
    return loss, gradient.to(logits.dtype)
