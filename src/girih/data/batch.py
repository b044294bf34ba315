"""One batch of examples, as flat arrays.

Shapes: B examples, F categorical and sequence features, N ids in the batch, X numeric features, T labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NULL_ID: Final = 3308892442114646408
"""The id of a missing value: XXH64 of ``girih.null``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One trainer's part of a step's batch.

    Attributes:
        num_examples: examples of the whole batch.
        weight: the weight of this part's mean loss in that of the whole.
        label_scale: float64[T], of the whole batch: see :func:`girih.data.shares.label_scale`; None where all labels count
            for all examples.
        sample: for ids that are not here, the number of the embedding worker that has them, and the number under
            which it keeps them (Persia §4.1, steps 1 and 3).
        again: has them kept once more, where that worker came back without them; returns what ``sample`` is from then on. None
            where nobody can.
    """

    num_examples: int
    weight: float
    label_scale: NDArray[np.float64] | None = None
    sample: tuple[int, int] | None = None
    again: Callable[[], tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Batch:
    """B examples, feature by feature (feature-major), as in a column store.

    Arrays are for reading: they are parts of larger ones, and batches may share one. While any part of such
    a larger one is referred to, its memory (for ids about 16 MB, or 4,096 rows) stays.

    Attributes:
        ids: int64[N]; the ids of feature 0 for all examples, then those of feature 1, and so on.
        offsets: int32[F·B+1]; the bag of feature f in example b is ``ids[offsets[f·B+b]:offsets[f·B+b+1]]``.
        weights: float32[N], one weight per id, or None where all are 1.
        numeric: float32[B, X]; NaN marks a null of a feature that is still to be standardized.
        labels: float32[B, T], finite, those that do not count 0; T is 0 where the data has none (prediction).
        example_weights: float32[B], or None where all are 1.
        label_weights: float32[B, T], how much an example counts for a label, beside its own weight: 0 where the label is
            missing or masked out; None where all count alike.
        kept: a ``pyarrow.Table`` of B rows with the columns that the reader was asked to keep, or None.
        share: the part of a step's batch that this is; None is the whole.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int32]
    numeric: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None
    example_weights: NDArray[np.float32] | None = None
    label_weights: NDArray[np.float32] | None = None
    kept: Any = None
    share: Share | None = None

    @property
    def num_examples(self) -> int:
        """Number of examples, B."""
        return len(self.numeric)

    @property
    def num_features(self) -> int:
        """Number of categorical and sequence features, F."""
        return (len(self.offsets) - 1) // self.num_examples if self.num_examples else 0

    def first_ids(self, feature: int) -> NDArray[np.int64]:
        """int64[B]: the first id of one feature in each example; that of null for an empty bag."""
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
        """Whether each bag is one id."""
        if len(self.ids) != len(self.offsets) - 1:
            return False
        bounds = single_bags(len(self.ids))
        return self.offsets is bounds or np.array_equal(self.offsets, bounds)


@lru_cache(maxsize=64)
def single_bags(count: int) -> NDArray[np.int32]:
    """Offsets of so many bags of one id each, int32[count + 1], read only."""
    bounds = np.arange(count + 1, dtype=np.int32)
    bounds.flags.writeable = False
    return bounds
