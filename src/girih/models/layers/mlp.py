"""The multi-layer perceptron of all models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from girih import config
from girih.config.bounds import Fraction

HIDDEN = (400, 400, 400)
"""The widths of a deep network's hidden layers by default."""


class LayerWidths(NamedTuple):
    """Accepts lists of layer widths, as an annotation of options."""

    least: int

    def holds(self, widths: Sequence[int]) -> bool:
        """Returns whether there are enough widths, each at least 1."""
        return len(widths) >= self.least and all(width >= 1 for width in widths)

    def text(self, kind: object) -> str:
        """Describes the accepted values, for errors."""
        least = " and at least one of them" if self.least else ""
        return f"a list of integers of at least 1{least}, as in [400, 400]"


Widths = Annotated[tuple[int, ...], LayerWidths(1)]
AnyWidths = Annotated[tuple[int, ...], LayerWidths(0)]


class LayerOptions(TypedDict, total=False):
    """Options of all layers of a network; see :class:`MLP`."""

    dropout: Fraction
    batch_norm: bool


class DeepOptions(LayerOptions, total=False):
    """Options of all layers, and the widths of the hidden layers, by default :data:`HIDDEN`."""

    hidden: Widths


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that uses the running statistics if a training batch has only one example.

    One example has no variance, and the last batch of an epoch may have just one.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps float32[B, D] to float32[B, D]."""
        if self.training and lacks_variance(input):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(input)


def lacks_variance(input: Tensor) -> bool:
    """Returns whether a training batch has at most one example, so that it cannot be normalised alone.

    A mode of torch functions may know of more examples elsewhere, see :class:`girih.dense.batch_norm.GlobalBatchNorm`.
    """
    if has_torch_function_unary(input):
        known: bool = handle_torch_function(lacks_variance, (input,), input)
        return known
    return input.shape[0] < 2


class MLP(nn.Sequential):
    """Blocks of Linear → BatchNorm (option) → ReLU → Dropout, then a plain Linear to ``outputs``.

    Without ``outputs``, it ends with the last block.

    Args:
        hidden: widths of the hidden layers. Default: ``(400, 400, 400)``.
        dropout: the share of each hidden layer's outputs that training sets to 0. Default: 0.0.
        batch_norm: normalises the inputs of each ReLU over the batch. Default: False.

    Attributes:
        width: of the output.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...] = HIDDEN,
        outputs: int | None = None,
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        config.build(Fraction, dropout, "dropout")
        config.build(bool, batch_norm, "batch_norm")
        layers: list[nn.Module] = []
        width = inputs
        for size in hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm:
                layers.append(BatchNorm(size))
            layers.append(nn.ReLU(inplace=True))  # no earlier layer keeps its own output
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = size
        if outputs is not None:
            layers.append(nn.Linear(width, outputs))
            width = outputs
        super().__init__(*layers)
        self.width = width


class StackedMLP(nn.Module):
    """E MLPs, with one product per layer for all of them.

    Args:
        members: MLPs of one shape; their linear layers give the initial values.
        dropout: the members' dropout.
        first: True if this module includes their first linear layers. Otherwise these layers read one shared input, and
            are one product elsewhere.

    Attributes:
        weights: float32[E, O, I] of each layer. biases: float32[E · O].
        norms: the batch norm of each layer, over the columns of all MLPs; empty if the members have none.
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
        """Maps [B, E, I] to [B, E, O].

        Without ``first``, the input is the first layers' outputs [B, E · O], one MLP after the other.
        """
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
            # normalizing columns of a wider tensor takes several times as long
            x = self._by_member(self.norms[layer](x.transpose(0, 1).flatten(1).contiguous()))
        x = x.relu()
        if self.dropout.p:
            x = self.dropout(x)
        return x

    def _by_member(self, columns: Tensor) -> Tensor:
        """Maps [B, E · O] to [E, B, O]."""
        x: Tensor = columns.unflatten(1, (self.num_members, -1))  # type: ignore[no-untyped-call]
        return x.transpose(0, 1)


def linear_layers(mlp: MLP) -> list[nn.Linear]:
    """Returns the linear layers of an MLP, starting at its input."""
    return [layer for layer in mlp if isinstance(layer, nn.Linear)]
