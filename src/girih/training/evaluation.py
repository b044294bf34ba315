"""Evaluation and prediction. They read rows and parameters, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import Batch, Dataset, NormalizationStats
from girih.dense.half import ScoredSteps
from girih.errors import ConfigError, NonFiniteError, nearest
from girih.metrics import Metrics, Scores
from girih.metrics.progressive import progressive_metrics
from girih.models.loss import probabilities
from girih.schema import Categorical, LabelLoss, Labels, Schema
from girih.sparse.half import SparseStats
from girih.training.notes import Notes
from girih.training.session import Session

TOO_GOOD = 0.999
"""Minimum AUC for a note."""


def logits_of(
    data: Dataset, session: Session, normalization: NormalizationStats, *, whole: bool = False
) -> Iterator[tuple[Batch, Tensor]]:
    """Yields this trainer's share of each batch in order, with its logits, float32[B, T].

    Args:
        whole: True yields all examples on every trainer.
    """
    for batch in session.feed.evaluate(data.in_order(), normalization, whole=whole):
        embeddings = session.sparse.peek(batch).wait()
        yield batch, session.dense.predict(batch, embeddings).cpu()


def predictions(
    data: Dataset, session: Session, normalization: NormalizationStats, losses: Sequence[LabelLoss]
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Yields each batch in order with its probabilities, float32[B, T], on all trainers."""
    for batch, logits in logits_of(data, session, normalization, whole=True):
        yield batch, probabilities(logits.numpy(), losses)


def outputs_of(
    data: Dataset, session: Session, normalization: NormalizationStats
) -> Iterator[tuple[Batch, Tensor]]:
    """Yields each batch in order, with all examples on every trainer, and the return value of the model's ``forward``.

    Raises:
        ConfigError: the dense half returns only logits.
    """
    outputs = getattr(session.dense, "outputs", None)
    if outputs is None:
        raise ConfigError("outputs: this strategy computes only logits; use 'local' or 'synchronous'")
    for batch in session.feed.evaluate(data.in_order(), normalization, whole=True):
        yield batch, outputs(batch, session.sparse.peek(batch).wait()).float().cpu()


def feature_index(schema: Schema, name: str) -> int:
    """Returns the index of a categorical feature in a batch.

    Raises:
        ConfigError: there is no such feature.
    """
    names = [f.name for f in schema.sparse if isinstance(f, Categorical)]
    if name not in names:
        raise ConfigError(f"gauc_by = {name!r}: no categorical feature has that name{nearest(name, names)}")
    return [f.name for f in schema.sparse].index(name)


