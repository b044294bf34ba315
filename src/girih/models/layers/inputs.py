"""The flat input of a dense network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from girih.models.embeddings import Embeddings
from girih.schema import Schema


def lowered(values: Tensor) -> Tensor:
    """Casts ``values`` as autocast casts the inputs of a matrix product. Returns them unchanged without autocast.

    To cast the parts before they are joined is cheaper than autocast's way, which casts the joined tensor.
    """
    kind = values.device.type
    return values.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else values


def places_of(widths: Mapping[str, int], schema: Schema) -> Tensor:
    """Returns the columns of a schema's features among the columns of all ``widths``, int64."""
    names = set(schema.names)
    owners = [name for name, width in widths.items() for _ in range(width)]
    return torch.tensor([place for place, name in enumerate(owners) if name in names], dtype=torch.int64)


class DenseInput(nn.Module):
    """Pooled embeddings in the schema's order, then numeric features, side by side.

    The order does not depend on the packing of tables, so parameters that read this input fit any packing.

    Args:
        features: the features whose embeddings are read; all categorical and sequence features by default.
        numeric: the numeric features that are read; all by default.
        for_products: only linear layers read it, so it may have autocast's dtype.

    Attributes:
        widths: the number of columns of each feature, numeric features included; ``width`` is their sum.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        schema: Schema,
        features: Sequence[str] | None = None,
        numeric: Sequence[str] | None = None,
        *,
        for_products: bool = False,
    ) -> None:
        super().__init__()
        dims = {feature.name: schema.dim_of(feature) for feature in schema.sparse}
        self.features = tuple(dims if features is None else features)
        self._numeric = tuple((f.name for f in schema.numeric) if numeric is None else numeric)
        self._columns = _columns_of(self._numeric, schema)
        self.widths = {name: dims[name] for name in self.features} | dict.fromkeys(self._numeric, 1)
        self.for_products = for_products

    @property
    def width(self) -> int:
        """The sum of the features' dims plus one for each numeric feature."""
        return sum(self.widths.values())

    def narrow(self, schema: Schema) -> Tensor:
        """Restricts the input to the features of a smaller schema. Returns the columns that stay, int64."""
        places, names = places_of(self.widths, schema), set(schema.names)
        self.widths = {name: width for name, width in self.widths.items() if name in names}
        self.features = tuple(name for name in self.features if name in names)
        self._numeric = tuple(name for name in self._numeric if name in names)
        self._columns = _columns_of(self._numeric, schema)
        return places

    def forward(self, numeric: Tensor, embeddings: Embeddings, *more: Tensor) -> Tensor:
        """Returns float32[B, width], followed by the columns of ``more``."""
        numeric = numeric if self._columns is None else numeric[:, self._columns]
        parts = embeddings.columns(self.features)
        parts = [part for part in (*parts, numeric, *more) if part.shape[1]] or [numeric]
        if self.for_products:
            parts = [lowered(part) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _columns_of(names: Sequence[str], schema: Schema) -> list[int] | None:
    """Returns the places of numeric features in the schema's; None if they are all of them, in order."""
    all_names = [feature.name for feature in schema.numeric]
    return None if list(names) == all_names else [all_names.index(name) for name in names]
