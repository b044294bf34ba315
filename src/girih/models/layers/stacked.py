"""Several MLPs of one shape, computed together: each layer of all of them is one batched product.

Shapes: B examples, E MLPs, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from girih.models.layers.mlp import MLP, BatchNorm


class StackedMLP(nn.Module):
    """E MLPs, one product a layer for all of them.

    Args:
        members: MLPs of one shape; their linear layers are what these start with.
        dropout: theirs.
        first: whether their first linear layers are here; else they read one input, and are one product elsewhere.

    Attributes:
        weights: float32[E, O, I] of each layer. biases: float32[E · O].
        norms: the batch norm of each layer, over the columns of all MLPs; none where the members have none.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, members: Sequence[MLP], dropout: float, *, first: bool) -> None:
        super().__init__()
        self.num_members, self.first = len(members), first
        self.dropout = nn.Dropout(dropout)
        layers = list(zip(*map(linear_layers, members), strict=True))[0 if first else 1 :]
        self.weights = nn.ParameterList(
            torch.stack([each.weight.detach() for each in layer]) for layer in layers
        )
        self.biases = nn.ParameterList(torch.cat([each.bias.detach() for each in layer]) for layer in layers)
        self.num_activated = sum(isinstance(layer, nn.ReLU) for layer in members[0])
        norms = [layer for layer in members[0] if isinstance(layer, BatchNorm)]
        self.norms = nn.ModuleList(BatchNorm(len(members) * norm.num_features) for norm in norms)

    def forward(self, x: Tensor) -> Tensor:
        """[B, E, I] to [B, E, O]; where the first layers are elsewhere, from their outputs [B, E · O], one MLP after the other."""
        x = x.transpose(0, 1) if self.first else self._activated(self._by_member(x), 0)
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True), 0 if self.first else 1
        ):
            x = torch.baddbmm(bias.view(self.num_members, 1, -1), x, weight.mT)
            if layer < self.num_activated:
                x = self._activated(x, layer)
        return x.transpose(0, 1)

    def _activated(self, x: Tensor, layer: int) -> Tensor:
        """BatchNorm → ReLU → Dropout, [E, B, O]."""
        if self.norms:
            # columns of a wider tensor take several times as long
            x = self._by_member(self.norms[layer](x.transpose(0, 1).flatten(1).contiguous()))
        x = x.relu()
        if self.dropout.p:
            x = self.dropout(x)
        return x

    def _by_member(self, columns: Tensor) -> Tensor:
        """[B, E · O] to [E, B, O]."""
        x: Tensor = columns.unflatten(1, (self.num_members, -1))  # type: ignore[no-untyped-call]
        return x.transpose(0, 1)


def linear_layers(mlp: MLP) -> list[nn.Linear]:
    """The linear layers of an MLP, from its input on."""
    return [layer for layer in mlp if isinstance(layer, nn.Linear)]
