"""Vectors of all fields, where a model needs them whole (DES §3.2.1: AllGather)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import lowered, places_of
from girih.models.operators.operator import Operator, Split
from girih.schema import Schema


class Fields(Operator):
    """The pooled embeddings of all features, [B, F, D], for dot products of all pairs and the like.

    Nothing adds up here: F · D numbers an example travel, as many as without substitution, but only once.
    """

    aggregation: ClassVar[Literal["sum", "concat"]] = "concat"

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.features = tuple(feature.name for feature in schema.sparse)
        self.columns = len(self.features) * dim
        self._widths = dict.fromkeys(self.features, dim)

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, F · D] of own features."""
        return self.whole(numeric, embeddings).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        """[B, F, D]."""
        return lowered(total).view(len(total), -1, self.dim)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """The same without a detour."""
        if not self.features:
            return numeric.new_zeros(len(numeric), 0, self.dim)
        views = [lowered(view) for view in embeddings.views(self.features)]
        return views[0] if len(views) == 1 else torch.cat(views, dim=1)

    def narrow(self, schema: Schema) -> dict[str, Split]:
        """It has no parameters."""
        self.features = tuple(feature.name for feature in schema.sparse)
        return {}

    def places(self, schema: Schema) -> Tensor:
        """The places of some features' columns."""
        return places_of(self._widths, schema)
