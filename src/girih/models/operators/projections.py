"""The first fully connected layer after embeddings (DES, Eq. 7 to 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import HIDDEN, MLP, LayerOptions
from girih.models.operators.operator import ParameterSplit, SubstitutableOperator
from girih.schema import Schema


class FieldProjection(SubstitutableOperator):
    """W [embeddings, numeric] + b: the columns of W that read a feature are in the same place as its embedding.

    The partial result has one column per row of W.

    Args:
        linear: W and b, for an input of all features.
        features: the features whose embeddings are read; all categorical and sequence features by default.
        numeric: the numeric features that are read; all by default.
    """

    def __init__(
        self,
        schema: Schema,
        linear: nn.Linear,
        features: Sequence[str] | None = None,
        numeric: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.columns = linear.out_features
        self.inputs = DenseInput(schema, features, numeric, for_products=True)
        self.weight, self.bias = linear.weight, linear.bias

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns [B, outputs] of own columns."""
        return F.linear(self.flat(numeric, embeddings), self.weight)

    def combine(self, total: Tensor) -> Tensor:
        """Returns [B, outputs]."""
        return total if self.bias is None else total + self.bias

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Computes one product that includes the bias."""
        return F.linear(self.flat(numeric, embeddings), self.weight, self.bias)

    def flat(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the input of W: own columns, side by side."""
        return self.inputs(numeric, embeddings)

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the columns of the remaining features."""
        width = self.inputs.width
        return self.keep({"weight": ParameterSplit(1, self.inputs.narrow(schema), width)})


class FieldMLP(MLP):
    """An MLP that reads features: its first layer is a :class:`FieldProjection`. It takes the arguments of both.

    Args:
        first: makes the first layer from the linear layer that it replaces; more_inputs: columns that it reads in
            addition to features.

    Raises:
        ValueError: neither ``hidden`` nor ``outputs``, so there is no layer.
    """

    def __init__(
        self,
        schema: Schema,
        hidden: tuple[int, ...] = HIDDEN,
        outputs: int | None = None,
        *,
        features: Sequence[str] | None = None,
        numeric: Sequence[str] | None = None,
        first: Callable[[nn.Linear], FieldProjection] | None = None,
        more_inputs: int = 0,
        **layers: Unpack[LayerOptions],
    ) -> None:
        width = DenseInput(schema, features, numeric).width + more_inputs
        super().__init__(width, hidden, outputs, **layers)
        linear = next(iter(self), None)
        if not isinstance(linear, nn.Linear):
            raise ValueError("expected at least one layer: hidden widths, or outputs")
        self[0] = first(linear) if first else FieldProjection(schema, linear, features, numeric)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:  # type: ignore[override]
        """Maps float32[B, X] and embeddings to [B, width]."""
        first, *others = self
        x: Tensor = first(numeric, embeddings)
        for layer in others:
            x = layer(x)
        return x


class AttendedProjection(FieldProjection):
    """W [embeddings, numeric, interests] + b. An interest is the result of attention to a history for its target.

    A history, its target and their attention are in one place, so that an interest is computed in the place of its
    columns of W.

    Args:
        pairs: (history, target) of each interest; attention: one per pair, with the dim of the interest.
    """

    def __init__(
        self,
        schema: Schema,
        linear: nn.Linear,
        features: Sequence[str],
        pairs: Sequence[tuple[str, str]],
        attention: nn.ModuleList,
    ) -> None:
        super().__init__(schema, linear, features)
        self.attention = attention
        self.pairs = dict(enumerate(pairs))
        dims = {feature.name: schema.dim_of(feature) for feature in schema.sparse}
        self.inputs.widths |= {history: dims[history] for history, _ in pairs}

    @property
    def colocated_features(self) -> tuple[tuple[str, ...], ...]:
        """Each history and its target."""
        return tuple(self.pairs.values())

    def flat(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns own columns, followed by own interests."""
        interests = [
            self.attention[number](embeddings[target], embeddings.sequences[history])
            for number, (history, target) in self.pairs.items()
        ]
        return self.inputs(numeric, embeddings, *interests)

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the columns of the remaining features and interests, and their attention."""
        splits = super().narrow(schema)
        self.pairs = {number: pair for number, pair in self.pairs.items() if pair[0] in self.inputs.widths}
        units: dict[str, ParameterSplit] = {}
        for name, parameter in self.attention.named_parameters(prefix="attention"):
            here = int(name.split(".")[1]) in self.pairs
            units[name] = ParameterSplit(0, torch.arange(len(parameter) if here else 0), len(parameter))
        return splits | self.keep(units)
