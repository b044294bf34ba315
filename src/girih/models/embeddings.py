"""Embeddings that the sparse half gives to a model: one vector per bag, or one per id.

Shapes: B examples, F features, D width of an embedding, L ids of one feature in the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from girih.errors import nearest

Names = tuple[str, ...]
MOST_SLICES = 2
"""More slices of blocks cost more than one copy, because the gradient of each slice is as large as its whole block."""


class Jagged(NamedTuple):
    """One sequence feature: the vectors of all its ids, and the start of each example.

    Attributes:
        values: float32[L, D].
        offsets: int64[B+1]; example b has ``values[offsets[b]:offsets[b+1]]``.

    Examples:
        Sequences of 2, 0 and 1 ids, with vectors of width 1:

        >>> import torch
        >>> from girih.models import Jagged
        >>> history = Jagged(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 2, 3]))
        >>> history.last().flatten().tolist()
        [2.0, 0.0, 3.0]
        >>> history.padded()[1].tolist()
        [[True, True], [False, False], [True, False]]
    """

    values: Tensor
    offsets: Tensor

    def examples(self) -> Tensor:
        """Returns the example of each of the L vectors, int64[L]."""
        lengths = self.offsets.diff()
        numbers = torch.arange(lengths.numel(), device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=self.values.shape[0])

    def positions(self) -> Tensor:
        """Returns the place of each of the L vectors in its sequence, from 0, int64[L]."""
        begins = self.offsets[:-1].index_select(0, self.examples())
        return torch.arange(begins.numel(), device=begins.device) - begins

    def last(self) -> Tensor:
        """Returns the last vector of each sequence, float32[B, D]. An empty sequence gives zeros."""
        lengths = self.offsets.diff()
        return self._selected(torch.where(lengths > 0, self.offsets[1:] - 1, self.values.shape[0]))

    def padded(self, max_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns float32[B, M, D], zeros after each end, and the bool[B, M] mask of vectors.

        M is ``max_length`` if it is set, which exported models need. Longer sequences keep their last ids. Otherwise M
        is the length of the longest sequence, at least 1.
        """
        lengths = self.offsets.diff()
        if max_length is None:
            max_length = max(1, int(lengths.max()) if lengths.numel() else 0)
        positions = torch.arange(max_length, device=self.values.device)
        kept = lengths.clamp(max=max_length)
        mask = positions < kept[:, None]
        index = torch.where(mask, (self.offsets[1:] - kept)[:, None] + positions, self.values.shape[0])
        return self._selected(index.flatten()).view(*mask.shape, self.values.shape[1]), mask

    def _selected(self, index: Tensor) -> Tensor:
        """Selects vectors by number, float32[·, D]. Number L, after the last vector, gives zeros."""
        zeros = self.values.new_zeros(1, self.values.shape[1])
        return torch.cat([self.values, zeros]).index_select(0, index)


