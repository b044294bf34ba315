"""The plain deep network on embeddings."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.model import Model
from girih.models.operators import FieldMLP
from girih.schema import Schema


class DNN(Model):
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
        super().__init__(schema, *self.kinds)
        hidden = checks.widths("hidden", hidden)
        self.build_shallow(schema)
        self.deep = FieldMLP(schema, hidden, self.num_labels, dropout=dropout, batch_norm=batch_norm)

    def build_shallow(self, schema: Schema) -> None:
        """No-op here; it comes before the deep part, whose initial values are drawn after it."""

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        return self.deep(numeric, embeddings)
