"""Averaging of buffers, as running moments are, which no optimizer moves: at meetings alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class AveragingRanks(Protocol):
    """Those that have copies."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sums a tensor over all, in place."""

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrites a tensor by rank 0's, in place."""


def average_buffers(buffers: Iterable[Tensor], ranks: AveragingRanks) -> None:
    """Makes each buffer the mean of all copies, in place; rank 0's where it counts."""
    for buffer in buffers:
        if buffer.is_floating_point():
            ranks.all_reduce(buffer)
            buffer /= ranks.size
        else:
            ranks.broadcast_tensor(buffer)
