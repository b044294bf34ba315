"""A batch whose ids are on a GPU. Halves for CPUs import this too, so it imports no GPU kernel, which would take 0.1 s."""

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


class SharedCopy:
    """The GPU copy of the latest batch, shared by all groups of a sparse half. It holds no reference to the batch itself."""

    def __init__(self) -> None:
        self._source: Callable[[], Batch | None] = lambda: None
        self._readers: set[str] = set()

    def of(self, batch: Batch, group: str, copy: Callable[[Batch], GpuBatch]) -> GpuBatch:
        """Returns the copy of a batch for a group.

        Calls ``copy`` if the latest batch is another one, or if the group has read this copy: a caller may reuse its arrays.
        """
        known = self._source() is batch and group not in self._readers
        if not known or not batch.num_examples:  # an empty batch has no number of features
            self._copy, self._source, self._readers = copy(batch), weakref.ref(batch), set()
        self._readers.add(group)
        return self._copy
