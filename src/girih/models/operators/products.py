"""Pairwise products of all fields (DES, Eq. 4 to 6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from girih.models.embeddings import Embeddings
from girih.models.layers.autograd import Context
from girih.models.layers.inputs import DenseInput
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class SecondOrder(SubstitutableOperator):
    """Σ_{i<j} <v_i, v_j> over all fields, as ½ (‖Σ v‖² − Σ ‖v‖²): FM (Rendle 2010), lemma 3.1.

    A field is a feature's pooled embedding, or a numeric value times its learned vector. The partial results are Σ v
    and Σ ‖v‖² over own fields: D + 1 numbers per example.
    """

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.dim, self.columns = dim, dim + 1
        self._numeric = {feature.name: 1 for feature in schema.numeric}
        self.vectors = nn.Parameter(torch.randn(len(schema.numeric), dim) * 0.01) if schema.numeric else None

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns float32[B, D + 1]: the sum of vectors, then the sum of squares."""
        total, square = self._sums(numeric, embeddings)
        return torch.cat([total, square[:, None]], dim=1)

    def combine(self, total: Tensor) -> Tensor:
        """Returns float32[B, 1]."""
        return _pairs(total[:, :-1], total[:, -1])

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the same without joining the two sums."""
        return _pairs(*self._sums(numeric, embeddings))

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the vectors of the remaining numeric features."""
        return self.keep_numeric("vectors", schema)

    def _sums(self, numeric: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        with torch.autocast(numeric.device.type, enabled=False):  # a difference of large sums needs float32
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
    """Returns Σ v and Σ ‖v‖² over fields, [B, F, D] to [B, D] and [B].

    To modes of torch functions this is one function, because they do not see an autograd.Function.
    """
    if has_torch_function_unary(fields):
        seen: tuple[Tensor, Tensor] = handle_torch_function(sums_of, (fields,), fields)
        return seen
    sums: tuple[Tensor, Tensor] = _Sums.apply(fields)  # type: ignore[no-untyped-call]
    return sums


class _Sums(torch.autograd.Function):
    """Σ v and Σ ‖v‖² over fields, [B, F, D] to [B, D] and [B], with a gradient in one pass: Σv' + 2 ‖v‖²' v."""

    @staticmethod
    def forward(ctx: Context, fields: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(fields)
        flat = fields.flatten(1)
        return fields.sum(1), torch.linalg.vecdot(flat, flat)

    @staticmethod
    def backward(ctx: Context, of_sum: Tensor, of_square: Tensor) -> Tensor:
        (fields,) = ctx.saved_tensors
        return torch.addcmul(of_sum[:, None], fields, 2 * of_square[:, None, None])


class VectorCrosses(SubstitutableOperator):
    """U x_L with x_{l+1} = x_0 (x_l · w_l) + b_l + x_l (DCN, eq. 3) and x_0 = [embeddings, numeric].

    Every x_l is α_l x_0 + β_l, with one number α_l per example and β_l = Σ_{j<l} b_j. So x_l · w_l is α_l (x_0 · w_l) +
    β_l · w_l. Crosses therefore only need L + T projections of their input, and no layer's output is computed. The
    partial result is the projections of own columns, and the part of own columns in the constants β_l · w_l and U β_L.

    Args:
        outputs: U, float32[T, K].
    """

    def __init__(self, schema: Schema, num_layers: int, outputs: Tensor) -> None:
        super().__init__()
        self.inputs = DenseInput(schema)
        bound = 1 / math.sqrt(self.inputs.width) if self.inputs.width else 0.0
        self.weights = nn.Parameter(torch.empty(num_layers, self.inputs.width).uniform_(-bound, bound))
        self.biases = nn.Parameter(torch.zeros(num_layers, self.inputs.width))
        self.outputs = nn.Parameter(outputs.detach().clone())
        self.columns = 2 * (num_layers + len(outputs))

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns float32[B, 2 (L + T)]: projections, then constants."""
        projected, constants = self._parts(numeric, embeddings)
        return torch.cat([projected, constants.expand_as(projected)], dim=1)

    def combine(self, total: Tensor) -> Tensor:
        """Returns float32[B, T]."""
        projected, constants = total.chunk(2, dim=1)
        return self._crossed(projected, constants)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the same with one row of constants for all examples."""
        return self._crossed(*self._parts(numeric, embeddings))

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the columns of the remaining features."""
        width = self.inputs.width
        split = ParameterSplit(1, self.inputs.narrow(schema), width)
        return self.keep(dict.fromkeys(("weights", "biases", "outputs"), split))

    def _parts(self, numeric: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        """Returns projections, float32[B, L + T], and constants, float32[1, L + T]."""
        directions = torch.cat([self.weights, self.outputs])
        biases = F.pad(self.biases.cumsum(0), (0, 0, 1, 0))  # [L + 1, K]: β_0 to β_L
        last = biases[-1:].expand(len(self.outputs), -1)
        constants = (torch.cat([biases[:-1], last]) * directions).sum(1)
        with torch.autocast(numeric.device.type, enabled=False):  # products of layers need float32
            return F.linear(self.inputs(numeric, embeddings), directions), constants[None]

    def _crossed(self, projected: Tensor, constants: Tensor) -> Tensor:
        num_layers = len(self.weights)
        scale = torch.ones_like(projected[:, :1])
        for layer in range(num_layers):
            column = slice(layer, layer + 1)
            scale = scale + scale * projected[:, column] + constants[:, column]
        return scale * projected[:, num_layers:] + constants[:, num_layers:]
