"""The linear part (DES, Eq. 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import places_of
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class FirstOrder(SubstitutableOperator):
    """Σ_f w_f + Σ_x w_x · numeric_x, and one bias if asked: the linear part of LR, FM and their kin.

    The weights of ids lie in tables and start at 0, as those of numeric features do here. The partial result is one
    number an example: the sum over own features.
    """

    columns = 1

    def __init__(self, schema: Schema, *, bias: bool) -> None:
        super().__init__()
        self._numeric = {feature.name: 1 for feature in schema.numeric}
        self.weight = nn.Parameter(torch.zeros(len(schema.numeric))) if schema.numeric else None
        self.bias = nn.Parameter(torch.zeros(())) if bias else None

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, 1]."""
        total = numeric.new_zeros(numeric.shape[0])
        for block in embeddings.first_order:
            total = total + block.values.flatten(1).sum(1)
        if self.weight is not None:
            total = total + numeric @ self.weight
        return total[:, None]

    def combine(self, total: Tensor) -> Tensor:
        """float32[B, 1]."""
        return total if self.bias is None else total + self.bias

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Weights of the numeric features that stay."""
        if self.weight is None:
            return {}
        return self.keep({"weight": ParameterSplit(0, places_of(self._numeric, schema), len(self.weight))})
