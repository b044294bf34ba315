"""Attention to a target: how much each vector of a sequence matters to it.

Shapes: B examples, L ids of the history in the whole batch, D dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models.embeddings import Jagged
from girih.models.layers.mlp import MLP


class Attention(nn.Module):
    """Σ_j a(v_j, target) · v_j over an example's history (DIN, eq. 3); an empty history gives zeros.

    ``a`` is an MLP on [target, v, target − v, target ⊙ v]. As in the paper its outputs are not
    normalised, so that their sum tells how strong the interest is; ``softmax`` normalises them.
    It runs on the L ids themselves, not on a padded matrix.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...], *, softmax: bool = False) -> None:
        super().__init__()
        self.unit = MLP(4 * dim, hidden, 1)
        self.softmax = softmax

    def forward(self, target: Tensor, history: Jagged) -> Tensor:
        """float32[B, D] and a history of L ids to float32[B, D]."""
        values, example = history.values, history.examples()
        candidate = target.index_select(0, example)
        pairs = torch.cat([candidate, values, candidate - values, candidate * values], dim=1)
        scores = self.unit(pairs)[:, 0].to(values.dtype)
        if self.softmax:
            scores = softmax_within(scores, example, target.shape[0])
        return weighted_sum(scores, history)


class BilinearAttention(nn.Module):
    """softmax_j(v_jᵀ W target) over an example's vectors (DIEN and DSIN); ``target_dim`` may differ from ``dim``."""

    def __init__(self, dim: int, target_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(target_dim, dim, bias=False)

    def forward(self, target: Tensor, history: Jagged) -> Tensor:
        """float32[B, target_dim] and a history of L vectors to its weights, float32[L]."""
        example = history.examples()
        wanted = self.linear(target).to(history.values.dtype).index_select(0, example)
        return softmax_within((wanted * history.values).sum(dim=1), example, target.shape[0])


def weighted_sum(weights: Tensor, history: Jagged) -> Tensor:
    """Σ_j w_j · v_j of each example: float32[L] and a history of L ids to float32[B, D]."""
    values = history.values
    pooled = values.new_zeros(history.offsets.numel() - 1, values.shape[1])
    return pooled.index_add(0, history.examples(), weights[:, None] * values)


def softmax_within(scores: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """The softmax over the scores of each group: float32[L] and int64[L] to float32[L]."""
    lowest = scores.new_full((num_groups,), -torch.inf)
    top = lowest.scatter_reduce(0, group, scores.detach(), "amax")
    weights = (scores - top.index_select(0, group)).exp()
    total = scores.new_zeros(num_groups).index_add(0, group, weights)
    return weights / total.index_select(0, group)
