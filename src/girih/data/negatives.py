"""Draws items from a catalogue into each step's batch. So losses over the batch have negatives that no user clicked.

Shapes: S items drawn, M items in the catalogue, F features.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.config.bounds import Count
from girih.config.options import Options
from girih.data.batch import Batch, offsets_of
from girih.data.decode.batches import joined
from girih.errors import ConfigError, DataError, nearest
from girih.kernels.buffers import Buffers
from girih.kernels.cpu.arrays import I64
from girih.schema import Schema


class NegativesOptions(Options):
    """Options of ``[negatives]``.

    Attributes:
        items: the files of the catalogue, one row per item, in the format of ``[data]``.
        features: the features of the catalogue: the item's features.
        per_step: number of items for each step, drawn uniformly with replacement.
    """

    owner = "negatives: "

    items: str | tuple[str, ...]
    features: tuple[str, ...]
    per_step: Count


class Negatives:
    """Adds examples with the items of a catalogue, without a user, with the label 0.

    The drawn items depend only on the seed and the batch, so all trainers and a resumed run draw the same items.

    Args:
        items: batches of the catalogue, of the schema narrowed to ``features``.

    Attributes:
        per_step: S.

    Raises:
        ConfigError: a feature that the schema does not have. DataError: an empty catalogue.
    """

    def __init__(
        self, items: Iterable[Batch], schema: Schema, features: Iterable[str], per_step: int, seed: int
    ) -> None:
        names, wanted = schema.names, set(features)
        for name in wanted.difference(names):
            raise ConfigError(f"negatives: features: no feature {name!r}{nearest(name, names)}")
        parts = list(items)
        if not parts:
            raise DataError("negatives: the catalogue has no items; expected a row for each")
        self._catalogue = joined(parts, Buffers())
        self.per_step, self._seed = per_step, seed
        place = iter(range(len(wanted)))
        self._sparse = [next(place) if feature.name in wanted else None for feature in schema.sparse]
        place = iter(range(len(wanted)))
        self._numeric = [next(place) if feature.name in wanted else None for feature in schema.numeric]

    def added(self, batch: Batch) -> Batch:
        """Returns the batch with S more examples appended."""
        drawn = self._drawn(batch)
        return joined([batch, self._examples(drawn, batch)], Buffers())

    def _drawn(self, batch: Batch) -> I64:
        random = np.random.default_rng([abs(self._seed), zlib.crc32(batch.ids.tobytes())])
        return random.integers(0, self._catalogue.num_examples, self.per_step)

    def _examples(self, drawn: I64, batch: Batch) -> Batch:
        catalogue, size = self._catalogue, self._catalogue.num_examples
        lengths = np.zeros((len(self._sparse), len(drawn)), np.int64)
        ids: list[NDArray[Any]] = []
        weights: list[NDArray[Any]] = []
        for feature, place in enumerate(self._sparse):
            if place is None:
                continue
            starts, ends = (catalogue.offsets[place * size + drawn + shift] for shift in (0, 1))
            lengths[feature] = own = (ends - starts).astype(np.int64)
            within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
            chosen = np.repeat(starts, own) + within
            ids.append(catalogue.ids[chosen])
            if catalogue.weights is not None:
                weights.append(catalogue.weights[chosen])
        numeric = np.zeros((len(drawn), len(self._numeric)), np.float32)
        for column, place in enumerate(self._numeric):
            if place is not None:
                numeric[:, column] = catalogue.numeric[drawn, place]
        shape = (len(drawn), batch.labels.shape[1])
        return Batch(
            ids=np.concatenate([np.empty(0, np.int64), *ids]),
            offsets=offsets_of(lengths, np.int32),
            weights=np.concatenate(weights) if weights else None,
            numeric=numeric,
            labels=np.zeros(shape, np.float32),
            example_weights=None if batch.example_weights is None else np.ones(len(drawn), np.float32),
            label_weights=None if batch.label_weights is None else np.ones(shape, np.float32),
        )
