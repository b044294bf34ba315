"""Pairwise products of all fields (DES, Eq. 4 to 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import places_of
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class SecondOrder(SubstitutableOperator):
    """Σ_{i<j} <v_i, v_j> over all fields, as ½ (‖Σ v‖² − Σ ‖v‖²): FM (Rendle 2010), lemma 3.1.

    A field is a feature's pooled embedding, or a numeric value times its learned vector. The partial results are
    Σ v and Σ ‖v‖² over own fields: D + 1 numbers an example.
    """

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.dim, self.columns = dim, dim + 1
        self._numeric = {feature.name: 1 for feature in schema.numeric}
        self.vectors = nn.Parameter(torch.randn(len(schema.numeric), dim) * 0.01) if schema.numeric else None

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, D + 1]: the sum of vectors, then the sum of squares."""
        total, square = self._sums(numeric, embeddings)
        return torch.cat([total, square[:, None]], dim=1)

    def combine(self, total: Tensor) -> Tensor:
        """float32[B, 1]."""
        return _pairs(total[:, :-1], total[:, -1])

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """The same without joining the two sums."""
        return _pairs(*self._sums(numeric, embeddings))

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Vectors of the numeric features that stay."""
        if self.vectors is None:
            return {}
        return self.keep({"vectors": ParameterSplit(0, places_of(self._numeric, schema), len(self.vectors))})

    def _sums(self, numeric: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        with torch.autocast(numeric.device.type, enabled=False):  # a difference of large sums wants float32
            sums, squares = [], []
            for block in embeddings.blocks:
                total, square = sums_of(block.values)
                sums.append(total)
                squares.append(square)
            if self.vectors is not None:
                sums.append(numeric @ self.vectors)
                squares.append(numeric.square() @ self.vectors.square().sum(1))
            if not sums:
                return numeric.new_zeros(len(numeric), self.dim), numeric.new_zeros(len(numeric))
            total = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
            return total, sum(squares[1:], start=squares[0])


def _pairs(total: Tensor, square: Tensor) -> Tensor:
    with torch.autocast(total.device.type, enabled=False):
        pairs: Tensor = 0.5 * (torch.linalg.vecdot(total, total) - square)
    return pairs[:, None]


def sums_of(fields: Tensor) -> tuple[Tensor, Tensor]:
    """Σ v and Σ ‖v‖² over fields, [B, F, D] to [B, D] and [B]; one torch function to modes, which see no autograd.Function."""
    if has_torch_function_unary(fields):
        seen: tuple[Tensor, Tensor] = handle_torch_function(sums_of, (fields,), fields)
        return seen
    sums: tuple[Tensor, Tensor] = _Sums.apply(fields)  # type: ignore[no-untyped-call]
    return sums


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
