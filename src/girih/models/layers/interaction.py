"""Interactions of features that are all at hand: dot products, crosses.

Shapes: B examples, F fields, D dim, K width of a flat input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models.layers.autograd import Context
from girih.models.layers.inputs import lowered


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
        """float32[B, F, D] to float32[B, F·(F−1)/2]."""
        if self.width == 0:
            return fields.flatten(1)[:, :0]
        dots: Tensor = _Dots.apply(lowered(fields), self.pairs, self.square)  # type: ignore[no-untyped-call]
        return dots


class _Dots(torch.autograd.Function):
    """The lower triangle of V Vᵀ. Its gradient is one product, S V with S symmetric and 0 on its diagonal;
    what torch derives by itself is two products, two transposed copies, a scatter and a sum."""

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
    """values[:, index], by a gather: indexing takes three times as long."""
    index = index.expand(values.shape[0], -1)
    if values.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return values.gather(1, index)
    return (
        values.view(torch.int16).gather(1, index).view(torch.bfloat16)
    )  # as bfloat16 it takes twice as long


class MatrixCross(nn.Module):
    """x_{l+1} = x_0 ⊙ (W x_l + b) + x_l (DCN-V2, eq. 1), with W = U Vᵀ of low rank if asked (eq. 2)."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.narrow = None if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """float32[B, K] and float32[B, K] to float32[B, K]."""
        inner = x if self.narrow is None else self.narrow(x)
        return torch.addcmul(x, x0, self.linear(inner))
