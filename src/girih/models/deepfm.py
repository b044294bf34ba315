"""DeepFM (Guo et al., IJCAI 2017)."""

from __future__ import annotations

from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.operators import FieldMLP, FirstOrder, SecondOrder
from girih.schema import Schema


class DeepFM(nn.Module):
    """logits = FM + MLP([embeddings, numeric]) on the same embeddings (eq. 1). All features of one dim.

    With several labels they share the FM part. The bias is that of the MLP's last layer.
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
        self.first_order = FirstOrder(schema, bias=False)
        self.second_order = SecondOrder(schema, checks.one_dim("deepfm", schema))
        self.deep = FieldMLP(schema, hidden, len(schema.labels.names), dropout=dropout, batch_norm=batch_norm)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        fm = self.first_order(numeric, embeddings) + self.second_order(numeric, embeddings)
        logits: Tensor = fm + self.deep(numeric, embeddings)
        return logits
