"""A batch whose ids are on a GPU already, as loops of the user's own have them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class GpuBatch:
    """The ids of a batch on a GPU, and what the host has to know of them.

    Shapes: B examples, F features, N ids.

    Attributes:
        ids, offsets, weights: int64[N], int32[F·B+1], float32[N] or None: on the GPU, as a
            :class:`~girih.data.batch.Batch` has them.
        num_examples: B.
        bounds: int64[F+1], where the ids of each feature begin, and the last one's end.
        longest: int64[F], ids of the longest bag of each feature, or more; it chooses a kernel.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    num_examples: int
    bounds: NDArray[np.int64]
    longest: NDArray[np.int64]

    def ids_of(self, feature: int) -> slice:
        """Slice of a feature's ids."""
        return slice(int(self.bounds[feature]), int(self.bounds[feature + 1]))
