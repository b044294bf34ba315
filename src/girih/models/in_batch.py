"""Losses of two towers over the items of a step's batch, which are each other's negatives.

Shapes: B examples of this trainer, N of the step over all trainers, D dim of a tower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.models.loss import Targets


def positives(batch: Targets) -> Tensor:
    """float32[B]: how much each example counts as something to be retrieved: its label, times its weights."""
    reward = batch.labels[:, 0]
    if batch.label_weights is not None:
        reward = reward * batch.label_weights[:, 0]
    return reward if batch.example_weights is None else reward * batch.example_weights


def softmax(scores: Tensor, ids: Tensor, batch: Targets, log_q: Tensor | None) -> Tensor:
    """This trainer's part of Σ_i r_i · −log softmax_j(s_ij − log q_j)_i / Σ_i r_i (Yi et al. 2019, eq. 2 to 5).

    An item that is in the batch several times is no negative of itself.

    Args:
        scores: float32[B, N], s: of each user of this trainer with each item of the step.
        ids: int64[N], of the items. log_q: float32[N]; None corrects nothing.
    """
    own = batch.first + torch.arange(len(scores), device=scores.device)
    if log_q is not None:
        scores = scores - log_q
    same = ids[own][:, None] == ids[None, :]
    same[torch.arange(len(own), device=own.device), own] = False
    scores = scores.masked_fill(same, -torch.inf)
    losses = scores.logsumexp(dim=1) - scores.gather(1, own[:, None])[:, 0]
    return _part(losses, batch)


def pairwise(scores: Tensor, ids: Tensor, batch: Targets) -> Tensor:
    """This trainer's part of Σ_i r_i · mean_j −log σ(s_ii − s_ij) / Σ_i r_i, j over the step's other items: BPR (Rendle et al. 2009).

    The arguments are those of :func:`softmax`.
    """
    own = batch.first + torch.arange(len(scores), device=scores.device)
    others = ids[own][:, None] != ids[None, :]
    margins = scores.gather(1, own[:, None]) - scores
    losses = (F.softplus(-margins) * others).sum(dim=1) / others.sum(dim=1).clamp(min=1)
    return _part(losses, batch)


def _part(losses: Tensor, batch: Targets) -> Tensor:
    reward = positives(batch)
    total = batch.everyone(reward).double().sum()
    share = torch.where(total > 0, reward / total, 0.0).float()
    return (losses * share).sum()
