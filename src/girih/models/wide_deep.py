"""Wide & Deep (Cheng et al., DLRS 2016)."""

from __future__ import annotations

from torch import Tensor

from girih.models import needs
from girih.models.dnn import DNN
from girih.models.embeddings import Embeddings
from girih.models.operators import FirstOrder
from girih.schema import Schema


class WideDeep(DNN):
    """logits = wide + MLP([embeddings, numeric]), trained jointly (eq. 3).

    The wide part is linear in ids and numeric features; crosses are features of the data. With several
    labels they share the wide part. The bias is that of the MLP's last layer.
    """

    kinds = (needs.FIRST_ORDER, needs.EMBEDDING)

    def build_shallow(self, schema: Schema) -> None:
        """Adds the wide part."""
        self.wide = FirstOrder(schema, bias=False)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        return self.wide(numeric, embeddings) + self.deep(numeric, embeddings)
