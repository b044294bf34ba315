"""DCN-V2 (Wang et al., WWW 2021)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from girih.config.options import integer
from girih.errors import ConfigError, nearest
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.interaction import MatrixCross
from girih.models.layers.mlp import MLP
from girih.models.model import Model
from girih.schema import Schema


class DCNv2(Model):
    """Crosses with a whole matrix W, beside the deep network or before it, x_0 = [embeddings, numeric].

    ``parallel``: logits = Linear([cross(x_0), MLP(x_0)]). ``stacked``: logits = Linear(MLP(cross(x_0))).
    ``rank`` makes W = U Vᵀ of that rank. ``hidden = ()`` leaves the cross network alone.
    """

    not_substitutable = (
        "MatrixCross needs all columns of the layer before it, so a round of messages a layer; use the model 'dcn',"
        " or strategy 'synchronous'"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        cross_layers: int = 3,
        rank: int | None = None,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(schema, needs.EMBEDDING)
        integer("cross_layers", cross_layers)
        hidden = checks.widths("hidden", hidden, may_be_empty=True)
        if structure not in ("parallel", "stacked"):
            raise ConfigError(f"structure = {structure!r}{nearest(structure, ('parallel', 'stacked'))}")
        self.inputs = DenseInput(schema)
        width = self.inputs.width
        integer("rank", rank, or_none=True)
        if rank is not None and rank > width:
            raise ConfigError(f"rank = {rank}: expected at most {width}, the width of the crosses' input")
        self.cross = nn.ModuleList(MatrixCross(width, rank) for _ in range(cross_layers))
        deep = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm)
        self.deep = deep if hidden else None
        self.parallel = structure == "parallel"
        both = width + deep.width if hidden and self.parallel else deep.width
        self.final = nn.Linear(both, self.num_labels)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        x = x0 = self.inputs(numeric, embeddings)
        for layer in self.cross:
            x = layer(x0, x)
        if self.deep is not None:
            x = torch.cat([x, self.deep(x0)], dim=1) if self.parallel else self.deep(x)
        logits: Tensor = self.final(x)
        return logits
