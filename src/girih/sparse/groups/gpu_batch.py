"""A batch with its ids on a GPU.

Halves for CPUs import this module too, so it imports no GPU kernel, which would take 0.1 s.
"""

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
    """The ids of a batch on a GPU, and facts about them that the host needs.

    Shapes: B examples, F features, N ids.

    Attributes:
        ids, offsets, weights: int64[N], int32[F·B+1], float32[N] or None: on the GPU, with the same
            layout as in :class:`~girih.data.batch.Batch`.
        num_examples: B.
        bounds: int64[F+1], the begin of each feature's ids, and the end of the last feature's ids.
        longest: int64[F], an upper bound of the ids in a bag, for each feature. It decides the kernel.
        ready: tells other streams when the tensors are ready, or None if the current stream made them.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    num_examples: int
    bounds: NDArray[np.int64]
    longest: NDArray[np.int64]
    ready: torch.cuda.Event | None = None

    def ids_of(self, feature: int) -> slice:
        """Returns the slice of a feature's ids."""
        return slice(int(self.bounds[feature]), int(self.bounds[feature + 1]))


class SharedCopy:
    """The GPU copy of the latest batch, shared by all groups of a half. Keeps no reference to the batch itself."""

    def __init__(self) -> None:
        self._source: Callable[[], Batch | None] = lambda: None
        self._readers: set[str] = set()

    def of(self, batch: Batch, group: str, copy: Callable[[Batch], GpuBatch]) -> GpuBatch:
        """Returns the copy of a batch for a group.

        Calls ``copy`` if the latest batch is a different batch. Also calls it if the group has already read this copy,
        since a caller may reuse the batch's arrays.
        """
        known = self._source() is batch and group not in self._readers
        if not known or not batch.num_examples:  # an empty batch has no number of features
            self._copy, self._source, self._readers = copy(batch), weakref.ref(batch), set()
        self._readers.add(group)
        return self._copy
