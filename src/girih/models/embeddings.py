"""Embeddings as the sparse half hands them to a model: one vector per bag, or one per id.

Shapes: B examples, F features, D width of an embedding, L ids of one feature in the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def examples(self) -> Tensor:
        """The example that each of the L vectors belongs to, int64[L]."""
        lengths = self.offsets.diff()
        numbers = torch.arange(lengths.numel(), device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=self.values.shape[0])

    def positions(self) -> Tensor:
        """The place of each of the L vectors in its sequence, from 0, int64[L]."""
        begins = self.offsets[:-1].index_select(0, self.examples())
        return torch.arange(begins.numel(), device=begins.device) - begins

    def last(self) -> Tensor:
        """The last vector of each sequence, float32[B, D]; zeros where it is empty."""
        (filled,) = self.offsets.diff().nonzero(as_tuple=True)
        ends = self.offsets[1:].index_select(0, filled)
        found = self.values.new_zeros(self.offsets.numel() - 1, self.values.shape[1])
        return found.index_copy(0, filled, self.values.index_select(0, ends - 1))

    def padded(self, max_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns float32[B, M, D], zeros past each end, and the bool[B, M] mask of what is real.

        M is the longest sequence, or ``max_length``; longer sequences keep their last ids.
        """
        lengths = self.offsets.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        width = max(1, longest if max_length is None else min(longest, max_length))
        shape = (lengths.numel(), width)
        num_ids, dim = self.values.shape
        positions = torch.arange(width, device=self.values.device)
        kept = lengths.clamp(max=width)
        mask = positions < kept[:, None]
        if num_ids == 0:
            return self.values.new_zeros(*shape, dim), mask
        index = (self.offsets[1:] - kept)[:, None] + positions
        rows = self.values.index_select(0, index.clamp(max=num_ids - 1).flatten())
        return rows.view(*shape, dim) * mask[:, :, None], mask


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
        raise self._missing(feature)

    def views(self, features: Sequence[str]) -> list[Tensor]:
        """The pooled embeddings of some features in this order, without a copy.

        Neighbours that are neighbours in a block come as one tensor float32[B, n, D]: a single one
        where one block holds exactly these features.

        Raises:
            KeyError: the model did not ask for one of them.
        """
        if len(self.blocks) == 1 and self.blocks[0].features == tuple(features):
            return [self.blocks[0].values]
        place = {name: (b, i) for b, block in enumerate(self.blocks) for i, name in enumerate(block.features)}
        runs: list[tuple[int, int, int]] = []
        for name in features:
            if name not in place:
                raise self._missing(name)
            block, index = place[name]
            if runs and runs[-1][0] == block and runs[-1][2] == index:
                runs[-1] = (block, runs[-1][1], index + 1)
            else:
                runs.append((block, index, index + 1))
        return [self.blocks[block].values[:, begin:end] for block, begin, end in runs]

    def first_nonfinite(self) -> str | None:
        """A feature that holds a NaN or an infinity, if any."""
        return self._first_nonfinite(lambda values: values)

    def first_nonfinite_gradient(self) -> str | None:
        """A feature whose gradient holds a NaN or an infinity, if any."""
        return self._first_nonfinite(lambda values: values.grad)

    def mapped(
        self, of_bags: Callable[[Tensor], Tensor], of_sequence: Callable[[Jagged], Jagged]
    ) -> Embeddings:
        """The same features with other tensors."""
        blocks, first_order = (
            tuple(Block(block.features, of_bags(block.values)) for block in packed)
            for packed in (self.blocks, self.first_order)
        )
        sequences = {name: of_sequence(sequence) for name, sequence in self.sequences.items()}
        return Embeddings(blocks, sequences, first_order)

    def stacked(self, features: Sequence[str] | None = None) -> Tensor:
        """Bags of equal width as float32[B, F, D]: those of ``features``, else all in block order.

        No copy where one block holds exactly these features. Block order follows the packing of
        tables, so a model that tells features apart by their place names them.

        Raises:
            ValueError: widths differ, or there are no bags.
        """
        parts = self._parts(features)
        widths = {part.shape[2] for part in parts}
        if len(widths) > 1:
            raise ValueError(
                f"stacked embeddings need one width, received dims {sorted(widths)}; set dim alike"
            )
        return _joined(parts)

    def concatenated(self, features: Sequence[str] | None = None) -> Tensor:
        """Bags side by side, float32[B, Σ D]: those of ``features``, else all in block order.

        Raises:
            ValueError: there are no bags.
        """
        return _joined([part.flatten(1) for part in self._parts(features)])

    def first_order_weights(self) -> Tensor:
        """The first-order weights of all features in block order, float32[B, F].

        Raises:
            ValueError: there are none.
        """
        return _joined([block.values.flatten(1) for block in self.first_order])

    def _first_nonfinite(self, read: Callable[[Tensor], Tensor | None]) -> str | None:
        """A feature of which a NaN or an infinity is read."""
        packed = [(block.features, block.values) for block in (*self.blocks, *self.first_order)]
        packed += [((name,), sequence.values) for name, sequence in self.sequences.items()]
        for features, values in packed:
            found = read(values)
            if found is not None and not torch.isfinite(found.sum()):  # one pass, or nearly always
                bad = ~torch.isfinite(found.view(len(found), len(features), -1)).all(dim=2).all(dim=0)
                if bad.any():
                    return features[int(bad.nonzero()[0])]
        return None

    def _parts(self, features: Sequence[str] | None) -> list[Tensor]:
        return [block.values for block in self.blocks] if features is None else self.views(features)

    def _missing(self, feature: str) -> KeyError:
        held = [name for block in self.blocks for name in block.features]
        return KeyError(f"no pooled embedding of feature {feature!r}; this batch has those of {held}")


def _joined(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("this batch holds no embeddings; expected those of at least one feature (see needs)")
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
