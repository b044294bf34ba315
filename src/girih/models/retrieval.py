"""Two towers that find a user's item among all items, trained on the items of a batch (Yi et al., RecSys 2019)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import Bounds, Count, Positive
from girih.errors import ConfigError, nearest
from girih.models.embeddings import Embeddings
from girih.models.layers.mlp import HIDDEN, AnyWidths, LayerOptions
from girih.models.loss import Targets
from girih.models.two_tower import TwoTower
from girih.schema import Categorical, Schema

_FACTORS: Final = (-7046029254386353131, -4417276706812531889)
"""Odd 64-bit factors of ids. The high bits of the product are the slot."""
SLOT_BITS: Final = 16


class StreamingFrequencies(nn.Module):
    """Estimates log q of items, where q is the expected number of occurrences of an item in a step's batch.

    A slot keeps the step at which its item was last seen, and the mean number of steps between two sightings. An item
    that occurs c times after Δ steps counts as c sightings, one every Δ / c steps. The mean is plain until 1/rate
    sightings, then exponential, so that it follows changes of popularity. Items that share a slot are counted too
    often, so the rarer of two slots counts. This is state of the model: checkpoints hold it, and a refused step
    restores it.

    Args:
        rate: weight of the newest sighting (α in the paper), in (0, 1].
    """

    steps: Tensor
    last: Tensor
    interval: Tensor
    sightings: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        shape = (len(_FACTORS), 1 << SLOT_BITS)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("interval", torch.zeros(shape))
        self.register_buffer("sightings", torch.zeros(shape, dtype=torch.int32))

    def seen(self, ids: Tensor) -> Tensor:
        """Counts the items of a step, int64[N]. Returns log q of each item, float32[N], without a gradient."""
        self.steps += 1
        unique, inverse = torch.unique(ids, return_inverse=True)
        totals = ids.new_zeros(len(unique), dtype=torch.float32)
        for row, factor in enumerate(_FACTORS):
            slots = (unique * factor) >> (64 - SLOT_BITS) & ((1 << SLOT_BITS) - 1)
            positions, of_item = torch.unique(slots[inverse], return_inverse=True)
            counts = torch.bincount(of_item, minlength=len(positions))
            newest = (self.steps - self.last[row, positions]).float() / counts
            times = self.sightings[row, positions] + counts.int()
            weight = torch.maximum(counts / times, 1 - (1 - self.rate) ** counts)
            self.interval[row, positions] = torch.lerp(self.interval[row, positions], newest, weight)
            self.sightings[row, positions] = times
            self.last[row, positions] = self.steps.int()
            totals = torch.maximum(totals, self.interval[row, slots])
        return -totals.log()[inverse]


def positives(batch: Targets) -> Tensor:
    """Returns the weight of each example as an item to retrieve, float32[B]: its label, times its weights."""
    reward = batch.labels[:, 0]
    if batch.label_weights is not None:
        reward = reward * batch.label_weights[:, 0]
    return reward if batch.example_weights is None else reward * batch.example_weights


def softmax(scores: Tensor, ids: Tensor, batch: Targets, log_q: Tensor | None) -> Tensor:
    """Returns this trainer's part of Σ_i r_i · −log softmax_j(s_ij − log q_j)_i / Σ_i r_i (Yi et al. 2019, eq. 2 to 5).

    An item that occurs several times in the batch is not its own negative.

    Args:
        scores: float32[B, N], s: of each user of this trainer with each item of the step.
        ids: int64[N], of the items. log_q: float32[N]; None corrects nothing.
    """
    positions = batch.first + torch.arange(len(scores), device=scores.device)
    if log_q is not None:
        scores = scores - log_q
    same = ids[positions][:, None] == ids[None, :]
    same[torch.arange(len(positions), device=positions.device), positions] = False
    scores = scores.masked_fill(same, -torch.inf)
    losses = scores.logsumexp(dim=1) - scores.gather(1, positions[:, None])[:, 0]
    return _part(losses, batch)


def pairwise(scores: Tensor, ids: Tensor, batch: Targets) -> Tensor:
    """Returns this trainer's part of Σ_i r_i · mean_j −log σ(s_ii − s_ij) / Σ_i r_i: BPR (Rendle et al. 2009).

    j runs over the step's other items. The arguments are those of :func:`softmax`.
    """
    positions = batch.first + torch.arange(len(scores), device=scores.device)
    others = ids[positions][:, None] != ids[None, :]
    margins = scores.gather(1, positions[:, None]) - scores
    losses = (F.softplus(-margins) * others).sum(dim=1) / others.sum(dim=1).clamp(min=1)
    return _part(losses, batch)


def _part(losses: Tensor, batch: Targets) -> Tensor:
    reward = positives(batch)
    total = batch.everyone(reward).double().sum()
    share = torch.where(total > 0, reward / total, 0.0).float()
    return (losses * share).sum()


class Retrieval(TwoTower):
    """Two towers, u and v, whose loss compares each user with all items of the step's batch, of all trainers.

    The label of an item to find is 1. Other examples only give negatives: their items are compared with all users.

    Args:
        schema: the features and labels of the data.
        user: names of the features of the user's tower.
        item_id: the categorical feature of the item's tower that identifies an item.
        item: names of the features of the item's tower. By default those that are not in ``user``.
        loss: "softmax" over the items of the batch (:func:`softmax`), or "bpr", which ranks the user's own item above
            each other item (:func:`pairwise`).
        log_q: the softmax subtracts the logarithm of an item's frequency in batches, estimated during training. Popular
            items are negatives more often, and this correction compensates for it. None corrects for "softmax".
        frequency_rate: the weight of an item's newest sighting in this estimate, in (0, 1].
        similarity: "dot" or "cosine", as in :class:`girih.models.TwoTower`.
        temperature: the divisor of similarities, above 0.
        tower_dim: the width of u and v.
        hidden: widths of each tower's layers before its last.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: an unknown feature, an ``item_id`` outside the item's tower, ``log_q`` with "bpr", or a label of another
            loss than "bce".

    Examples:
        >>> import girih
        >>> features = [
        ...     girih.Categorical(name="user", dim=8),
        ...     girih.Categorical(name="item", dim=8),
        ... ]
        >>> schema = girih.Schema(features, labels="clicked")
        >>> model = girih.models.Retrieval(
        ...     schema, user=["user"], item_id="item", tower_dim=32
        ... )
        >>> model.loss_features
        ('item',)
    """

    loss_strategies: ClassVar[tuple[str, ...]] = ("local", "synchronous")
    loss_over_batch: ClassVar[bool] = True

    def __init__(
        self,
        schema: Schema,
        *,
        user: tuple[str, ...],
        item_id: str,
        item: tuple[str, ...] | None = None,
        loss: Literal["softmax", "bpr"] = "softmax",
        log_q: bool | None = None,
        frequency_rate: Annotated[float, Bounds(0, 1, open_low=True)] = 0.01,
        similarity: Literal["dot", "cosine"] = "dot",
        temperature: Positive = 1.0,
        tower_dim: Count = 64,
        hidden: AnyWidths = HIDDEN,
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            schema,
            user=user,
            item=item,
            similarity=similarity,
            temperature=temperature,
            tower_dim=tower_dim,
            hidden=hidden,
            **deep,
        )
        if log_q is not None and loss == "bpr":
            raise ConfigError(
                f"log_q = {str(log_q).lower()}: loss = 'bpr' has no softmax to correct; leave it out"
            )
        if schema.labels.losses != ("bce",):
            raise ConfigError(
                f"retrieval: labels.loss = {schema.labels.losses[0]!r}: expected a label in [0, 1], 1 for an item to find"
            )
        items = [f.name for f in schema.sparse if isinstance(f, Categorical) and f.name in self.item_features]
        if item_id not in items:
            raise ConfigError(
                f"item_id = {item_id!r}: expected a categorical feature of the item's tower, one of"
                f" {items}{nearest(str(item_id), items)}"
            )
        self.loss_features = (item_id,)
        self.pairwise = loss == "bpr"
        corrects = not self.pairwise and log_q is not False
        self.frequencies = StreamingFrequencies(frequency_rate) if corrects else None

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to u and v side by side, float32[B, 2 · tower_dim]."""
        return torch.cat(self.towers(numeric, embeddings), dim=1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Maps u and v side by side, float32[B, 2 · tower_dim], to the logits of the users' own items, float32[B, 1]."""
        user, item = outputs.chunk(2, dim=1)
        return (user * item).sum(dim=1, keepdim=True) / self.temperature

    def loss(self, outputs: Tensor, batch: Targets) -> Tensor:
        """Returns this trainer's part of the step's loss, float32[]. The parts of all trainers add up.

        Args:
            outputs: float32[B, 2 · tower_dim], of :meth:`forward`.
            batch: labels, weights and item ids of the examples.
        """
        user, item = outputs.chunk(2, dim=1)
        ids = batch.everyone(batch.ids[self.loss_features[0]])
        scores = user @ batch.everyone(item.contiguous()).T / self.temperature
        if self.pairwise:
            return pairwise(scores, ids, batch)
        log_q = None if self.frequencies is None else self.frequencies.seen(ids)
        return softmax(scores, ids, batch, log_q)
