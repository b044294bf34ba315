"""Deep & Cross Network (Wang et al., ADKDD 2017)."""

from __future__ import annotations

from torch import Tensor, nn

from girih.config.options import integer
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.model import Model
from girih.models.operators import FieldMLP, VectorCrosses
from girih.schema import Schema


class DCN(Model):
    """logits = Linear([cross(x_0), MLP(x_0)]) with x_0 = [embeddings, numeric] (eq. 1 to 5).

    The crosses come as U cross(x_0), U being the last layer's columns for them: see ``VectorCrosses``. ``hidden = ()``
    leaves the cross network alone.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        cross_layers: int = 3,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(schema, needs.EMBEDDING)
        integer("cross_layers", cross_layers)
        hidden = checks.widths("hidden", hidden, may_be_empty=True)
        width = DenseInput(schema).width
        final = nn.Linear(width + (hidden[-1] if hidden else 0), self.num_labels)
        self.cross = VectorCrosses(schema, cross_layers, final.weight[:, :width])
        self.deep = FieldMLP(schema, hidden, dropout=dropout, batch_norm=batch_norm) if hidden else None
        self.final = nn.Linear(hidden[-1], self.num_labels, bias=False) if hidden else None
        self.bias = final.bias
        if self.final is not None:
            self.final.weight = nn.Parameter(final.weight[:, width:].detach().clone())

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        logits = self.cross(numeric, embeddings) + self.bias
        if self.deep is not None and self.final is not None:
            logits = logits + self.final(self.deep(numeric, embeddings))
        return logits
