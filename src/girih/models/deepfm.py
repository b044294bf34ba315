"""DeepFM (Guo et al., IJCAI 2017)."""

from __future__ import annotations

from torch import Tensor

from girih.models import checks, needs
from girih.models.dnn import DNN
from girih.models.embeddings import Embeddings
from girih.models.operators import FirstOrder, SecondOrder
from girih.schema import Schema


class DeepFM(DNN):
    """logits = FM + MLP([embeddings, numeric]) on the same embeddings (eq. 1). All features of one dim.

    With several labels they share the FM part. The bias is that of the MLP's last layer.
    """

    kinds = (needs.FIRST_ORDER, needs.EMBEDDING)

    def build_shallow(self, schema: Schema) -> None:
        """Adds the factorization machine."""
        self.first_order = FirstOrder(schema, bias=False)
        self.second_order = SecondOrder(schema, checks.one_dim("deepfm", schema))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        fm = self.first_order(numeric, embeddings) + self.second_order(numeric, embeddings)
        return fm + self.deep(numeric, embeddings)
