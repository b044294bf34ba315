"""Two towers that find a user's item among all: trained on the items of a batch (Yi et al., RecSys 2019)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from girih.config import build
from girih.config.bounds import Bounds
from girih.config.checks import choice, flag
from girih.errors import ConfigError, nearest
from girih.models import in_batch
from girih.models.embeddings import Embeddings
from girih.models.frequencies import StreamingFrequencies
from girih.models.loss import Targets
from girih.models.two_tower import TwoTower
from girih.schema import Categorical, Schema


class Retrieval(TwoTower):
    """Two towers, u and v, whose loss compares each user with all items of the step's batch, whoever trains it.

    Labels are 1 for what is to be found; other examples are negatives alone: their items are compared with all users.

    Args:
        item_id: the categorical feature of the item's tower by which items are told apart.
        loss: "softmax" over the items of the batch, or "bpr", each other item below the user's own; see :mod:`.in_batch`.
        log_q: the softmax subtracts the logarithm of how often an item is in batches, which is estimated as they stream by,
            so that popular items, which are negatives more often, are not pushed down for it; None does for "softmax".
        frequency_rate: the weight of an item's newest sighting in that estimate.
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
        frequency_rate: float = 0.01,
        similarity: Literal["dot", "cosine"] = "dot",
        temperature: float = 1.0,
        tower_dim: int = 64,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            schema,
            user=user,
            item=item,
            similarity=similarity,
            temperature=temperature,
            tower_dim=tower_dim,
            hidden=hidden,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        choice("loss", loss, ("softmax", "bpr"))
        build(Annotated[float, Bounds(0, 1, open_low=True)], frequency_rate, "frequency_rate")
        if log_q is not None:
            flag("log_q", log_q)
            if loss == "bpr":
                raise ConfigError(
                    f"log_q = {str(log_q).lower()}: loss = 'bpr' has no softmax to correct; leave it out"
                )
        if schema.labels.losses != ("bce",):
            raise ConfigError(
                f"retrieval: labels.loss = {schema.labels.losses[0]!r}: expected a label in [0, 1], 1 for what is to be found"
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
        """float32[B, X] and embeddings to u and v side by side, float32[B, 2 · tower_dim]."""
        return torch.cat(self.towers(numeric, embeddings), dim=1)

    def logits(self, outputs: Tensor) -> Tensor:
        """u and v side by side to the logits of the users' own items, float32[B, 1]."""
        user, item = outputs.chunk(2, dim=1)
        return (user * item).sum(dim=1, keepdim=True) / self.temperature

    def loss(self, outputs: Tensor, batch: Targets) -> Tensor:
        """This trainer's part of the step's loss, 0-d; those of all trainers add up."""
        user, item = outputs.chunk(2, dim=1)
        ids = batch.everyone(batch.ids[self.loss_features[0]])
        scores = user @ batch.everyone(item.contiguous()).T / self.temperature
        if self.pairwise:
            return in_batch.pairwise(scores, ids, batch)
        log_q = None if self.frequencies is None else self.frequencies.seen(ids)
        return in_batch.softmax(scores, ids, batch, log_q)
