"""Evaluations and predictions of a run, with a note where few ids have rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import Batch, Dataset, NormalizationStats
from girih.metrics import Metrics, Scores
from girih.schema import Labels
from girih.sparse.half import SparseStats
from girih.training import evaluation
from girih.training.notes import Notes
from girih.training.session import Session


class Scoring:
    """Judges a run's weights as they are. Methods are called by all trainers together.

    Args:
        ready: opens the session where it is not, and gives it with the normalization.
    """

    def __init__(
        self,
        ready: Callable[[], tuple[Session, NormalizationStats]],
        ranks: TrainerGroup,
        options: TrainOptions,
        labels: Labels,
        notes: Notes,
    ) -> None:
        self._ready, self._ranks, self._options = ready, ranks, options
        self._labels, self._notes = labels, notes
        self._read: SparseStats | None = None
        """Statistics after the last evaluation; None if there is none, or if others have read without training since."""
        self.features: Mapping[str, int] = {}
        """Ids of each feature in the last evaluation; see :class:`girih.sparse.groups.feature_counts.FeatureCounts`."""

    def forget(self) -> None:
        """Counters of the store begin anew."""
        self._read = None

    def score(self, data: Dataset) -> Scores | None:
        """Scores a dataset; see :func:`girih.training.evaluation.score`."""
        session, normalization = self._ready()
        before, self._read = self._read, None
        if before is None:
            before = session.sparse.stats()
        losses = self._labels.losses
        scores = evaluation.score(data, session, normalization, self._ranks, self._options.gauc_by, losses)
        self._read = after = session.sparse.stats()
        self._notes.evaluation(data.addresses[0], scores, before.store, after.store)
        self.features = {name: max(0, n - before.features.get(name, 0)) for name, n in after.features.items()}
        return scores

    def evaluate(self, data: Dataset) -> Metrics:
        """Exact metrics, on all trainers; raises KeyboardInterrupt where a stop was requested meanwhile."""
        scores = self.score(data)
        if self._ranks.stopping:
            self._ranks.forget_stop()
            raise KeyboardInterrupt
        names, options = self._labels.names, self._options
        own = None if scores is None else scores.result(names, options.rank_at, options.metrics).as_dict()
        return Metrics.from_dict(self._ranks.broadcast(own))

    def predictions(self, data: Dataset) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Each batch in order, with its probabilities float32[B, T], on all trainers."""
        session, normalization = self._ready()
        self._read = None
        yield from evaluation.predictions(data, session, normalization, self._labels.losses)

    def outputs(self, data: Dataset) -> Iterator[NDArray[np.float32]]:
        """All that the model's ``forward`` returns of each batch in order, on all trainers."""
        session, normalization = self._ready()
        self._read = None
        for _, outputs in evaluation.outputs_of(data, session, normalization):
            yield outputs.numpy()
