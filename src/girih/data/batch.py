"""One batch of examples, as flat arrays.

Shapes: B examples, F categorical and sequence features, N ids in the batch, X numeric features, T labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import take
from girih.kernels.cpu.arrays import F32, F64, I32, I64, sealed

NULL_ID: Final = 3308892442114646408
"""The id of a missing value: XXH64 of ``girih.null``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One trainer's part of a step's batch.

    Attributes:
        num_examples: number of examples of the whole batch.
        weight: the weight of this part's mean loss in the mean loss of the whole batch.
        label_scale: float64[T], factors of the whole batch, see :func:`girih.data.batch.label_scale`. None if all
            labels count for all examples.
        sample: the number of the embedding worker that keeps the ids, and the number of the sample there (Persia §4.1,
            steps 1 and 3). None if the batch has its ids.
        again: a function that sends the ids again to a restarted worker that lost them. It returns the new ``sample``.
            None if that is impossible.
    """

    num_examples: int
    weight: float
    label_scale: F64 | None = None
    sample: tuple[int, int] | None = None
    again: Callable[[], tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Batch:
    """B examples. The ids are stored feature by feature (feature-major), as in a column store.

    Do not write into the arrays: they are slices of larger arrays, and batches may share one. A larger array (for ids
    about 16 MB, or 4,096 rows) stays in memory while any slice of it is in use.

    Attributes:
        ids: int64[N]; the ids of feature 0 for all examples, then the ids of feature 1, and so on.
        offsets: int32[F·B+1]; the bag of feature f in example b is ``ids[offsets[f·B+b]:offsets[f·B+b+1]]``.
        weights: float32[N], one weight per id, or None if all are 1.
        numeric: float32[B, X]; NaN marks a null of a feature that is not standardized yet.
        labels: float32[B, T], finite; 0 for a label that does not count. T is 0 if the data has no labels (prediction).
        example_weights: float32[B], or None if all are 1.
        label_weights: float32[B, T], the weight of an example for a label, in addition to the example's own weight. 0
            if the label is missing or masked out. None if all are equal.
        kept: a ``pyarrow.Table`` of B rows with the columns of the option ``keep``, or None.
        share: the place of this part in a step's batch. None if this is the whole batch.
        num_examples: B.
    """

    ids: I64
    offsets: I32
    numeric: F32
    labels: F32
    weights: F32 | None = None
    example_weights: F32 | None = None
    label_weights: F32 | None = None
    kept: Any = None
    share: Share | None = None
    num_examples: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", len(self.numeric))  # stored, because steps read it often

    @property
    def num_features(self) -> int:
        """Number of categorical and sequence features, F."""
        return (len(self.offsets) - 1) // self.num_examples if self.num_examples else 0

    def first_ids(self, feature: int) -> I64:
        """Returns int64[B]: the first id of one feature in each example, or :data:`NULL_ID` for an empty bag."""
        size = self.num_examples
        starts, ends = (
            self.offsets[feature * size + shift : (feature + 1) * size + shift] for shift in (0, 1)
        )
        ids = np.full(size, NULL_ID)
        filled = ends > starts
        ids[filled] = self.ids[starts[filled]]
        return ids

    def ids_of(self, feature: int) -> slice:
        """Slice of a feature's ids."""
        size = self.num_examples
        return slice(int(self.offsets[feature * size]), int(self.offsets[(feature + 1) * size]))

    @property
    def has_single_ids(self) -> bool:
        """True if each bag holds one id."""
        if len(self.ids) != len(self.offsets) - 1:
            return False
        bounds = single_bags(len(self.ids))
        return self.offsets is bounds or np.array_equal(self.offsets, bounds)


def offsets_of(lengths: NDArray[Any], kind: type[np.integer] = np.int64) -> NDArray[Any]:
    """Returns the offsets of lists with these lengths: int64[R + 1], or another integer type."""
    offsets = np.zeros(lengths.size + 1, kind)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@lru_cache(maxsize=64)
def single_bags(count: int) -> I32:
    """Returns the offsets of ``count`` bags of one id each, int32[count + 1], read only."""
    bounds = np.arange(count + 1, dtype=np.int32)
    bounds.flags.writeable = False
    return bounds


