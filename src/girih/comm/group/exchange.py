"""AllToAllv whose sizes follow from counts: what trainers ask each other for, and what they answer.

Before anything else each rank tells every other one a few counts, such as how many keys of each group it will ask for.
From these follows the size of each message there and back, for the rank that sends it, those that pass it on, and the one
that receives it.

Shapes: P ranks, C counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.collectives import Collectives

Counts = NDArray[np.int64]
Sizes = Callable[[Counts], Counts]
"""Counts, int64[..., C] → how many numbers each message has, int64[...]."""


class Route(Protocol):
    """The ways of one step's messages: all ranks send along them in the same order.

    Attributes:
        told, asked: int64[P, C], counts that this rank told each one, and that each one told this rank.
    """

    @property
    def told(self) -> Counts: ...

    @property
    def asked(self) -> Counts: ...

    def there(self, sent: Tensor, sizes: Sizes) -> Tensor:
        """A flat tensor's parts, by what was told, go to the ranks in turn; returns what came, in turn."""
        ...

    def back(self, sent: Tensor, sizes: Sizes) -> Tensor:
        """The answer to :meth:`there`: parts by what was asked; returns what came, by what was told."""
        ...


class Exchange(Protocol):
    """A way for messages between all ranks."""

    def tell(self, told: Counts) -> Route:
        """Tells each rank its counts, int64[P, C], all of them non-negative; C is the same on all ranks."""
        ...


@dataclass(frozen=True)
class DirectRoute:
    """See :class:`Route`."""

    ranks: Collectives
    told: Counts
    asked: Counts

    def there(self, sent: Tensor, sizes: Sizes) -> Tensor:
        """See :class:`Route`."""
        return self.ranks.exchange(sent, sizes(self.told).tolist(), sizes(self.asked).tolist())

    def back(self, sent: Tensor, sizes: Sizes) -> Tensor:
        """See :class:`Route`."""
        return self.ranks.exchange(sent, sizes(self.asked).tolist(), sizes(self.told).tolist())


class DirectExchange:
    """Each rank sends a message to each other one; see :class:`Exchange`."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def tell(self, told: Counts) -> DirectRoute:
        """See :class:`Exchange`."""
        alike = [told.shape[1]] * self._ranks.size
        asked = self._ranks.exchange(torch.from_numpy(told.reshape(-1)), alike, alike)
        return DirectRoute(self._ranks, told, asked.numpy().reshape(told.shape))
