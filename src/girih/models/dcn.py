"""Deep & Cross Network (Wang et al., ADKDD 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.interaction import CrossNetwork, VectorCross
from girih.models.layers.mlp import MLP
from girih.schema import Schema


class DCN(nn.Module):
    """logits = Linear([cross(x_0), MLP(x_0)]) with x_0 = [embeddings, numeric] (eq. 1 to 5).

    ``hidden = ()`` leaves the cross network alone.
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
        super().__init__()
        self.schema = schema
        checks.count("cross_layers", cross_layers)
        hidden = checks.widths("hidden", hidden, may_be_empty=True)
        self.needs = needs.of_all(schema, needs.EMBEDDING)
        self.inputs = DenseInput(schema)
        width = self.inputs.width
        self.cross = CrossNetwork(VectorCross(width) for _ in range(cross_layers))
        deep = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm)
        self.deep = deep if hidden else None
        self.final = nn.Linear(width + (deep.width if hidden else 0), len(schema.labels.names))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        x0 = self.inputs(numeric, embeddings)
        x = self.cross(x0)
        if self.deep is not None:
            x = torch.cat([x, self.deep(x0)], dim=1)
        logits: Tensor = self.final(x)
        return logits
