"""Wide & Deep (Cheng et al., DLRS 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.operators import FieldMLP, FirstOrder
from girih.schema import Schema


class WideDeep(nn.Module):
    """logits = wide + MLP([embeddings, numeric]), trained jointly (eq. 3).

    The wide part is linear in ids and numeric features; crosses are features of the data. With several
    labels they share the wide part. The bias is that of the MLP's last layer.
    """

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
        self.needs = needs.of_all(schema, needs.FIRST_ORDER, needs.EMBEDDING)
        self.wide = FirstOrder(schema, bias=False)
        self.deep = FieldMLP(schema, hidden, len(schema.labels.names), dropout=dropout, batch_norm=batch_norm)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        logits: Tensor = self.wide(numeric, embeddings) + self.deep(numeric, embeddings)
        return logits
