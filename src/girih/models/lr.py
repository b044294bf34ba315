"""Logistic regression."""

from __future__ import annotations

from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.operators import FirstOrder
from girih.schema import Schema


class LR(nn.Module):
    """logit = b + Σ_f w_f + Σ_x w_x · numeric_x. Reads first-order weights only; one label."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.schema = schema
        checks.one_label("lr", schema)
        self.needs = needs.of_all(schema, needs.FIRST_ORDER)
        self.first_order = FirstOrder(schema, bias=True)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, 1]."""
        logits: Tensor = self.first_order(numeric, embeddings)
        return logits