class Scoring:
    """Evaluates a run's current weights. All trainers call its methods together.

    Args:
        ready: a function that opens the session if necessary, and returns it with the normalization.
    """

    def __init__(
        self,
        ready: Callable[[], tuple[Session, NormalizationStats]],
        ranks: TrainerGroup,
        options: TrainOptions,
        labels: Labels,
        notes: Notes,
    ) -> None:
        self.ready, self._ranks, self._options = ready, ranks, options
        self._labels, self._notes = labels, notes
        self.features: Mapping[str, int] = {}
        """The ids of each feature in the last evaluation; see :class:`girih.sparse.groups.group.FeatureCounts`."""

    def score(self, data: Dataset) -> Scores | None:
        """Scores a dataset. Each trainer scores its share. After a request to stop, ends with the examples so far.

        Returns:
            The scores of all trainers on rank 0, and None on all other ranks.

        Raises:
            NonFiniteError: a prediction of a trainer is NaN or infinite. All trainers raise it.
        """
        session, normalization = self.ready()
        before = session.sparse.stats()
        session.sync()
        self._ranks.barrier()
        scores = self._gathered(self._score_share(data, session, normalization))
        after = session.sparse.stats()
        self.features, peeks, absent = {}, 0, 0
        if _incarnations(before) == _incarnations(after):  # counters of a restarted process begin at 0
            self.features = {name: n - before.features.get(name, 0) for name, n in after.features.items()}
            peeks, absent = (after.store.get(n, 0) - before.store.get(n, 0) for n in ("peeks", "absent"))
        self._notes.evaluation(data.addresses[0], scores, peeks, absent if after.store.get("rows") else 0)
        return scores

    def _score_share(self, data: Dataset, session: Session, normalization: NormalizationStats) -> Scores:
        problem: NonFiniteError | None = None
        scores, feature, gauc_by = Scores(self._labels.losses), None, self._options.gauc_by
        scoring = session.feed.scores(gauc_by)
        if gauc_by is not None and scoring:
            feature = feature_index(session.feed.schema_of(data), gauc_by)
        for batch, logits in logits_of(data, session, normalization):
            if batch.num_examples and scoring:
                groups = None if feature is None else batch.first_ids(feature)
                try:
                    scores.add(
                        logits.numpy(), batch.labels, batch.example_weights, groups, batch.label_weights
                    )
                except NonFiniteError as error:  # raised at the end, as other trainers wait at each batch
                    problem = problem or error
            if self._ranks.stop_together():
                break
        if self._ranks.any(problem is not None):
            raise problem or NonFiniteError("a prediction of another trainer is NaN or infinite")
        return scores

    def _gathered(self, scores: Scores) -> Scores | None:
        if self._ranks.size == 1:
            return scores
        gathered = self._ranks.gather_arrays(scores.arrays())
        if gathered is None:
            return None
        total = Scores(self._labels.losses)
        for arrays in gathered:
            total.merge(Scores.from_arrays(arrays, self._labels.losses))
        return total

    def result(self, scores: Scores) -> Metrics:
        """Computes metrics from scores."""
        metrics = scores.result(self._labels.names, self._options.rank_at, self._options.metrics)
        if (metrics.auc or 0.0) > TOO_GOOD:
            text = f"AUC {metrics.auc:.5f}: does a feature hold the label, or something that is known only after it?"
            self._notes.log_note("", "auc", text)
        return metrics

    def evaluate(self, data: Dataset) -> Metrics:
        """Returns exact metrics on all trainers. Raises KeyboardInterrupt if a stop was requested meanwhile."""
        scores = self.score(data)
        if self._ranks.stopping:
            self._ranks.forget_stop()
            raise KeyboardInterrupt
        return Metrics.from_dict(self._ranks.broadcast(scores and self.result(scores).as_dict()))


def _incarnations(stats: SparseStats) -> dict[str, float]:
    """Returns the incarnation of each process behind a sparse half."""
    return {name: each["gauges"]["incarnation"] for name, each in stats.processes.items()}


class ProgressiveValidation:
    """The scores of training steps, over all trainers.

    Args:
        steps: the scores of this trainer.
    """

    def __init__(self, steps: ScoredSteps, ranks: TrainerGroup, labels: Labels) -> None:
        self._steps, self._ranks, self._labels = steps, ranks, labels

    def metrics(self) -> dict[str, dict[str, object]]:
        """Returns the metrics of each label over all trainers. All trainers call it together."""
        return self._metrics(self._added())

    def record(self) -> Mapping[str, object]:
        """Returns the metrics of the first label over all trainers, which call it together.

        If trainers do not run in step, returns the metrics of this trainer alone.
        """
        counts = self._counted() if self._ranks.unsynchronized else self._added()
        return self._metrics(counts)[self._labels.names[0]]

    def state(self) -> Tensor:
        """Returns the counts of the whole run over all trainers, float64[T, 2K + 3]. All trainers call it together."""
        return self._added()[0]

    def restore(self, state: Tensor | None) -> None:
        """Restores a saved state on the first trainer. None starts from zero."""
        self._steps.settle()  # steps in flight belong to the dropped state
        self._steps.scores.restore(state.numpy() if state is not None and self._ranks.first else None)

    def _metrics(self, counts: Tensor) -> dict[str, dict[str, object]]:
        return progressive_metrics(counts.numpy(), self._labels.names, self._labels.losses)

    def _counted(self) -> Tensor:
        self._steps.settle()
        return torch.from_numpy(self._steps.scores.counts())

    def _added(self) -> Tensor:
        counts = self._counted()
        self._ranks.all_reduce(counts)
        return counts
