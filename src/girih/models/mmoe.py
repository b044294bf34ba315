"""Multi-gate Mixture-of-Experts (Ma et al., KDD 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.config.checks import integer
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP
from girih.models.model import Model
from girih.models.operators import FieldMLP, FieldProjection
from girih.schema import Schema


class MMoE(Model):
    """logit_t = tower_t(Σ_e softmax(W_t x)_e · expert_e(x)) with x = [embeddings, numeric] (eq. 6, 7).

    A gate and a tower for each label; the experts are theirs together.
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
        self.experts = nn.ModuleList(
            FieldMLP(schema, expert_hidden, dropout=dropout, batch_norm=batch_norm)
            for _ in range(num_experts)
        )
        width = DenseInput(schema).width
        self.gates = FieldProjection(schema, nn.Linear(width, self.num_labels * num_experts, bias=False))
        self.towers = nn.ModuleList(
            MLP(expert_hidden[-1], tower_hidden, 1, dropout=dropout, batch_norm=batch_norm)
            for _ in range(self.num_labels)
        )

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        opinions = torch.stack([expert(numeric, embeddings) for expert in self.experts], dim=1)
        gates = self.gates(numeric, embeddings).view(-1, len(self.towers), len(self.experts)).softmax(dim=2)
        mixed = torch.bmm(gates, opinions)
        return torch.cat([tower(mixed[:, label]) for label, tower in enumerate(self.towers)], dim=1)