@dataclass(frozen=True)
class Block:
    """The packed bags of some features.

    Attributes:
        features: their names, in order.
        values: float32[B, len(features), D].

    Examples:
        >>> import torch
        >>> from girih.models import Block
        >>> block = Block(("user", "item"), torch.zeros(32, 2, 8))
        >>> block.values.shape
        torch.Size([32, 2, 8])
    """

    features: tuple[str, ...]
    values: Tensor


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of one batch, packed by table group.

    Attributes:
        blocks: packed bags; features of one block have one width.
        sequences: feature → the sequence, which the model reads whole.
        first_order: packed first-order weights, float32[B, len(features), 1].

    Examples:
        A batch of 32 examples, with vectors of width 8 for two features:

        >>> import torch
        >>> from girih.models import Block, Embeddings
        >>> embeddings = Embeddings((Block(("user", "item"), torch.zeros(32, 2, 8)),))
        >>> embeddings["item"].shape, embeddings.concatenated().shape
        (torch.Size([32, 8]), torch.Size([32, 16]))
    """

    blocks: tuple[Block, ...] = ()
    sequences: Mapping[str, Jagged] = field(default_factory=dict)
    first_order: tuple[Block, ...] = ()
    _names: tuple[Names, ...] = field(init=False, repr=False, compare=False)
    _places: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # computed now, not on first use: torch's compiler does not support the lock of a cached_property
        names = tuple([block.features for block in self.blocks])
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_places", _places_of(names))

    def __getitem__(self, feature: str) -> Tensor:
        """Returns one feature's pooled embeddings, float32[B, D].

        Raises:
            KeyError: the model did not ask for this feature's embedding (see ``needs``).
        """
        if feature not in self._places:
            raise self._missing(feature)
        block, place = self._places[feature]
        return self.blocks[block].values[:, place]

    def jagged(self, feature: str) -> Jagged:
        """Returns the vectors of a feature in each example: the whole sequence, or its pooled embedding.

        Raises:
            KeyError: the model asked for neither.
        """
        if feature in self.sequences:
            return self.sequences[feature]
        values = self[feature]
        return Jagged(values, torch.arange(len(values) + 1, device=values.device))

    def views(self, features: Sequence[str]) -> list[Tensor]:
        """Returns the pooled embeddings of some features in this order, mostly without a copy.

        Features that are consecutive in a block, in this order, form one tensor float32[B, n, D]. If a block holds
        exactly these features, it is the only tensor. Features of one width that are in many places are put in order by
        one copy.

        Raises:
            KeyError: the model did not ask for one of them.
        """
        plan = self._plan(features)
        widths = {self._widths[block] for block in plan.blocks}
        if plan.takes_many_slices and len(widths) == 1:
            return [self._gathered(plan).view(-1, len(features), *widths)]
        return [self._view(run) for run in plan.runs]

    def columns(self, features: Sequence[str]) -> list[Tensor]:
        """Returns the pooled embeddings side by side, of any widths, as a few tensors float32[B, ·].

        Raises:
            KeyError: the model did not ask for one of them.
        """
        plan = self._plan(features)
        if plan.takes_many_slices:
            return [self._gathered(plan)]
        return [self._view(run).flatten(1) for run in plan.runs]

    def first_nonfinite(self) -> str | None:
        """Returns a feature that holds a NaN or an infinity, if any."""
        return self._first_nonfinite(lambda values: values)

    def first_nonfinite_gradient(self) -> str | None:
        """Returns a feature whose gradient holds a NaN or an infinity, if any."""
        return self._first_nonfinite(lambda values: values.grad)

    def mapped(
        self, of_bags: Callable[[Tensor], Tensor], of_sequence: Callable[[Jagged], Jagged] | None = None
    ) -> Embeddings:
        """Returns the same features with other tensors.

        Args:
            of_bags: maps the values of a block, float32[B, n, D].
            of_sequence: maps a sequence; None maps its values by ``of_bags``.
        """
        of_sequence = of_sequence or (lambda each: each._replace(values=of_bags(each.values)))
        blocks, first_order = (
            tuple(Block(block.features, of_bags(block.values)) for block in packed)
            for packed in (self.blocks, self.first_order)
        )
        sequences = {name: of_sequence(sequence) for name, sequence in self.sequences.items()}
        return Embeddings(blocks, sequences, first_order)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors: of blocks, of first-order weights, and values and offsets of sequences.

        Shapes and dtypes are those of :class:`Block` and :class:`Jagged`.
        """
        packed = [block.values for block in (*self.blocks, *self.first_order)]
        return packed + [tensor for sequence in self.sequences.values() for tensor in sequence]

    def stacked(self, features: Sequence[str] | None = None) -> Tensor:
        """Returns bags of equal width as float32[B, F, D]: of ``features``, or of all features in block order.

        If one block holds exactly these features, there is no copy. Block order follows the packing of tables, so a
        model that distinguishes features by their place must name them.

        Raises:
            ValueError: widths differ, or there are no bags.
        """
        parts = self._parts(features)
        widths = {part.shape[2] for part in parts}
        if len(widths) > 1:
            raise ValueError(
                f"stacked embeddings need one width, received dims {sorted(widths)}; set the same dim"
            )
        return _joined(parts)

    def concatenated(self, features: Sequence[str] | None = None) -> Tensor:
        """Returns bags side by side, float32[B, Σ D]: of ``features``, or of all features in block order.

        Raises:
            ValueError: there are no bags.
        """
        parts = (
            [block.values.flatten(1) for block in self.blocks] if features is None else self.columns(features)
        )
        return _joined(parts)

    def first_order_weights(self) -> Tensor:
        """Returns the first-order weights of all features in block order, float32[B, F].

        Raises:
            ValueError: there are none.
        """
        return _joined([block.values.flatten(1) for block in self.first_order])

    def _first_nonfinite(self, read: Callable[[Tensor], Tensor | None]) -> str | None:
        """Returns a feature with a NaN or an infinity in the tensor that ``read`` returns."""
        packed = [(block.features, read(block.values)) for block in (*self.blocks, *self.first_order)]
        packed += [((name,), read(sequence.values)) for name, sequence in self.sequences.items()]
        checked = [(features, nonfinite) for features, nonfinite in packed if nonfinite is not None]
        sums = [nonfinite.sum() for _, nonfinite in checked]
        if not sums or torch.isfinite(torch.stack(sums)).all():  # nearly always a single pass
            return None
        for features, nonfinite in checked:
            bad = ~torch.isfinite(nonfinite.view(len(nonfinite), len(features), -1)).all(dim=(0, 2))
            if bad.any():
                return features[int(bad.nonzero()[0])]
        return None

    def _parts(self, features: Sequence[str] | None) -> list[Tensor]:
        return [block.values for block in self.blocks] if features is None else self.views(features)

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(block.values.shape[2] for block in self.blocks)

    def _plan(self, features: Sequence[str]) -> _Selection:
        try:
            if torch.compiler.is_compiling():  # the compiler traces this once, without caches
                return _new_plan(self._places, self._names, tuple(features))
            return _plan_of(self._names, tuple(features))
        except KeyError as error:
            raise self._missing(error.args[0]) from None

    def _view(self, run: _FeatureRun) -> Tensor:
        """Returns float32[B, n, D]. Returns a whole block itself, because the gradient of a slice takes a copy."""
        block = self.blocks[run.block]
        whole = (run.begin, run.end) == (0, len(block.features))
        return block.values if whole else block.values[:, run.begin : run.end]

    def _gathered(self, plan: _Selection) -> Tensor:
        """Returns float32[B, Σ D], by one operation."""
        together = _joined([self.blocks[block].values.flatten(1) for block in plan.blocks])
        index = _columns_of(plan, self._names, self._widths, together.device)
        return together.gather(1, index.expand(len(together), -1))

    def _missing(self, feature: str) -> KeyError:
        return KeyError(
            f"no pooled embedding of feature {feature!r} in this batch{nearest(feature, self._places)}"
        )


