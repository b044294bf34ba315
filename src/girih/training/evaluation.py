"""Evaluation and prediction: both halves read only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.data import Batch, Dataset, NormalizationStats
from girih.errors import ConfigError, NonFiniteError, nearest
from girih.metrics import Scores
from girih.models.loss import probabilities
from girih.schema import Categorical, LabelLoss, Schema
from girih.training.session import Session


def logits_of(
    data: Dataset, session: Session, normalization: NormalizationStats, *, whole: bool = False
) -> Iterator[tuple[Batch, Tensor]]:
    """This trainer's share of each batch in order, with its logits float32[B, T].

    Args:
        whole: all examples on every trainer.
    """
    for batch in session.feed.evaluate(data.in_order(), normalization, whole=whole):
        embeddings = session.sparse.peek(batch).wait()
        yield batch, session.dense.predict(batch, embeddings).cpu()


def predictions(
    data: Dataset, session: Session, normalization: NormalizationStats, losses: Sequence[LabelLoss]
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Each batch in order, with its probabilities float32[B, T], on all trainers."""
    for batch, logits in logits_of(data, session, normalization, whole=True):
        yield batch, probabilities(logits.numpy(), losses)


def outputs_of(
    data: Dataset, session: Session, normalization: NormalizationStats
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch in order, all examples on every trainer, with what the model's ``forward`` returns.

    Raises:
        ConfigError: the dense half has nothing but logits.
    """
    outputs = getattr(session.dense, "outputs", None)
    if outputs is None:
        raise ConfigError("outputs: this strategy computes logits alone; use 'local' or 'synchronous'")
    for batch in session.feed.evaluate(data.in_order(), normalization, whole=True):
        yield batch, outputs(batch, session.sparse.peek(batch).wait()).float().cpu()


def score(
    data: Dataset,
    session: Session,
    normalization: NormalizationStats,
    ranks: TrainerGroup,
    gauc_by: str | None,
    losses: Sequence[LabelLoss] = (),
) -> Scores | None:
    """Scores a dataset, each trainer its share; only what was read so far, once a stop is requested.

    Args:
        gauc_by: a categorical feature whose first id groups the examples; None computes no GAUC.
        losses: of the labels; see :class:`girih.metrics.Scores`.

    Returns:
        Those of all trainers on rank 0, None on the others.

    Raises:
        NonFiniteError: a prediction of some trainer is NaN or infinite; on all of them.
    """
    session.sync()
    ranks.barrier()
    scores, problem = Scores(losses), None
    scoring = session.feed.scores(gauc_by)
    feature = None if gauc_by is None or not scoring else feature_index(session.feed.schema_of(data), gauc_by)
    for batch, logits in logits_of(data, session, normalization):
        if batch.num_examples and scoring:
            groups = None if feature is None else batch.first_ids(feature)
            try:
                scores.add(logits.numpy(), batch.labels, batch.example_weights, groups, batch.label_weights)
            except NonFiniteError as error:  # the others wait for this trainer at every batch
                problem = problem or error
        if ranks.stop_together():
            break
    if ranks.sum([float(problem is not None)])[0]:
        raise problem or NonFiniteError("a prediction of another trainer is NaN or infinite")
    if ranks.size == 1:
        return scores
    gathered = ranks.gather_arrays(scores.arrays())
    if gathered is None:
        return None
    scores = Scores(losses)
    for arrays in gathered:
        scores.merge(Scores.from_arrays(arrays, losses))
    return scores


def feature_index(schema: Schema, name: str) -> int:
    """The index of a categorical feature among a batch's.

    Raises:
        ConfigError: no such feature.
    """
    names = [f.name for f in schema.sparse if isinstance(f, Categorical)]
    if name not in names:
        raise ConfigError(f"gauc_by = {name!r}: no categorical feature of that name{nearest(name, names)}")
    return [f.name for f in schema.sparse].index(name)
