"""Mean and deviation of standardized features: measured once, or taken from where a run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from girih.checkpoint.load import LoadedCheckpoint
from girih.comm.group import TrainerGroup
from girih.data import Dataset, NormalizationStats
from girih.errors import ConfigError
from girih.schema import Schema
from girih.training.inheriting import Inherited, moments_of


class Normalizing:
    """The normalization of a run, alike on all trainers.

    Attributes:
        stats: None until it is measured, or restored.
    """

    def __init__(self, schema: Schema, ranks: TrainerGroup) -> None:
        self.stats: NormalizationStats | None = None
        self._schema, self._ranks = schema, ranks
        self._kept: Mapping[str, Any] = {}  # of the run that this one began with

    def known(self) -> NormalizationStats:
        """The normalization, which is empty where no feature is standardized.

        Raises:
            ConfigError: it would have to be measured first.
        """
        if self.stats is not None:
            return self.stats
        empty = NormalizationStats.empty(self._schema)
        if empty.features:
            raise ConfigError(
                f"feature {empty.features[0]!r} is standardized by the training data: fit or load first"
            )
        return empty

    def of(self, train: Dataset) -> NormalizationStats:
        """The normalization; rank 0 reads the data where it is not known, and tells the others.

        Raises:
            KeyboardInterrupt: reading was stopped.
        """
        if self.stats is not None:
            return self.stats
        found = None
        if self._ranks.first:
            with contextlib.suppress(KeyboardInterrupt):
                measured = NormalizationStats.of(train, stop_requested=lambda: self._ranks.stop_requested)
                found = measured.to_dict()
        told = self._ranks.broadcast(found)
        if told is None:
            raise KeyboardInterrupt
        self.stats = NormalizationStats.from_dict({**told, **self._kept}, self._schema)
        return self.stats

    def inherit(self, loaded: LoadedCheckpoint, found: Inherited, train: Dataset | None) -> None:
        """Keeps what another run's checkpoint has of these features; measures the rest where there are data."""
        self._kept = moments_of(loaded, self._schema, found)
        if set(self._kept) == set(NormalizationStats.empty(self._schema).features):
            self.stats = NormalizationStats.from_dict(self._kept, self._schema)
        elif train is not None:
            self.stats = None
            self.of(train)
