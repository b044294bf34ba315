"""Self-attention: every vector of a session takes in what the others say about it.

Shapes: S sessions, M ids of the longest, D dim, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
        """float32[S, M, D] and the bool[S, M] mask of what is real to float32[S, M, D]; nobody heeds what is not real."""
        queries, keys, values = (self._split(layer(x)) for layer in (self.queries, self.keys, self.values))
        scores = queries @ keys.mT * self.scale
        weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(dim=3)
        heads = (weights @ values).transpose(1, 2).flatten(2)
        y = self.attended(x + self.output(heads))
        fed: Tensor = self.fed(y + self.feed_forward(y))
        return fed

    def _split(self, x: Tensor) -> Tensor:
        """[S, M, D] to [S, H, M, D / H]."""
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)
