"""The cross network of DCN by projections of its input (DES §4, "Extending to General Models").

Shapes: B examples, K width of the flat input, L cross layers, T outputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class VectorCrosses(SubstitutableOperator):
    """U x_L with x_{l+1} = x_0 (x_l · w_l) + b_l + x_l (DCN, eq. 3) and x_0 = [embeddings, numeric].

    Every x_l is α_l x_0 + β_l, with one number α_l an example and β_l = Σ_{j<l} b_j. So x_l · w_l is α_l (x_0 · w_l)
    + β_l · w_l, and all that crosses need of their input are L + T projections of it; no layer's output is ever made.
    The partial result is those of own columns, and own columns' part of the constants β_l · w_l and U β_L.

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
        """float32[B, 2 (L + T)]: projections, then constants."""
        projected, constants = self._parts(numeric, embeddings)
        return torch.cat([projected, constants.expand_as(projected)], dim=1)

    def combine(self, total: Tensor) -> Tensor:
        """float32[B, T]."""
        projected, constants = total.chunk(2, dim=1)
        return self._crossed(projected, constants)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """The same with one row of constants for all examples."""
        return self._crossed(*self._parts(numeric, embeddings))

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Columns of the features that stay."""
        width = self.inputs.width
        split = ParameterSplit(1, self.inputs.narrow(schema), width)
        return self.keep(dict.fromkeys(("weights", "biases", "outputs"), split))

    def _parts(self, numeric: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        """float32[B, L + T] and float32[1, L + T]."""
        directions = torch.cat([self.weights, self.outputs])
        biases = F.pad(self.biases.cumsum(0), (0, 0, 1, 0))  # [L + 1, K]: β_0 to β_L
        last = biases[-1:].expand(len(self.outputs), -1)
        constants = (torch.cat([biases[:-1], last]) * directions).sum(1)
        with torch.autocast(numeric.device.type, enabled=False):  # what layers multiply up wants float32
            return F.linear(self.inputs(numeric, embeddings), directions), constants[None]

    def _crossed(self, projected: Tensor, constants: Tensor) -> Tensor:
        num_layers = len(self.weights)
        scale = torch.ones_like(projected[:, :1])
        for layer in range(num_layers):
            column = slice(layer, layer + 1)
            scale = scale + scale * projected[:, column] + constants[:, column]
        return scale * projected[:, num_layers:] + constants[:, num_layers:]
