"""How features meet: first order, second order, dot products, crosses.

Shapes: B examples, F categorical and sequence features, X numeric features, D dim, K width of a flat input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
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
        sums, squares = [], []
        for block in embeddings.blocks:
            flat = block.values.flatten(1)
            sums.append(block.values.sum(1))
            squares.append(torch.linalg.vecdot(flat, flat))
        if self.vectors is not None:
            sums.append(numeric @ self.vectors)
            squares.append(numeric.square() @ self.vectors.square().sum(1))
        total = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
        pairs: Tensor = 0.5 * (torch.linalg.vecdot(total, total) - sum(squares))
        return pairs[:, None]


class PairwiseDots(nn.Module):
    """The dot products of all pairs of fields, each pair once (DLRM, §2.1.3).

    Attributes:
        width: F · (F − 1) / 2.
    """

    pairs: Tensor

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_fields, num_fields, offset=-1)
        self.width = len(rows)
        self.register_buffer("pairs", (rows * num_fields + columns)[None], persistent=False)

    def forward(self, fields: Tensor) -> Tensor:
        """float32[B, F, D] to float32[B, F·(F−1)/2]."""
        dots = torch.bmm(fields, fields.mT).flatten(1)
        # gather, not indexing: its backward is five times as fast
        return dots.gather(1, self.pairs.expand(dots.shape[0], -1))


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
