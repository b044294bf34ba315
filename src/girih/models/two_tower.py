"""Two towers: DSSM (Huang et al., CIKM 2013), trained on clicks as in MOBIUS (Fan et al., KDD 2019)."""

from __future__ import annotations

from typing import Literal, Unpack

import torch.nn.functional as F
from torch import Tensor

from girih.config.bounds import Count, Positive
from girih.errors import ConfigError
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.mlp import HIDDEN, AnyWidths, LayerOptions
from girih.models.model import Model
from girih.models.operators import FieldMLP
from girih.schema import Schema


class TwoTower(Model):
    """logit = similarity(u, v) / temperature with u = MLP(the user's features), v = MLP(the item's) (DSSM, §3).

    The towers are independent until the similarity: v is the same for every user. One label.

    Args:
        schema: the features and labels of the data.
        user: names of the features of the user's tower, of all kinds.
        item: names of the features of the item's tower. By default those that are not in ``user``. A feature in neither
            tower is not read.
        similarity: "dot", <u, v>, or "cosine", <u, v> / (‖u‖ ‖v‖).
        temperature: 1/γ, where γ is DSSM's smoothing factor. A cosine is at most 1, so useful logits need a low
            temperature.
        tower_dim: the width of u and v.
        hidden: widths of each tower's layers before its last.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: several labels, an unknown feature, a feature of both towers, or an empty tower.

    Examples:
        >>> import girih
        >>> features = [
        ...     girih.Categorical(name="user", dim=8),
        ...     girih.Categorical(name="item", dim=8),
        ... ]
        >>> schema = girih.Schema(features, labels="clicked")
        >>> model = girih.models.TwoTower(
        ...     schema, user=["user"], similarity="cosine", temperature=0.05
        ... )
        >>> model.item_features
        ('item',)
    """

    def __init__(
        self,
        schema: Schema,
        *,
        user: tuple[str, ...],
        item: tuple[str, ...] | None = None,
        similarity: Literal["dot", "cosine"] = "dot",
        temperature: Positive = 1.0,
        tower_dim: Count = 64,
        hidden: AnyWidths = HIDDEN,
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(schema)
        checks.one_label("two_tower", schema)
        names = schema.names
        user = checks.some_of("user", user, names)
        if item is None:
            item = tuple(name for name in names if name not in user)
            if not item:
                raise ConfigError("two_tower: user has all features; leave some to the item's tower")
        item = checks.some_of("item", item, names)
        for name in item:
            if name in user:
                raise ConfigError(
                    f"item: {name!r} is in the user's tower; expected towers that share no feature"
                )
        numeric = {feature.name for feature in schema.numeric}
        towers = (
            FieldMLP(
                schema,
                hidden,
                tower_dim,
                features=[name for name in tower if name not in numeric],
                numeric=[name for name in tower if name in numeric],
                **deep,
            )
            for tower in (user, item)
        )
        self.user, self.item = towers
        self.item_features = item
        self.needs = {f.name: frozenset({needs.EMBEDDING}) for f in schema.sparse if f.name in user + item}
        self.cosine, self.temperature = similarity == "cosine", temperature

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, 1]."""
        user, item = self.towers(numeric, embeddings)
        return (user * item).sum(dim=1, keepdim=True) / self.temperature

    def towers(self, numeric: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        """Maps float32[B, X] and embeddings to u and v, float32[B, tower_dim] each, of length 1 for a cosine."""
        user, item = self.user(numeric, embeddings), self.item(numeric, embeddings)
        if self.cosine:
            user, item = F.normalize(user, dim=1), F.normalize(item, dim=1)
        return user, item
