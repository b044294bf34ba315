"""DLRM (Naumov et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.interaction import PairwiseDots
from girih.models.layers.mlp import MLP
from girih.models.operators import FieldMLP, Fields
from girih.schema import Schema


class DLRM(nn.Module):
    """logits = top([d, <f_i, f_j> for all i < j]) with d = bottom(numeric), fields f = (d, embeddings).

    Without numeric features there is neither bottom nor d, which the paper does not consider: then the
    embeddings take the place of d before the top, since dots alone lose what a single feature says.
    All features of one dim; ``hidden`` are the layers of the top, ``bottom_hidden`` those before the
    bottom's last, which is as wide as dim.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: tuple[int, ...] = (400, 400, 400),
        bottom_hidden: tuple[int, ...] = (512, 256),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        hidden = checks.widths("hidden", hidden, may_be_empty=True)
        bottom_hidden = checks.widths("bottom_hidden", bottom_hidden, may_be_empty=True)
        dim, num_numeric, num_features = (
            checks.one_dim("dlrm", schema),
            len(schema.numeric),
            len(schema.sparse),
        )
        self.needs = needs.of_all(schema, needs.EMBEDDING)
        self.fields = Fields(schema, dim)
        bottom = (*bottom_hidden, dim)
        self.bottom = (
            FieldMLP(schema, bottom, features=(), dropout=dropout, batch_norm=batch_norm)
            if num_numeric
            else None
        )
        self.dots = PairwiseDots(num_features + (num_numeric > 0))
        inputs = self.dots.width + dim * (1 if num_numeric else num_features)
        self.top = MLP(inputs, hidden, len(schema.labels.names), dropout=dropout, batch_norm=batch_norm)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        fields: Tensor = self.fields(numeric, embeddings)
        if self.bottom is not None:
            dense = self.bottom(numeric, embeddings)
            crossed = self.dots(torch.cat([dense[:, None], fields], dim=1))
        else:
            dense, crossed = fields.flatten(1), self.dots(fields)
        logits: Tensor = self.top(torch.cat([dense, crossed], dim=1))
        return logits
