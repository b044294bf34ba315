"""Attention to a target: the weight of each vector of a sequence for the target.

Shapes: B examples, L ids of the history in the whole batch, D dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from girih.models.embeddings import Jagged
from girih.models.layers.mlp import MLP


class Attention(nn.Module):
    """Σ_j a(v_j, target) · v_j over an example's history (DIN, eq. 3); an empty history gives zeros.

    ``a`` is an MLP on [target, v, target − v, target ⊙ v]. As in the paper, its outputs are not normalised, so their
    sum shows the strength of the interest. ``softmax`` normalises them. The MLP runs on the L ids themselves, not on a
    padded matrix.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...], *, softmax: bool = False) -> None:
        super().__init__()
        self.unit = MLP(4 * dim, hidden, 1)
        self.softmax = softmax

    def forward(self, target: Tensor, history: Jagged) -> Tensor:
        """Maps float32[B, D] and a history of L ids to float32[B, D]."""
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
        """Maps float32[B, target_dim] and a history of L vectors to the weights of the vectors, float32[L]."""
        example = history.examples()
        wanted = self.linear(target).to(history.values.dtype).index_select(0, example)
        return softmax_within((wanted * history.values).sum(dim=1), example, target.shape[0])


def weighted_sum(weights: Tensor, history: Jagged) -> Tensor:
    """Returns Σ_j w_j · v_j of each example: float32[L] and a history of L ids to float32[B, D]."""
    values = history.values
    pooled = values.new_zeros(history.offsets.numel() - 1, values.shape[1])
    return pooled.index_add(0, history.examples(), weights[:, None] * values)


def softmax_within(scores: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Returns the softmax over the scores of each group: float32[L] and int64[L] to float32[L]."""
    lowest = scores.new_full((num_groups,), -torch.inf)
    top = lowest.scatter_reduce(0, group, scores.detach(), "amax")
    weights = (scores - top.index_select(0, group)).exp()
    total = scores.new_zeros(num_groups).index_add(0, group, weights)
    return weights / total.index_select(0, group)


class SelfAttention(nn.Module):
    """LayerNorm(y + FFN(y)) with y = LayerNorm(x + [head_1 … head_H] W_O) (DSIN, Session Interest Extractor Layer).

    head_h = softmax(Q_h K_hᵀ / √D) V_h, where Q, K and V are x W_Q, x W_K and x W_V, and h is a part of D / H columns.
    FFN is Linear → ReLU → Linear, 4 D wide.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(dim)
        self.queries, self.keys, self.values, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.attended = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.ReLU(inplace=True), nn.Linear(4 * dim, dim)
        )
        self.fed = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Maps float32[S, M, D] and the bool[S, M] mask of real vectors to float32[S, M, D].

        Attention ignores vectors that are not real.
        """
        queries, keys, values = (self._split(layer(x)) for layer in (self.queries, self.keys, self.values))
        scores = queries @ keys.mT * self.scale
        weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(dim=3)
        heads = (weights @ values).transpose(1, 2).flatten(2)
        y = self.attended(x + self.output(heads))
        fed: Tensor = self.fed(y + self.feed_forward(y))
        return fed

    def _split(self, x: Tensor) -> Tensor:
        """Maps [S, M, D] to [S, H, M, D / H]."""
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)