def share_of(batch: Batch, rank: int, num_trainers: int) -> Batch:
    """Returns one trainer's examples: consecutive examples, in shares whose sizes differ by at most one.

    If there are more trainers than examples, some shares are empty.
    """
    size = batch.num_examples
    first, behind = rank * size // num_trainers, (rank + 1) * size // num_trainers
    whole = Share(num_examples=size, weight=1.0, label_scale=label_scale(batch))
    if num_trainers == 1:
        return replace(batch, share=whole)
    part = cut(batch, first, behind)
    return replace(part, share=replace(whole, weight=_weight(part, batch)))


def label_scale(batch: Batch) -> F64 | None:
    """Returns the factors of label weights that make each label's loss the mean over the examples that count for it.

    The step's loss is (1/T) Σ_t Σ_b w_b·m_bt·l_bt / Σ_b w_b·m_bt, with example weights w and label weights m. With s_t
    = Σ_b w_b / Σ_b w_b·m_bt this loss is a mean over examples of (1/T) Σ_t s_t·m_bt·l_bt. So a part of a batch needs
    only its own examples and s. The losses of all parts add up to exactly this mean, which is not a mean of means.

    Returns:
        float64[T], for the step's whole batch if this is a part of it; 0 for a label that counts for no example of it.
        None if labels have no weights.
    """
    if batch.label_weights is None:
        return None
    if batch.share is not None:
        return batch.share.label_scale
    weights = np.ones(batch.num_examples) if batch.example_weights is None else batch.example_weights
    weights = weights.astype(np.float64)
    counted = weights @ batch.label_weights.astype(np.float64)
    scale: F64 = np.divide(weights.sum(), counted, out=np.zeros(len(counted)), where=counted > 0)
    return scale


def slices_of(batch: Batch, count: int) -> list[slice]:
    """Returns the examples of ``count`` micro-batches: consecutive, with sizes that differ by at most one.

    No part is empty, unless the batch is empty. A share of a step's batch may also have empty parts, because all
    trainers have the same number of micro-batches.
    """
    size = batch.num_examples
    if batch.share is None:
        count = max(1, min(count, size))
    return [slice(part * size // count, (part + 1) * size // count) for part in range(count)]


def micro_batches(batch: Batch, count: int) -> list[tuple[slice, Batch]]:
    """Cuts a batch into micro-batches for a dense half: pairs of their examples and the micro-batch without ids.

    The weight of each mean loss is its part of the step's loss. So losses and gradients add up to the values of the
    whole batch (PICASSO §III-C, D-interleaving).
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
    """Returns the examples with numbers from ``first`` up to, and without, ``behind``."""
    size, num_features = batch.num_examples, batch.num_features
    starts = np.arange(num_features) * size
    begins, ends = (batch.offsets[starts + place].astype(np.int64) for place in (first, behind))
    lengths = np.diff(batch.offsets).reshape(num_features, size)[:, first:behind]
    offsets = offsets_of(lengths, np.int32)

    def copy_selected(values: NDArray[Any]) -> NDArray[Any]:
        out = np.empty(int(offsets[-1]), values.dtype)
        take.copy_stretches(sealed(values), begins, ends, np.cumsum(ends - begins) - (ends - begins), out)
        return out

    return Batch(
        ids=copy_selected(batch.ids),
        offsets=offsets,
        numeric=batch.numeric[first:behind],
        labels=batch.labels[first:behind],
        weights=None if batch.weights is None else copy_selected(batch.weights),
        example_weights=None if batch.example_weights is None else batch.example_weights[first:behind],
        label_weights=None if batch.label_weights is None else batch.label_weights[first:behind],
        kept=None if batch.kept is None else batch.kept.slice(first, behind - first),
    )


def _weight(part: Batch, whole: Batch) -> float:
    """Returns the weight of the part's mean loss in the mean loss of the whole: see ``bce_with_logits``."""
    if whole.example_weights is None or part.example_weights is None:
        return part.num_examples / max(1, whole.num_examples)
    total = float(whole.example_weights.sum(dtype=np.float64))
    return float(part.example_weights.sum(dtype=np.float64)) / total if total > 0 else 0.0
