"""How features meet: first order, second order, dot products, crosses.

Shapes: B examples, F categorical and sequence features, X numeric features, D dim, K width of a flat input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import lowered
from girih.schema import Schema


class FirstOrder(nn.Module):
    """Σ_f w_f + Σ_x w_x · numeric_x, and one bias if asked: the linear part of LR, FM and their kin.

    The weights of ids lie in tables and start at 0, as those of numeric features do here.
    """

    def __init__(self, schema: Schema, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(schema.numeric))) if schema.numeric else None
        self.bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns float32[B, 1]."""
        total = numeric.new_zeros(numeric.shape[0])
        for block in embeddings.first_order:
            total = total + block.values.flatten(1).sum(1)
        if self.weight is not None:
            total = total + numeric @ self.weight
        if self.bias is not None:
            total = total + self.bias
        return total[:, None]


class SecondOrder(nn.Module):
    """Σ_{i<j} <v_i, v_j> over all fields, as ½ (‖Σ v‖² − Σ ‖v‖²): FM (Rendle 2010), lemma 3.1.

    A field is a feature's pooled embedding, or a numeric value times its learned vector.
    """

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(len(schema.numeric), dim) * 0.01) if schema.numeric else None

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns float32[B, 1]."""
        with torch.autocast(numeric.device.type, enabled=False):  # a difference of large sums wants float32
            sums, squares = [], []
            for block in embeddings.blocks:
                total, square = _Sums.apply(block.values)  # type: ignore[no-untyped-call]
                sums.append(total)
                squares.append(square)
            if self.vectors is not None:
                sums.append(numeric @ self.vectors)
                squares.append(numeric.square() @ self.vectors.square().sum(1))
            total = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
            pairs: Tensor = 0.5 * (torch.linalg.vecdot(total, total) - sum(squares))
        return pairs[:, None]


class _Sums(torch.autograd.Function):
    """Σ v and Σ ‖v‖² over fields, [B, F, D] to [B, D] and [B], with a gradient in one pass: Σv' + 2 ‖v‖²' v."""

    @staticmethod
    def forward(ctx: Any, fields: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(fields)
        flat = fields.flatten(1)
        return fields.sum(1), torch.linalg.vecdot(flat, flat)

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor, of_square: Tensor) -> Tensor:
        (fields,) = ctx.saved_tensors
        return torch.addcmul(of_sum[:, None], fields, 2 * of_square[:, None, None])


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
    def forward(ctx: Any, fields: Tensor, pairs: Tensor, square: Tensor) -> Tensor:
        ctx.save_for_backward(fields, square)
        dots = torch.bmm(fields, fields.mT).flatten(1)
        return _columns(dots, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
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


class VectorCross(nn.Module):
    """x_{l+1} = x_0 (x_l · w) + b + x_l (DCN, eq. 3).

    x_l · w is a sum over columns: all that a layer needs of the columns that it does not hold.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """float32[B, K] and float32[B, K] to float32[B, K]."""
        return torch.addcmul(self.bias + x, x0, (x @ self.weight)[:, None])


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


class CrossNetwork(nn.ModuleList):
    """Cross layers on one x_0."""

    def forward(self, x0: Tensor) -> Tensor:
        """float32[B, K] to float32[B, K]."""
        x = x0
        for layer in self:
            x = layer(x0, x)
        return x
