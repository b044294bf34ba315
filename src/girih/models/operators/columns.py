"""Columns of features in a flat input, [embeddings, numeric], and of those that a smaller schema has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from girih.schema import Schema


def numeric_places(schema: Schema, smaller: Schema) -> Tensor:
    """The places of a smaller schema's numeric features among a schema's, int64."""
    kept = {feature.name for feature in smaller.numeric}
    places = [place for place, feature in enumerate(schema.numeric) if feature.name in kept]
    return torch.tensor(places, dtype=torch.int64)


def embedding_places(schema: Schema, features: Sequence[str], kept: Sequence[str]) -> Tensor:
    """The columns of some features' embeddings where those of ``features`` lie side by side, int64."""
    dims = {feature.name: schema.dim_of(feature) for feature in schema.sparse}
    places: list[int] = []
    start = 0
    for name in features:
        if name in kept:
            places += range(start, start + dims[name])
        start += dims[name]
    return torch.tensor(places, dtype=torch.int64)


def kept_of(features: Sequence[str], smaller: Schema) -> tuple[str, ...]:
    """Those of some features that a smaller schema has, in their order."""
    names = {feature.name for feature in smaller.sparse}
    return tuple(name for name in features if name in names)


def input_places(schema: Schema, features: Sequence[str], smaller: Schema) -> Tensor:
    """The columns of a flat input that a smaller schema's features fill, int64."""
    width = sum(schema.dim_of(feature) for feature in schema.sparse if feature.name in features)
    embedded = embedding_places(schema, features, kept_of(features, smaller))
    return torch.cat([embedded, width + numeric_places(schema, smaller)])
