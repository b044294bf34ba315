"""Multi-gate Mixture-of-Experts (Ma et al., KDD 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.options import integer
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP, StackedMLP, linear_layers
from girih.models.model import Model
from girih.models.operators import FieldProjection
from girih.schema import Schema


class MMoE(Model):
    """logit_t = tower_t(Σ_e softmax(W_t x)_e · expert_e(x)) with x = [embeddings, numeric] (eq. 6, 7).

    A gate and a tower for each label; the experts are theirs together. One product of x makes the first layers of all
    experts and all gates.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        num_experts: int = 4,
        expert_hidden: tuple[int, ...] = (256, 128),
        tower_hidden: tuple[int, ...] = (64,),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(schema, needs.EMBEDDING)
        integer("num_experts", num_experts)
        expert_hidden = checks.widths("expert_hidden", expert_hidden)
        tower_hidden = checks.widths("tower_hidden", tower_hidden, may_be_empty=True)
        width = DenseInput(schema).width
        experts = [
            MLP(width, expert_hidden, dropout=dropout, batch_norm=batch_norm) for _ in range(num_experts)
        ]
        gates = nn.Linear(width, self.num_labels * num_experts, bias=False)
        self.first = ExpertsAndGates(schema, [linear_layers(expert)[0] for expert in experts], gates)
        self.experts = StackedMLP(experts, dropout, first=False)
        towers = [
            MLP(expert_hidden[-1], tower_hidden, 1, dropout=dropout, batch_norm=batch_norm)
            for _ in range(self.num_labels)
        ]
        self.towers = StackedMLP(towers, dropout, first=True)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        first = self.first(numeric, embeddings)
        of_experts, of_gates = first.split(self.first.widths, dim=1)  # type: ignore[no-untyped-call]
        gates = of_gates.unflatten(1, (self.num_labels, -1)).softmax(dim=2)
        mixed = torch.bmm(gates, self.experts(of_experts))
        return self.towers(mixed).squeeze(2)


class ExpertsAndGates(FieldProjection):
    """The first layers of all experts with their biases, and the gates, which have none, by one product.

    Attributes:
        widths: columns of the experts, and of the gates.
    """

    def __init__(self, schema: Schema, experts: Sequence[nn.Linear], gates: nn.Linear) -> None:
        layers = [*experts, gates]
        width = sum(layer.out_features for layer in layers)
        joined = nn.Linear(gates.in_features, width, bias=False, device="meta")
        joined.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        super().__init__(schema, joined)
        self.bias = nn.Parameter(torch.cat([expert.bias.detach() for expert in experts]))
        self.widths = [width - gates.out_features, gates.out_features]

    def combine(self, total: Tensor) -> Tensor:
        """[B, Σ widths]."""
        return total + self._biases()

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """One product with the biases in it."""
        return F.linear(self.flat(numeric, embeddings), self.weight, self._biases())

    def _biases(self) -> Tensor:
        return F.pad(self.bias, (0, self.widths[1]))
