"""What the sparse half hands to a model: one vector a bag, or one vector an id.

Shapes: B examples, F features, D width of an embedding, L ids of one feature in the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """One sequence feature: the vectors of all its ids, and where each example's begin.

    ``values`` is float32[L, D], ``offsets`` int64[B+1]; example b has ``values[offsets[b]:offsets[b+1]]``.
    """

    values: Tensor
    offsets: Tensor

    def padded(self, max_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns float32[B, M, D], zeros past each end, and the bool[B, M] mask of what is real.

        M is the longest sequence, or ``max_length``; longer sequences keep their last ids.
        """
        lengths = self.offsets.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        width = max(1, longest if max_length is None else min(longest, max_length))
        if self.values.shape[0] == 0:
            shape = (lengths.numel(), width)
            return self.values.new_zeros(*shape, self.values.shape[1]), torch.zeros(shape, dtype=torch.bool)
        positions = torch.arange(width)
        kept = lengths.clamp(max=width)
        mask = positions < kept[:, None]
        index = (self.offsets[1:] - kept)[:, None] + positions
        padded = self.values[index.clamp(max=self.values.shape[0] - 1)]
        return padded * mask[:, :, None], mask


@dataclass(frozen=True)
class Block:
    """The packed bags of some features: float32[B, len(features), D]."""

    features: tuple[str, ...]
    values: Tensor


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of one batch, packed by table group.

    Attributes:
        blocks: packed bags; features of one block have one width.
        sequences: sequences that the model asked to see whole.
        first_order: packed first-order weights, float32[B, len(features), 1].
    """

    blocks: tuple[Block, ...] = ()
    sequences: Mapping[str, Jagged] = field(default_factory=dict)
    first_order: tuple[Block, ...] = ()

    def __getitem__(self, feature: str) -> Tensor:
        """One feature's pooled embeddings, float32[B, D].

        Raises:
            KeyError: the model did not ask for this feature's embedding (see ``needs``).
        """
        for block in self.blocks:
            if feature in block.features:
                return block.values[:, block.features.index(feature)]
        raise KeyError(f"no pooled embedding of feature {feature!r}; blocks hold {[b.features for b in self.blocks]}")

    def stacked(self) -> Tensor:
        """All bags of equal width as float32[B, F, D]; no copy where there is one block.

        Raises:
            ValueError: widths differ.
        """
        widths = {block.values.shape[2] for block in self.blocks}
        if len(widths) != 1:
            raise ValueError(f"features of this model need one width, received dims {sorted(widths)}; set dim alike")
        return _joined([block.values for block in self.blocks])

    def concatenated(self) -> Tensor:
        """All bags side by side, float32[B, Σ D]."""
        return _joined([block.values.flatten(1) for block in self.blocks])

    def first_order_weights(self) -> Tensor:
        """The first-order weights of all features, float32[B, F]."""
        return _joined([block.values.flatten(1) for block in self.first_order])


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