class _FeatureRun(NamedTuple):
    """Consecutive features of a block: the block's number, the first place, and the place after the last."""

    block: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class _Selection:
    """Places of some features, in their order, and their blocks.

    A selection is the same in every batch of a run, so it is made once.

    Attributes:
        num_slices: number of runs that are not a whole block.
    """

    runs: tuple[_FeatureRun, ...]
    blocks: tuple[int, ...]
    num_slices: int

    @property
    def takes_many_slices(self) -> bool:
        """True if one copy is cheaper than slices. False while compiling, which makes one operation of all slices."""
        return self.num_slices > MOST_SLICES and not torch.compiler.is_compiling()


@lru_cache(maxsize=256)
def _places_of(blocks: tuple[Names, ...]) -> Mapping[str, tuple[int, int]]:
    """Returns feature → the number of its block, and its place in the block."""
    return {name: (b, place) for b, names in enumerate(blocks) for place, name in enumerate(names)}


@lru_cache(maxsize=256)
def _plan_of(blocks: tuple[Names, ...], features: Names) -> _Selection:
    """Returns the plan of some features, from a cache."""
    return _new_plan(_places_of(blocks), blocks, features)


def _new_plan(
    places: Mapping[str, tuple[int, int]], blocks: tuple[Names, ...], features: Names
) -> _Selection:
    """Makes the plan of some features. Raises a KeyError with the name of a feature that no block has."""
    runs: list[_FeatureRun] = []
    for name in features:
        block, place = places[name]
        if runs and (runs[-1].block, runs[-1].end) == (block, place):
            runs[-1] = _FeatureRun(block, runs[-1].begin, place + 1)
        else:
            runs.append(_FeatureRun(block, place, place + 1))
    num_slices = sum((begin, end) != (0, len(blocks[block])) for block, begin, end in runs)
    return _Selection(tuple(runs), tuple(sorted({run.block for run in runs})), num_slices)


@lru_cache(maxsize=256)
def _columns_of(
    plan: _Selection, blocks: tuple[Names, ...], widths: tuple[int, ...], device: torch.device
) -> Tensor:
    """Returns the columns of a plan's features if its blocks are side by side: int64[1, Σ D]."""
    sizes = [len(blocks[block]) * widths[block] for block in plan.blocks]
    firsts = dict(zip(plan.blocks, accumulate(sizes, initial=0), strict=False))
    columns: list[int] = []
    for block, begin, end in plan.runs:
        columns += range(firsts[block] + begin * widths[block], firsts[block] + end * widths[block])
    return torch.tensor(columns, device=device)[None]


def _joined(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("this batch holds no embeddings; expected those of at least one feature (see needs)")
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
