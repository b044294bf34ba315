"""A batch whose ids are on a GPU: copied there once for all groups, or there from the start in loops of the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch


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
        ready: when the tensors are there, for other streams; None if the current stream made them.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    num_examples: int
    bounds: NDArray[np.int64]
    longest: NDArray[np.int64]
    ready: torch.cuda.Event | None = None

    def ids_of(self, feature: int) -> slice:
        """Slice of a feature's ids."""
        return slice(int(self.bounds[feature]), int(self.bounds[feature + 1]))


class LatestCopy:
    """The copy of the latest batch on a GPU, which the groups of a sparse half share. It does not keep the batch itself."""

    def __init__(self) -> None:
        self._source: Callable[[], Batch | None] = lambda: None

    def of(self, batch: Batch, copy: Callable[[Batch], GpuBatch]) -> GpuBatch:
        """The copy of a batch, made by ``copy`` unless the latest one is of this batch."""
        if self._source() is not batch or not batch.num_examples:  # an empty batch does not know its features
            self._copy, self._source = copy(batch), weakref.ref(batch)
        return self._copy
