"""The flat input of a dense network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.schema import Schema


def lowered(values: Tensor) -> Tensor:
    """``values`` as autocast casts them for a matrix product; as they are outside of it.

    To cast the parts before they are joined is cheaper than autocast's way, to join and then to cast.
    """
    kind = values.device.type
    return values.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else values


class DenseInput(nn.Module):
    """Pooled embeddings in the schema's order, then numeric features, side by side.

    The order never depends on how tables are packed, so parameters behind it fit any packing.

    Args:
        features: the features whose embeddings are read; all categorical and sequence ones by default.
        for_products: linear layers alone read it, so that autocast's dtype serves.

    Attributes:
        width: the sum of the features' dims plus one for each numeric feature.
    """

    def __init__(
        self, schema: Schema, features: Sequence[str] | None = None, *, for_products: bool = False
    ) -> None:
        super().__init__()
        names = [f.name for f in schema.sparse] if features is None else list(features)
        dims = {f.name: schema.dim_of(f) for f in schema.sparse}
        self.features = tuple(names)
        self.for_products = for_products
        self.width = sum(dims[name] for name in names) + len(schema.numeric)

    def forward(self, numeric: Tensor, embeddings: Embeddings, *more: Tensor) -> Tensor:
        """Returns float32[B, width], and the columns of ``more`` after it."""
        parts = [view.flatten(1) for view in embeddings.views(self.features)] if self.features else []
        parts += [part for part in (numeric, *more) if part.shape[1]]
        if self.for_products:
            parts = [lowered(part) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
