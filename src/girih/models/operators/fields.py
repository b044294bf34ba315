"""Vectors of all fields, where a model needs them whole (DES §3.2.1: AllGather)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import lowered, places_of
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class Fields(SubstitutableOperator):
    """The pooled embeddings of all features, [B, F, D], for dot products of all pairs and the like.

    Nothing adds up here: F · D numbers an example travel, as many as without substitution, but only once.

    Args:
        with_numeric: numeric features are fields too, behind the others: a value times its learned vector.
    """

    aggregation: ClassVar[Literal["sum", "concat"]] = "concat"

    def __init__(self, schema: Schema, dim: int, *, with_numeric: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.features = tuple(feature.name for feature in schema.sparse)
        self._numeric = {feature.name: 1 for feature in schema.numeric} if with_numeric else {}
        self.vectors = nn.Parameter(torch.randn(len(self._numeric), dim) * 0.01) if self._numeric else None
        self._widths = dict.fromkeys((*self.features, *self._numeric), dim)
        self.columns = len(self._widths) * dim

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, F · D] of own features."""
        return self.whole(numeric, embeddings).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        """[B, F, D]."""
        return lowered(total).view(len(total), -1, self.dim)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """The same without a detour."""
        fields = list(embeddings.views(self.features)) if self.features else []
        if self.vectors is not None:
            fields.append(numeric[:, :, None] * self.vectors)
        if not fields:
            return numeric.new_zeros(len(numeric), 0, self.dim)
        fields = [lowered(field) for field in fields]
        return fields[0] if len(fields) == 1 else torch.cat(fields, dim=1)

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Vectors of the numeric features that stay."""
        self.features = tuple(feature.name for feature in schema.sparse)
        if self.vectors is None:
            return {}
        return self.keep({"vectors": ParameterSplit(0, places_of(self._numeric, schema), len(self.vectors))})

    def places(self, schema: Schema) -> Tensor:
        """The places of some features' columns."""
        return places_of(self._widths, schema)
