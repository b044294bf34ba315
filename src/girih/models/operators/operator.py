"""Substitutable operators (DES, Algorithm 1): partial results of own features add up to the whole.

    forward(numeric, embeddings)  =  combine(Σ over any split of the features of partial(own features))

A single process is a split into one part, so a model is written once for every strategy.

Shapes: B examples, W columns of a partial result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from girih.errors import ConfigError
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import lowered, places_of
from girih.schema import Schema


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """The part of a parameter that some features need.

    Attributes:
        dim: the dimension that is split. places: int64, the remaining places of its ``size`` places.
    """

    dim: int
    places: Tensor
    size: int

    def part_of(self, whole: Tensor) -> Tensor:
        """Selects the kept part of the parameter, or of a tensor of its shape."""
        return whole.index_select(self.dim, self.places.to(whole.device))


class SubstitutableOperator(nn.Module):
    """An operator that reads many weights and returns a small tensor.

    Attributes:
        aggregation: combines partial results into the whole: "sum" adds them up (AllReduce); "concat" puts the columns
            of different features next to each other (AllGather), if vectors are needed whole (DES §3.2.1).
        columns: W of the whole, for any features in this place.
    """

    __call__: Callable[..., Tensor]  # the method of nn.Module returns Any
    aggregation: ClassVar[Literal["sum", "concat"]] = "sum"
    columns: int
    _numeric: Mapping[str, int]  # the numeric features with a row in a parameter, each 1 wide

    @property
    def colocated_features(self) -> tuple[tuple[str, ...], ...]:
        """Groups of features that must be in one place, if any."""
        return ()

    @abstractmethod
    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps own float32[B, X] and own embeddings to [B, W], or to fewer columns if they are concatenated."""

    @abstractmethod
    def combine(self, total: Tensor) -> Tensor:
        """Maps the whole, [B, W], to the output."""

    @abstractmethod
    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the parts of parameters that a smaller schema needs. Returns the kept part of each parameter.

        Parameters stay the same objects with fewer values, so that an optimizer can continue. A parameter that is not
        returned belongs to :meth:`combine`, and is whole everywhere.
        """

    def keep(self, splits: dict[str, ParameterSplit]) -> dict[str, ParameterSplit]:
        """Cuts parameters to their kept parts, and returns these."""
        for name, split in splits.items():
            parameter = self.get_parameter(name)
            parameter.data = split.part_of(parameter.data)
        return splits

    def keep_numeric(self, name: str, schema: Schema) -> dict[str, ParameterSplit]:
        """Cuts a parameter that has one row per numeric feature, if there is one."""
        parameter: nn.Parameter | None = getattr(self, name)
        if parameter is None:
            return {}
        return self.keep({name: ParameterSplit(0, places_of(self._numeric, schema), len(parameter))})

    def places(self, schema: Schema) -> Tensor:
        """Returns the places of some features' columns among all W, int64, for operators that concatenate."""
        return torch.arange(self.columns)

    def forward(self, numeric: Tensor, embeddings: Embeddings | Aggregated) -> Tensor:
        """Returns the output, from features or from aggregated results."""
        if isinstance(embeddings, Aggregated):
            return self.combine(embeddings[self])
        return self.whole(numeric, embeddings)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns ``combine(partial(·))``. A subclass may compute both at once, if that is faster."""
        return self.combine(self.partial(numeric, embeddings))


class Aggregated:
    """Replaces embeddings that are spread over several processes, as the input of a model's operators.

    Args:
        totals: operator → the sum, or the concatenation, of all partial results, [B, W].
    """

    def __init__(self, totals: Mapping[SubstitutableOperator, Tensor]) -> None:
        self._totals = totals

    def __getitem__(self, operator: SubstitutableOperator) -> Tensor:
        return self._totals[operator]

    def __getattr__(self, name: str) -> object:
        raise ConfigError(
            f"a model that is trained by substitution reads embeddings.{name}: only operators of"
            " girih.models.operators may read embeddings; use one, or strategy 'synchronous'"
        )


def operators_of(module: nn.Module) -> Iterator[tuple[str, SubstitutableOperator]]:
    """Yields the operators of a model with their names, in the order of their declaration."""
    for name, each in module.named_modules():
        if isinstance(each, SubstitutableOperator):
            yield name, each


class Fields(SubstitutableOperator):
    """The pooled embeddings of all features, [B, F, D], for example for dot products of all pairs.

    Nothing adds up here: F · D numbers per example are sent, the same as without substitution, but only once.

    Args:
        with_numeric: numeric features are fields too, after the others: a value times its learned vector.
    """

    aggregation: ClassVar[Literal["sum", "concat"]] = "concat"

    def __init__(self, schema: Schema, dim: int, *, with_numeric: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.features = tuple(feature.name for feature in schema.sparse)
        self._numeric = {feature.name: 1 for feature in schema.numeric} if with_numeric else {}
        self.vectors = nn.Parameter(torch.randn(len(self._numeric), dim) * 0.01) if self._numeric else None
        self._widths = dict.fromkeys((*self.features, *self._numeric), dim)
        self.columns = len(self._widths) * dim

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns [B, F · D] of own features."""
        return self.whole(numeric, embeddings).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        """Returns [B, F, D]."""
        return lowered(total).view(len(total), -1, self.dim)

    def whole(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the fields directly."""
        fields = list(embeddings.views(self.features)) if self.features else []
        if self.vectors is not None:
            fields.append(numeric[:, :, None] * self.vectors)
        if not fields:
            return numeric.new_zeros(len(numeric), 0, self.dim)
        fields = [lowered(field) for field in fields]
        return fields[0] if len(fields) == 1 else torch.cat(fields, dim=1)

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the vectors of the remaining numeric features."""
        self.features = tuple(feature.name for feature in schema.sparse)
        return self.keep_numeric("vectors", schema)

    def places(self, schema: Schema) -> Tensor:
        """Returns the places of some features' columns."""
        return places_of(self._widths, schema)


class FirstOrder(SubstitutableOperator):
    """Σ_f w_f + Σ_x w_x · numeric_x, with an optional bias: the linear part of LR, FM and similar models.

    The weights of ids are in tables. They start at 0, and so do the weights of numeric features here. The partial
    result is one number per example: the sum over own features.
    """

    columns = 1

    def __init__(self, schema: Schema, *, bias: bool) -> None:
        super().__init__()
        self._numeric = {feature.name: 1 for feature in schema.numeric}
        self.weight = nn.Parameter(torch.zeros(len(schema.numeric))) if schema.numeric else None
        self.bias = nn.Parameter(torch.zeros(())) if bias else None

    def partial(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns float32[B, 1]."""
        total = numeric.new_zeros(numeric.shape[0])
        for block in embeddings.first_order:
            total = total + block.values.flatten(1).sum(1)
        if self.weight is not None:
            total = total + numeric @ self.weight
        return total[:, None]

    def combine(self, total: Tensor) -> Tensor:
        """Returns float32[B, 1]."""
        return total if self.bias is None else total + self.bias

    def narrow(self, schema: Schema) -> dict[str, ParameterSplit]:
        """Keeps the weights of the remaining numeric features."""
        return self.keep_numeric("weight", schema)
