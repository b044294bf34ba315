"""Evaluation and prediction: both halves read only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.data import NULL_ID, Batch, Dataset, NormalizationStats, read_ahead
from girih.data.shares import share_of
from girih.errors import ConfigError, nearest
from girih.metrics import Scores
from girih.schema import Categorical, Schema
from girih.training.halves import DenseHalf, SparseHalf


def logits_of(
    data: Dataset,
    sparse: SparseHalf,
    dense: DenseHalf,
    moments: NormalizationStats,
    part: tuple[int, int] = (0, 1),
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch in order, or one trainer's share of each, with its logits float32[B, T].

    Args:
        part: which trainer of how many; trainers that read columns of their own take all examples.
    """
    data = sparse.columns_of(data)
    moments = moments.narrowed(data.schema)
    if sparse.by_columns:
        part = (0, 1)
    shares = (batch if part[1] == 1 else share_of(batch, *part) for batch, _ in data.batches(0))
    batches = read_ahead((moments.apply(batch) for batch in shares), data.read_ahead)
    try:
        for batch in batches:
            yield batch, dense.forward(batch, sparse.peek(batch).wait(), train=False).cpu()
    finally:
        batches.close()


def score(
    data: Dataset,
    sparse: SparseHalf,
    dense: DenseHalf,
    moments: NormalizationStats,
    *,
    gauc_by: str | None = None,
    part: tuple[int, int] = (0, 1),
    stop_requested: Callable[[], bool] = lambda: False,
) -> Scores:
    """Scores a dataset with the weights as they are; only what was read so far, once a stop is requested.

    Args:
        part: which trainer of how many: only its share of every batch is scored. Of trainers that read columns of
            their own, one scores everything: the first, or the one that has ``gauc_by``.
        gauc_by: a categorical feature whose first id groups the examples; None computes no GAUC.
    """
    scores = Scores()
    own = sparse.columns_of(data).schema
    scoring = not sparse.by_columns or part[0] == 0
    if sparse.by_columns and gauc_by is not None:
        scoring = any(feature.name == gauc_by for feature in own.sparse)
    feature = feature_index(own, gauc_by) if gauc_by is not None and scoring else None
    for batch, logits in logits_of(data.in_order(), sparse, dense, moments, part):
        groups = None if feature is None else first_ids(batch, feature)
        if batch.num_examples and scoring:
            scores.add(logits.numpy(), batch.labels, batch.example_weights, groups)
        if stop_requested():
            break
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


def first_ids(batch: Batch, feature: int) -> NDArray[np.int64]:
    """int64[B]: the first id of one feature in each example; that of null for an empty bag."""
    size = batch.num_examples
    starts, ends = (batch.offsets[feature * size + shift : (feature + 1) * size + shift] for shift in (0, 1))
    ids = np.full(size, NULL_ID)
    filled = ends > starts
    ids[filled] = batch.ids[starts[filled]]
    return ids
