"""A batch cut into the shares of several trainers.

Shapes: B examples, F features, R trainers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch, Share


def share_of(batch: Batch, rank: int, num_trainers: int) -> Batch:
    """One trainer's examples: neighbours, as many as the others have, or one more or less.

    Where trainers are more than examples, some shares are empty.
    """
    size = batch.num_examples
    first, behind = rank * size // num_trainers, (rank + 1) * size // num_trainers
    if num_trainers == 1:
        return replace(batch, share=Share(num_examples=size, weight=1.0))
    part = cut(batch, first, behind)
    return replace(part, share=Share(num_examples=size, weight=_weight(part, batch)))


def cut(batch: Batch, first: int, behind: int) -> Batch:
    """The examples from ``first`` up to ``behind``."""
    size, count = batch.num_examples, behind - first
    starts = np.arange(batch.num_features)[:, None] * size + first
    bounds = batch.offsets[starts + np.arange(count + 1)].astype(np.int64)  # [F, count + 1]
    pieces = [slice(int(row[0]), int(row[-1])) for row in bounds]
    offsets = np.zeros(batch.num_features * count + 1, np.int32)
    np.cumsum(np.diff(bounds, axis=1).reshape(-1), out=offsets[1:])
    return Batch(
        ids=_joined(batch.ids, pieces),
        offsets=offsets,
        numeric=batch.numeric[first:behind],
        labels=batch.labels[first:behind],
        weights=None if batch.weights is None else _joined(batch.weights, pieces),
        example_weights=None if batch.example_weights is None else batch.example_weights[first:behind],
        kept=None if batch.kept is None else batch.kept.slice(first, count),
    )


def _joined(values: NDArray[Any], pieces: list[slice]) -> NDArray[Any]:
    return np.concatenate([values[piece] for piece in pieces]) if pieces else values[:0]


def _weight(part: Batch, whole: Batch) -> float:
    """The weight of the part's mean loss in the whole's: see ``bce_with_logits``."""
    if whole.example_weights is None or part.example_weights is None:
        return part.num_examples / max(1, whole.num_examples)
    total = float(whole.example_weights.sum(dtype=np.float64))
    return float(part.example_weights.sum(dtype=np.float64)) / total if total > 0 else 0.0
