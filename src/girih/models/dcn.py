"""Deep & Cross Networks: DCN (Wang et al., ADKDD 2017) and DCN-V2 (Wang et al., WWW 2021)."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from girih.config.bounds import Count
from girih.errors import ConfigError
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import HIDDEN, MLP, AnyWidths, LayerOptions
from girih.models.model import Model
from girih.models.operators import FieldMLP, VectorCrosses
from girih.schema import Schema


class DCN(Model):
    """logits = Linear([cross(x_0), MLP(x_0)]) with x_0 = [embeddings, numeric] (eq. 1 to 5).

    The cross network returns U cross(x_0), where U is the last layer's columns for it: see ``VectorCrosses``.

    Args:
        schema: the features and labels of the data.
        cross_layers: number of crosses.
        hidden: widths of the MLP's layers; empty for no MLP.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.DCN(schema, cross_layers=2, hidden=[64, 32])
        >>> sum(parameter.numel() for parameter in model.parameters())
        2798
    """

    def __init__(
        self,
        schema: Schema,
        *,
        cross_layers: Count = 3,
        hidden: AnyWidths = HIDDEN,
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(schema)
        width = DenseInput(schema).width
        final = nn.Linear(width + (hidden[-1] if hidden else 0), self.num_labels)
        self.cross = VectorCrosses(schema, cross_layers, final.weight[:, :width])
        self.deep = FieldMLP(schema, hidden, **deep) if hidden else None
        self.final = nn.Linear(hidden[-1], self.num_labels, bias=False) if hidden else None
        self.bias = final.bias
        if self.final is not None:
            self.final.weight = nn.Parameter(final.weight[:, width:].detach().clone())

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        logits = self.cross(numeric, embeddings) + self.bias
        if self.deep is not None and self.final is not None:
            logits = logits + self.final(self.deep(numeric, embeddings))
        return logits


class DCNv2(Model):
    """Crosses with a full matrix W, parallel to the deep network or before it, x_0 = [embeddings, numeric].

    ``parallel``: logits = Linear([cross(x_0), MLP(x_0)]). ``stacked``: logits = Linear(MLP(cross(x_0))). ``rank`` makes
    W = U Vᵀ of this rank.

    Args:
        schema: the features and labels of the data.
        structure: "parallel" or "stacked".
        cross_layers: number of crosses.
        rank: rank of W; None for a full matrix.
        hidden: widths of the MLP's layers; empty for no MLP.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range, or a rank above the width of x_0.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.DCNv2(schema, structure="stacked", rank=4, hidden=[64, 32])
        >>> sum(parameter.numel() for parameter in model.parameters())
        2996
    """

    not_substitutable = (
        "MatrixCross needs all columns of the layer before it, which takes a round of messages per layer; use the model 'dcn',"
        " or strategy 'synchronous'"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        cross_layers: Count = 3,
        rank: Count | None = None,
        hidden: AnyWidths = HIDDEN,
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(schema)
        self.inputs = DenseInput(schema)
        width = self.inputs.width
        if rank is not None and rank > width:
            raise ConfigError(f"rank = {rank}: expected at most {width}, the width of the crosses' input")
        self.cross = nn.ModuleList(MatrixCross(width, rank) for _ in range(cross_layers))
        mlp = MLP(width, hidden, **deep)
        self.deep = mlp if hidden else None
        self.parallel = structure == "parallel"
        both = width + mlp.width if hidden and self.parallel else mlp.width
        self.final = nn.Linear(both, self.num_labels)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        x = x0 = self.inputs(numeric, embeddings)
        for layer in self.cross:
            x = layer(x0, x)
        if self.deep is not None:
            x = torch.cat([x, self.deep(x0)], dim=1) if self.parallel else self.deep(x)
        logits: Tensor = self.final(x)
        return logits


class MatrixCross(nn.Module):
    """x_{l+1} = x_0 ⊙ (W x_l + b) + x_l (DCN-V2, eq. 1), with W = U Vᵀ if it has low rank (eq. 2)."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.narrow = None if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Maps float32[B, K] and float32[B, K] to float32[B, K]."""
        inner = x if self.narrow is None else self.narrow(x)
        return torch.addcmul(x, x0, self.linear(inner))
