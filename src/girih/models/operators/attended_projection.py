"""The first fully connected layer behind embeddings and interests, as DIN has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.models.operators.field_projection import FieldProjection
from girih.models.operators.operator import Split
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
        self._dims = [dims[history] for history, _ in pairs]

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, outputs] of own columns."""
        if not self.weight.shape[1]:
            return numeric.new_zeros(len(numeric), self.columns)
        return F.linear(self._inputs(numeric, embeddings), self.weight)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """One product with the bias in it."""
        return F.linear(self._inputs(numeric, embeddings), self.weight, self.bias)

    @property
    def colocated_features(self) -> tuple[tuple[str, ...], ...]:
        """Each history and its target."""
        return tuple(self.pairs.values())

    def narrow(self, schema: Schema) -> dict[str, Split]:
        """Columns of the features and interests that stay, and their attention."""
        names = {feature.name for feature in schema.sparse}
        own = [number for number, pair in self.pairs.items() if names >= set(pair)]
        start = self.inputs.width
        places: list[int] = []
        for number, dim in enumerate(self._dims):
            if number in own:
                places += range(start, start + dim)
            start += dim
        weight = self.weight.data
        features = super().narrow(schema)["weight"].places
        split = Split(1, torch.cat([features, torch.tensor(places, dtype=torch.int64)]), weight.shape[1])
        self.weight.data = weight[:, split.places]
        splits = {"weight": split}
        for name, parameter in self.attention.named_parameters(prefix="attention"):
            here = int(name.split(".")[1]) in own
            kept = torch.arange(len(parameter) if here else 0)
            splits[name] = Split(0, kept, len(parameter))
            parameter.data = parameter.data[kept]
        self.pairs = {number: self.pairs[number] for number in own}
        return splits

    def _inputs(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        interests = [
            self.attention[number](embeddings[target], embeddings.sequences[history])
            for number, (history, target) in self.pairs.items()
        ]
        x: Tensor = self.inputs(numeric, embeddings, *interests)
        return x
