"""Computes mean and deviation of standardized features, in one pass (Chan, Golub & LeVeque 1983).

Shapes: B examples, S standardized features, X numeric features of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from girih import config
from girih.config.bounds import Bounds, NonNegative
from girih.errors import ConfigError
from girih.kernels.cpu.arrays import F64
from girih.schema import Schema

if TYPE_CHECKING:  # followers of logs have no Arrow
    from girih.data.batch import Batch
    from girih.data.dataset import Dataset

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class NormalizationStats:
    """Count, mean and sum of squared deviations of S features, without nulls.

    Attributes:
        features: their names. places: their columns in ``Batch.numeric``.
        count, mean, squares: float64[S].
    """

    features: tuple[str, ...]
    places: tuple[int, ...]
    count: F64
    mean: F64
    squares: F64

    @classmethod
    def empty(cls, schema: Schema) -> NormalizationStats:
        """Returns the statistics of an empty dataset."""
        features = schema.numeric
        places = tuple(place for place, f in enumerate(features) if "standardize" in f.transform)
        zeros = np.zeros(len(places))
        return cls(tuple(features[place].name for place in places), places, zeros, zeros, zeros)

    @classmethod
    def of(
        cls, dataset: Dataset, *, stop_requested: Callable[[], bool] = lambda: False
    ) -> NormalizationStats:
        """Reads the standardized features once, and no other column.

        Raises:
            DataError: a bad row, unless the dataset skips bad rows.
            KeyboardInterrupt: ``stop_requested`` returned True between two batches.
        """
        empty = cls.empty(dataset.schema)
        if not empty.features:
            return empty
        columns = dataset.select(empty.features).in_order().with_batch_size(1 << 16)
        stats = cls.empty(columns.schema)
        for batch in columns:
            if stop_requested():
                raise KeyboardInterrupt
            stats = stats.merge(stats.measured(batch))
        return replace(stats, places=empty.places)

    def narrowed(self, schema: Schema) -> NormalizationStats:
        """Returns the statistics for a smaller schema, with the places in its batches."""
        own = {feature.name for feature in schema.numeric}
        return NormalizationStats.from_dict(
            {name: of for name, of in self.to_dict().items() if name in own}, schema
        )

    @property
    def std(self) -> F64:
        """Standard deviation of the population, float64[S]; 1 instead of 0."""
        std = np.sqrt(self.squares / np.maximum(self.count, 1.0))
        return np.where(std > 0.0, std, 1.0)

    def measured(self, batch: Batch) -> NormalizationStats:
        """Returns the statistics of one batch that is not standardized yet."""
        values = batch.numeric[:, self.places].astype(np.float64)
        present = ~np.isnan(values)
        count = present.sum(axis=0).astype(np.float64)
        mean = np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1.0)
        deviations = np.where(present, values - mean, 0.0)
        return replace(self, count=count, mean=mean, squares=(deviations * deviations).sum(axis=0))

    def merge(self, other: NormalizationStats) -> NormalizationStats:
        """Returns the statistics of the rows of both objects together."""
        count = self.count + other.count
        total = np.maximum(count, 1.0)
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / total)
        squares = self.squares + other.squares + shift * shift * (self.count * other.count / total)
        return replace(self, count=count, mean=mean, squares=squares)

    def apply(self, batch: Batch) -> Batch:
        """Standardizes ``batch.numeric``, float32[B, X]. Null becomes 0, the mean."""
        if not self.features:
            return batch
        numeric = batch.numeric.copy()
        values = numeric[:, self._columns] - self.mean
        values /= self.std
        np.copyto(values, 0.0, where=np.isnan(values))
        numeric[:, self._columns] = values
        return replace(batch, numeric=numeric)

    @property
    def _columns(self) -> slice | tuple[int, ...]:
        """The places, as a slice if they are consecutive: numpy takes a slice without a copy."""
        first, size = self.places[0], len(self.places)
        side_by_side = self.places == tuple(range(first, first + size))
        return slice(first, first + size) if side_by_side else self.places

    def to_dict(self) -> dict[str, object]:
        """Returns a mapping by feature, in numbers that JSON represents exactly."""
        rows = zip(self.features, self.count.tolist(), self.mean.tolist(), self.squares.tolist(), strict=True)
        return {
            name: {"count": count, "mean": mean, "squares": squares} for name, count, mean, squares in rows
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object], schema: Schema) -> NormalizationStats:
        """Inverts :meth:`to_dict`.

        Raises:
            ConfigError: the schema standardizes other features.
        """
        empty = cls.empty(schema)
        if set(mapping) != set(empty.features):
            raise ConfigError(
                f"moments of {sorted(mapping)}: the schema standardizes {sorted(empty.features)}"
            )
        moments = config.build(Mapping[str, _Moments], mapping, "moments")
        count, mean, squares = (
            np.array([getattr(moments[name], key) for name in empty.features], np.float64)
            for key in ("count", "mean", "squares")
        )
        return replace(empty, count=count, mean=mean, squares=squares)


@dataclass(frozen=True, slots=True)
class _Moments:
    count: NonNegative
    mean: Annotated[float, Bounds(-_LARGEST, _LARGEST)]
    squares: NonNegative
