"""Sequences that recurrent layers walk through together, without padding.

    sequences   abc  d  ef        steps   a e d | b f | c

A step has a row of every sequence that is long enough, the longest sequence first, so that the states of those that go on
are the first ones of the step before.

Shapes: L rows of all sequences together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from girih.models.embeddings import Jagged


class Steps(NamedTuple):
    """The order in which steps take rows.

    Attributes:
        order: int64[L], the rows in the order of steps. places: int64[L], the place of each row in that order.
        sizes: the rows of each step, never rising. Without any row there is one step of none, so that a layer's
            parameters get a gradient (of zeros) in every batch.
    """

    order: Tensor
    places: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, sequences: Jagged) -> Steps:
        """The steps through some sequences."""
        longest_first = sequences.offsets.diff().argsort(descending=True, stable=True)
        positions = sequences.positions()
        sizes = positions.bincount()  # as many sequences are longer than a position as have a row there
        begins = sizes.cumsum(0) - sizes
        ranks = _inverse(longest_first).index_select(0, sequences.examples())
        places = begins.index_select(0, positions) + ranks
        return cls(_inverse(places), places, sizes.tolist() or [0])

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each step: [L, ...] to tensors of ``sizes`` rows."""
        return torch.split(rows.index_select(0, self.order), self.sizes)

    def joined(self, steps: list[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        return torch.cat(steps).index_select(0, self.places)


def _inverse(permutation: Tensor) -> Tensor:
    numbers = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)
