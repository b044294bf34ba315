"""The first fully connected layer behind embeddings and interests, as DIN has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.operators.field_projection import FieldProjection
from girih.models.operators.operator import ParameterSplit
from girih.schema import Schema


class AttendedProjection(FieldProjection):
    """W [embeddings, numeric, interests] + b; an interest is what attention makes of a history for its target.

    A history, its target and their attention sit together, so that an interest is made where its columns of W are.

    Args:
        pairs: (history, target) of each interest; attention: of each pair, whose dims are the interests'.
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
        """Own columns, and behind them the interests that are made here."""
        interests = [
            self.attention[number](embeddings[target], embeddings.sequences[history])
            for number, (history, target) in self.pairs.items()
        ]
        return self.inputs(numeric, embeddings, *interests)

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Columns of the features and interests that stay, and their attention."""
        splits = super().narrow(schema)
        self.pairs = {number: pair for number, pair in self.pairs.items() if pair[0] in self.inputs.widths}
        units: dict[str, ParameterSplit] = {}
        for name, parameter in self.attention.named_parameters(prefix="attention"):
            here = int(name.split(".")[1]) in self.pairs
            units[name] = ParameterSplit(0, torch.arange(len(parameter) if here else 0), len(parameter))
        return splits | self.keep(units)
