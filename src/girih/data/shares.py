"""A batch cut into the shares of several trainers, and a share into micro-batches.

Shapes: B examples, F features, R trainers, T labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch, Share
from girih.kernels.cpu import take
from girih.kernels.cpu.arrays import sealed


def share_of(batch: Batch, rank: int, num_trainers: int) -> Batch:
    """One trainer's examples: neighbours, as many as the others have, or one more or less.

    Where trainers are more than examples, some shares are empty.
    """
    size = batch.num_examples
    first, behind = rank * size // num_trainers, (rank + 1) * size // num_trainers
    whole = Share(num_examples=size, weight=1.0, label_scale=label_scale(batch))
    if num_trainers == 1:
        return replace(batch, share=whole)
    part = cut(batch, first, behind)
    return replace(part, share=replace(whole, weight=_weight(part, batch)))


def label_scale(batch: Batch) -> NDArray[np.float64] | None:
    """The factors of label weights, so that each label's loss is the mean over the examples that count for it.

    The step's loss is (1/T) Σ_t Σ_b w_b·m_bt·l_bt / Σ_b w_b·m_bt, w being example weights and m label weights. With
    s_t = Σ_b w_b / Σ_b w_b·m_bt it is a mean over examples, of (1/T) Σ_t s_t·m_bt·l_bt, and so parts of a batch, each of which
    knows only its own examples and s, add up to exactly that: no mean of means.

    Returns:
        float64[T], those of the step's whole batch where this is a part; 0 for a label that counts nowhere in it. None
        where labels have no weights.
    """
    if batch.label_weights is None:
        return None
    if batch.share is not None:
        return batch.share.label_scale
    weights = np.ones(batch.num_examples) if batch.example_weights is None else batch.example_weights
    weights = weights.astype(np.float64)
    counted = weights @ batch.label_weights.astype(np.float64)
    scale: NDArray[np.float64] = np.divide(
        weights.sum(), counted, out=np.zeros(len(counted)), where=counted > 0
    )
    return scale


def slices_of(batch: Batch, count: int) -> list[slice]:
    """The examples of so many micro-batches: neighbours, as many in each, or one more or less.

    None is empty, unless the batch is, or is a part of a step's: there all trainers have as many micro-batches.
    """
    size = batch.num_examples
    if batch.share is None:
        count = max(1, min(count, size))
    return [slice(part * size // count, (part + 1) * size // count) for part in range(count)]


def micro_batches(batch: Batch, count: int) -> list[tuple[slice, Batch]]:
    """A batch cut into micro-batches as a dense half takes them: their examples, and these without ids.

    The weight of each one's mean loss is its part in the step's, so that their losses and gradients add up to the
    batch's (PICASSO §III-C, D-interleaving).
    """
    if count == 1:
        return [(slice(0, batch.num_examples), batch)]
    bare = replace(batch, ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), weights=None, kept=None)
    whole = batch.share or Share(num_examples=batch.num_examples, weight=1.0, label_scale=label_scale(batch))
    found = []
    for examples in slices_of(batch, count):
        part = cut(bare, examples.start, examples.stop)
        share = replace(whole, weight=whole.weight * _weight(part, batch))
        found.append((examples, replace(part, share=share)))
    return found


def cut(batch: Batch, first: int, behind: int) -> Batch:
    """The examples from ``first`` up to ``behind``."""
    size, num_features = batch.num_examples, batch.num_features
    starts = np.arange(num_features) * size
    begins, ends = (batch.offsets[starts + place].astype(np.int64) for place in (first, behind))
    lengths = np.diff(batch.offsets).reshape(num_features, size)[:, first:behind]
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])

    def own(values: NDArray[Any]) -> NDArray[Any]:
        out = np.empty(int(offsets[-1]), values.dtype)
        take.copy_stretches(sealed(values), begins, ends, np.cumsum(ends - begins) - (ends - begins), out)
        return out

    return Batch(
        ids=own(batch.ids),
        offsets=offsets,
        numeric=batch.numeric[first:behind],
        labels=batch.labels[first:behind],
        weights=None if batch.weights is None else own(batch.weights),
        example_weights=None if batch.example_weights is None else batch.example_weights[first:behind],
        label_weights=None if batch.label_weights is None else batch.label_weights[first:behind],
        kept=None if batch.kept is None else batch.kept.slice(first, behind - first),
    )


def _weight(part: Batch, whole: Batch) -> float:
    """The weight of the part's mean loss in the whole's: see ``bce_with_logits``."""
    if whole.example_weights is None or part.example_weights is None:
        return part.num_examples / max(1, whole.num_examples)
    total = float(whole.example_weights.sum(dtype=np.float64))
    return float(part.example_weights.sum(dtype=np.float64)) / total if total > 0 else 0.0
