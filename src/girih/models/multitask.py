"""Models of several labels: MMoE (Ma et al., KDD 2018), and ESMM (Ma et al., SIGIR 2018) for events after a click."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import Count
from girih.models import checks
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import (
    MLP,
    AnyWidths,
    DeepOptions,
    LayerOptions,
    StackedMLP,
    Widths,
    linear_layers,
)
from girih.models.model import Model
from girih.models.operators import FieldMLP, FieldProjection
from girih.schema import Schema


class MMoE(Model):
    """logit_t = tower_t(Σ_e softmax(W_t x)_e · expert_e(x)) with x = [embeddings, numeric] (eq. 6, 7).

    Each label has a gate and a tower. All labels share the experts. One product of x computes the first layers of all
    experts and all gates.

    Args:
        schema: the features and labels of the data.
        num_experts: number of experts.
        expert_hidden: widths of each expert's layers, at least one.
        tower_hidden: widths of each tower's layers before its last.
        deep: ``dropout``, a probability in [0, 1) (default 0), and ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range.

    Examples:
        >>> import girih
        >>> schema = girih.Schema(
        ...     [girih.Categorical(name="user", dim=8)], labels=["clicked", "bought"]
        ... )
        >>> model = girih.models.MMoE(
        ...     schema, num_experts=2, expert_hidden=[64, 32], tower_hidden=[16]
        ... )
        >>> model.num_labels
        2
    """

    def __init__(
        self,
        schema: Schema,
        *,
        num_experts: Count = 4,
        expert_hidden: Widths = (256, 128),
        tower_hidden: AnyWidths = (64,),
        **deep: Unpack[LayerOptions],
    ) -> None:
        super().__init__(schema)
        width, dropout = DenseInput(schema).width, deep.get("dropout", 0.0)
        experts = [MLP(width, expert_hidden, **deep) for _ in range(num_experts)]
        gates = nn.Linear(width, self.num_labels * num_experts, bias=False)
        self.first = ExpertsAndGates(schema, [linear_layers(expert)[0] for expert in experts], gates)
        self.experts = StackedMLP(experts, dropout, first=False)
        towers = [MLP(expert_hidden[-1], tower_hidden, 1, **deep) for _ in range(self.num_labels)]
        self.towers = StackedMLP(towers, dropout, first=True)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        first = self.first(numeric, embeddings)
        of_experts, of_gates = first.split(self.first.widths, dim=1)  # type: ignore[no-untyped-call]
        gates = of_gates.unflatten(1, (self.num_labels, -1)).softmax(dim=2)
        mixed = torch.bmm(gates, self.experts(of_experts))
        return self.towers(mixed).squeeze(2)


class ExpertsAndGates(FieldProjection):
    """The first layers of all experts with their biases, and the gates without biases, as one product.

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
        """Returns [B, Σ widths]."""
        return total + self._biases()

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Computes one product that includes the biases."""
        return F.linear(self.flat(numeric, embeddings), self.weight, self._biases())

    def _biases(self) -> Tensor:
        return F.pad(self.bias, (0, self.widths[1]))


class ESMM(Model):
    """Entire Space Multi-task Model: pCTCVR = pCTR · pCVR (eq. 1), with two networks on shared embeddings.

    pCTR = σ(a) and pCVR = σ(b). The first label is the click. The second label is an event after the click, and is 1
    only if the first is 1. Both losses are over all impressions (eq. 3), so pCVR is learned without the bias of a
    sample of clicks. The second output is the logit of pCTCVR. pCVR is the quotient of the two predictions.

    Args:
        schema: the features and labels of the data.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: not two labels with binary cross-entropy.

    Examples:
        >>> import girih
        >>> schema = girih.Schema(
        ...     [girih.Categorical(name="user", dim=8)], labels=["clicked", "bought"]
        ... )
        >>> model = girih.models.ESMM(schema, hidden=[64, 32])
        >>> model.num_labels
        2
    """

    def __init__(self, schema: Schema, **deep: Unpack[DeepOptions]) -> None:
        super().__init__(schema)
        checks.two_probabilities("esmm", schema)
        self.click, self.after = (FieldMLP(schema, outputs=1, **deep) for _ in range(2))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits of pCTR and pCTCVR, float32[B, 2]."""
        a, b = self.click(numeric, embeddings), self.after(numeric, embeddings)
        return torch.cat([a, logit_of_product(a, b)], dim=1)


def logit_of_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the logit of σ(a)·σ(b), finite for all finite a and b, of one shape.

    It follows from 1/σ(a)σ(b) − 1 = e⁻ᵃ + e⁻ᵇ + e⁻ᵃ⁻ᵇ.
    """
    return -torch.logsumexp(torch.stack([-a, -b, -a - b]), dim=0)
