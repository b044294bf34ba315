"""A batch cut into the shares of several trainers, and a share into micro-batches.

Shapes: B examples, F features, R trainers.
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
    if num_trainers == 1:
        return replace(batch, share=Share(num_examples=size, weight=1.0))
    part = cut(batch, first, behind)
    return replace(part, share=Share(num_examples=size, weight=_weight(part, batch)))


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
    whole = batch.share or Share(num_examples=batch.num_examples, weight=1.0)
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
        kept=None if batch.kept is None else batch.kept.slice(first, behind - first),
    )


def _weight(part: Batch, whole: Batch) -> float:
    """The weight of the part's mean loss in the whole's: see ``bce_with_logits``."""
    if whole.example_weights is None or part.example_weights is None:
        return part.num_examples / max(1, whole.num_examples)
    total = float(whole.example_weights.sum(dtype=np.float64))
    return float(part.example_weights.sum(dtype=np.float64)) / total if total > 0 else 0.0
