"""A layer of a graph: nodes take in their neighbours, by the relations that lead to them.

Shapes: N nodes, M neighbours of all nodes and relations together, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from girih.models.layers.attention import softmax_within


class Neighbours(NamedTuple):
    """The neighbours by one relation: its vector float32[D], theirs float32[m, D], and the node of each, int64[m]."""

    relation: Tensor
    values: Tensor
    nodes: Tensor


class RelationAwareExtractor(nn.Module):
    """x'_h = ReLU(W [x_h, Σ α(h, r, t) W_V [x_h, x_t]] + b), the sum over the neighbours (r, t) of h (after ATBRG).

    α(h, r, t) is the softmax over them of (W_Q x_r)ᵀ (W_K [x_h, x_t]) / √D: the relation asks, the pair of nodes answers.
    A node without neighbours has 0 for their sum.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(dim)
        self.queries = nn.Linear(dim, dim, bias=False)
        self.keys = nn.Linear(2 * dim, dim, bias=False)
        self.values = nn.Linear(2 * dim, dim, bias=False)
        self.merge = nn.Linear(2 * dim, dim)

    def forward(self, nodes: Tensor, neighbours: Sequence[Neighbours]) -> Tensor:
        """float32[N, D] and the neighbours by each relation to float32[N, D]."""
        heads = torch.cat([each.nodes for each in neighbours])
        tails = torch.cat([each.values for each in neighbours])
        pairs = torch.cat([nodes.index_select(0, heads), tails], dim=1)
        wanted = self.queries(torch.stack([each.relation for each in neighbours]))
        wanted = torch.cat([row.expand(len(e.nodes), -1) for row, e in zip(wanted, neighbours, strict=True)])
        scores = (wanted * self.keys(pairs)).sum(dim=1).to(nodes.dtype) * self.scale
        weights = softmax_within(scores, heads, len(nodes))
        taken = torch.zeros_like(nodes).index_add(0, heads, weights[:, None] * self.values(pairs))
        return torch.relu(self.merge(torch.cat([nodes, taken], dim=1))).to(nodes.dtype)
