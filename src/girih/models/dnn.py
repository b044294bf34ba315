"""The plain deep network on embeddings."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.operators import FieldMLP
from girih.schema import Schema


class DNN(nn.Module):
    """logits = MLP([embeddings, numeric]).

    Models that add a shallow part to it build that in :meth:`build_shallow`.
    """

    kinds: ClassVar[tuple[str, ...]] = (needs.EMBEDDING,)

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.schema = schema
        hidden = checks.widths("hidden", hidden)
        self.needs = needs.of_all(schema, *self.kinds)
        self.build_shallow(schema)
        self.deep = FieldMLP(schema, hidden, len(schema.labels.names), dropout=dropout, batch_norm=batch_norm)

    def build_shallow(self, schema: Schema) -> None:
        """No-op here; it comes before the deep part, whose initial values are drawn after it."""

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        logits: Tensor = self.deep(numeric, embeddings)
        return logits
