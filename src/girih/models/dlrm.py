"""DLRM (Naumov et al., 2019)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from girih.models import checks
from girih.models.embeddings import Embeddings
from girih.models.layers.interaction import PairwiseDots
from girih.models.layers.mlp import HIDDEN, MLP, AnyWidths, LayerOptions
from girih.models.model import Model
from girih.models.operators import FieldMLP, Fields
from girih.schema import Schema


class DLRM(Model):
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
        hidden: AnyWidths = HIDDEN,
        bottom_hidden: AnyWidths = (512, 256),
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(schema)
        dim, num_fields = checks.one_dim("dlrm", schema), len(schema.sparse)
        self.fields = Fields(schema, dim)
        bottom = (*bottom_hidden, dim)
        self.bottom = None
        if schema.numeric:
            self.bottom = FieldMLP(schema, bottom, features=(), **deep)
        self.dots = PairwiseDots(num_fields + (self.bottom is not None))
        width_of_d = num_fields * dim if self.bottom is None else dim
        self.top = MLP(width_of_d + self.dots.width, hidden, self.num_labels, **deep)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        fields = self.fields(numeric, embeddings)
        if self.bottom is not None:
            dense = self.bottom(numeric, embeddings)
            crossed = self.dots(torch.cat([dense[:, None], fields], dim=1))
        else:
            dense, crossed = fields.flatten(1), self.dots(fields)
        return self.top(torch.cat([dense, crossed], dim=1))
