"""DIN's attention: how much each id of a history matters to the candidate.

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
            scores = _softmax(scores, example, target.shape[0])
        pooled = values.new_zeros(target.shape[0], values.shape[1])
        return pooled.index_add(0, example, scores[:, None] * values)


def _softmax(scores: Tensor, example: Tensor, num_examples: int) -> Tensor:
    lowest = scores.new_full((num_examples,), -torch.inf)
    top = lowest.scatter_reduce(0, example, scores.detach(), "amax")
    weights = (scores - top.index_select(0, example)).exp()
    total = scores.new_zeros(num_examples).index_add(0, example, weights)
    return weights / total.index_select(0, example)
