"""DLRM (Naumov et al., 2019)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from girih.models import checks
from girih.models.embeddings import Embeddings
from girih.models.layers.autograd import Context
from girih.models.layers.inputs import lowered
from girih.models.layers.mlp import HIDDEN, MLP, AnyWidths, LayerOptions
from girih.models.model import Model
from girih.models.operators import FieldMLP, Fields
from girih.schema import Schema


class DLRM(Model):
    """logits = top([d, <f_i, f_j> for all i < j]) with d = bottom(numeric), fields f = (d, embeddings).

    Without numeric features there is neither bottom nor d; the paper does not consider this case. The top then reads
    the embeddings instead of d, because dots alone lose the information of single features.

    All features have one dim.

    Args:
        schema: the features and labels of the data.
        hidden: widths of the top's layers.
        bottom_hidden: widths of the bottom's layers before its last one, whose width is dim.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range, or features of different dims.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.DLRM(schema, bottom_hidden=[32], hidden=[64, 32])
        >>> sum(parameter.numel() for parameter in model.parameters())
        3081
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
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        fields = self.fields(numeric, embeddings)
        if self.bottom is not None:
            dense = self.bottom(numeric, embeddings)
            crossed = self.dots(torch.cat([dense[:, None], fields], dim=1))
        else:
            dense, crossed = fields.flatten(1), self.dots(fields)
        return self.top(torch.cat([dense, crossed], dim=1))


class PairwiseDots(nn.Module):
    """The dot products of all pairs of fields, each pair once (DLRM, §2.1.3).

    Attributes:
        width: F · (F − 1) / 2.
    """

    pairs: Tensor
    square: Tensor

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_fields, num_fields, offset=-1)
        self.width = len(rows)
        square = torch.zeros(num_fields, num_fields, dtype=torch.int64)
        square[rows, columns] = square[columns, rows] = torch.arange(self.width)
        self.register_buffer("pairs", (rows * num_fields + columns)[None], persistent=False)
        self.register_buffer("square", square.view(1, -1), persistent=False)

    def forward(self, fields: Tensor) -> Tensor:
        """Maps float32[B, F, D] to float32[B, F·(F−1)/2]."""
        if self.width == 0:
            return fields.flatten(1)[:, :0]
        dots: Tensor = _Dots.apply(lowered(fields), self.pairs, self.square)  # type: ignore[no-untyped-call]
        return dots


class _Dots(torch.autograd.Function):
    """The lower triangle of V Vᵀ.

    Its gradient is one product, S V, where S is symmetric with a diagonal of 0. Torch alone derives two products, two
    transposed copies, a scatter and a sum.
    """

    @staticmethod
    def forward(ctx: Context, fields: Tensor, pairs: Tensor, square: Tensor) -> Tensor:
        ctx.save_for_backward(fields, square)
        dots = torch.bmm(fields, fields.mT).flatten(1)
        return _columns(dots, pairs)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        fields, square = ctx.saved_tensors
        num_fields = fields.shape[1]
        symmetric = _columns(gradient, square).view(-1, num_fields, num_fields)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric, fields), None, None


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """Returns values[:, index] by a gather. Indexing takes three times as long."""
    index = index.expand(values.shape[0], -1)
    if values.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return values.gather(1, index)
    return (
        values.view(torch.int16).gather(1, index).view(torch.bfloat16)
    )  # as bfloat16, the gather takes twice as long
