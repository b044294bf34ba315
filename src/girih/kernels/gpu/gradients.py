"""The backward pass of pooling on a GPU: sums the gradients of bags to the gradients of keys.

A key's gradient is the sum of its terms' gradients (:class:`girih.kernels.gpu.dedup.BagTerms`), in the order of its
ids in the batch. If a key has more than :data:`LONG` terms, they are first summed in up to :data:`MOST_PIECES`
pieces, each by a separate program. The cuts depend only on the number of terms, so sums are reproducible.

No row may be updated before all sums are known to be finite. So sums are usually written to an array, which the kernel
that updates rows reads. If a check of the gradients has shown that no sum can overflow, this kernel forms the sums
itself (:class:`FusedInputs`).

Shapes: n ids of the group, U unique keys, F features, W columns of a row, D columns of a segment, S segments, Q pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from girih.kernels.gpu.dedup import BagTerms, last_not_above
from girih.kernels.gpu.jit import INTERPRETED, aligned, block_of, columns_of, kernel, launch, rows_at_once
from girih.kernels.gpu.layout import FLOAT32, columns_at, load, whole_vectors

LONG = 256
MOST_PIECES = 16 if INTERPRETED else 256
_MAGNITUDE = constexpr(0x7FFF_FFFF)


class Pieces:
    """The pieces into which the terms of keys are cut that have very many terms.

    Attributes:
        starts: int32[n+1]: key u has the pieces from ``starts[u]`` to ``starts[u+1]``. A key with few terms has none.
        most: the maximum number of pieces of all keys.
    """

    def __init__(self, counts: Tensor) -> None:
        cut = torch.clamp((counts + (LONG - 1)) // LONG, max=MOST_PIECES)
        cut = torch.where(counts > LONG, cut, torch.zeros_like(cut))
        self.starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
        torch.cumsum(cut, 0, dtype=torch.int32, out=self.starts[1:])
        self.most = 2 * len(counts) // LONG


@dataclass(frozen=True)
class Sources:
    """The addresses of the gradients of one segment's outputs.

    Attributes:
        described: int64[4, F], for each feature: the address of the pooled gradient of the first example, the bytes
            from one example to the next, the address of the unpooled gradient of position 0, and the bytes from one
            position to the next. The address is 0 if there is no gradient.
        pooled, whole: True if there are pooled gradients, and if there are unpooled gradients.
        aligned: True if all addresses are multiples of 16 bytes.
    """

    described: Tensor
    pooled: bool
    whole: bool
    aligned: bool


@dataclass(frozen=True)
class FusedInputs:
    """The inputs of the kernel that sums gradients and updates rows.

    Attributes:
        terms, pieces: the ids of each key.
        sources: the gradients of the outputs of each segment. lent: the tensors of these gradients, which must stay
            alive.
        sums: for each segment, float32[Q, D], the sums of pieces.
        largest: int32[1], the largest magnitude of a gradient, as the bits of a float32. If it is above ``limit``, a
            sum may overflow, and all sums are already in the array of gradients.
    """

    terms: BagTerms
    pieces: Pieces
    sources: Sequence[Sources]
    lent: Sequence[Tensor]
    sums: Sequence[Tensor]
    largest: Tensor
    limit: int

    def arguments(self, segment: int) -> tuple[Any, ...]:
        """Returns the arguments of kernels for one segment, from ``sources`` to ``limit``."""
        own = described_terms(self.sources[segment], self.terms)
        return *own, self.pieces.starts, self.sums[segment], self.largest, self.limit


@triton.jit
def load_terms(
    sources: tensor, num_features: tensor, features: tensor, examples: tensor, positions: tensor,
    factors: tensor, term: tensor, mask: tensor, column: tensor, dim: tensor, POOLED: constexpr,
    WHOLE: constexpr, ALIGNED: constexpr,
) -> Any:  # fmt: skip
    """Returns the gradients of terms, float32[K, C], times their factors."""
    source = sources + load(features + term, mask)
    gradient = tl.zeros_like(column).to(tl.float32) + tl.zeros_like(term)[:, None].to(tl.float32)
    inside = column < dim
    if POOLED:
        start = load(source, mask)
        step = load(source + num_features, mask)
        address = start + step * load(examples + term, mask)
        present = (mask & (start != 0))[:, None] & inside
        gradient = load(columns_at(address, column, FLOAT32, ALIGNED), present)
        gradient = gradient * load(factors + term, mask)[:, None]
    if WHOLE:
        start = load(source + 2 * num_features, mask)
        step = load(source + 3 * num_features, mask)
        address = start + step * load(positions + term, mask)
        present = (mask & (start != 0))[:, None] & inside
        gradient += load(columns_at(address, column, FLOAT32, ALIGNED), present)
    return gradient


@kernel
def _sum_pieces(
    sources: tensor, num_features: tensor, features: tensor, examples: tensor, positions: tensor, factors: tensor, starts: tensor,
    pieces: tensor, num_keys: tensor, most_keys: tensor, out: tensor, dim: tensor, POOLED: constexpr, WHOLE: constexpr, ALIGNED: constexpr,
    COLUMNS: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    piece = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, FLOAT32, ALIGNED)
    if piece < tl.load(pieces + most_keys):
        key = last_not_above(pieces, most_keys + 1, piece, piece >= 0)
        first_piece = tl.load(pieces + key)
        num_pieces = tl.load(pieces + key + 1) - first_piece
        start = tl.load(starts + key)
        count = tl.load(starts + key + 1) - start
        size = (count + num_pieces - 1) // num_pieces
        begin = start + (piece - first_piece) * size
        end = tl.minimum(begin + size, start + count)
        total = tl.zeros((AT_ONCE, COLUMNS), tl.float32)
        for first in range(begin, end, AT_ONCE):
            term = first + tl.arange(0, AT_ONCE)
            total += load_terms(
                sources, num_features, features, examples, positions, factors, term, term < end, column, dim,
                POOLED, WHOLE, ALIGNED,
            )  # fmt: skip
        tl.store(out + piece * dim + column, tl.sum(total, axis=0)[None, :], mask=column < dim)


@triton.jit
def summed(
    sources: tensor, num_features: tensor, features: tensor, examples: tensor, positions: tensor, factors: tensor, starts: tensor,
    pieces: tensor, sums: tensor, key: tensor, mask: tensor, column: tensor, dim: tensor, POOLED: constexpr, WHOLE: constexpr,
    ALIGNED: constexpr, COLUMNS: constexpr, KEYS: constexpr,
) -> Any:  # fmt: skip
    """Returns the gradients of keys, float32[KEYS, COLUMNS], or 0 if ``mask`` is false."""
    start = load(starts + key, mask)
    count = load(starts + key + 1, mask) - start
    first_piece = load(pieces + key, mask)
    num_pieces = load(pieces + key + 1, mask) - first_piece
    count = tl.where(num_pieces > 0, 0, count)
    gradient = tl.zeros((KEYS, COLUMNS), tl.float32)
    for j in range(tl.max(count)):
        gradient += load_terms(
            sources, num_features, features, examples, positions, factors, start + j, j < count, column, dim,
            POOLED, WHOLE, ALIGNED,
        )  # fmt: skip
    for j in range(tl.max(num_pieces)):
        present = (j < num_pieces)[:, None] & (column < dim)
        place = (first_piece + j)[:, None].to(tl.int64) * dim + column
        gradient += load(sums + place, present)
    return gradient


@kernel
def _sum_terms(
    sources: tensor, num_features: tensor, features: tensor, examples: tensor, positions: tensor,
    factors: tensor, starts: tensor, pieces: tensor, sums: tensor, num_keys: tensor, totals: tensor,
    num_columns: tensor, first_column: tensor, nonfinite: tensor, largest: tensor, limit: tensor, dim: tensor, POOLED: constexpr,
    WHOLE: constexpr, ALIGNED: constexpr, DIRECT: constexpr, COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, FLOAT32, ALIGNED)
    num = tl.load(num_keys)
    if DIRECT:
        num = tl.where(tl.load(largest) > limit, num, 0)
    for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK), tl.num_programs(0)):
        key = tile * BLOCK + tl.arange(0, BLOCK)
        mask = key < num
        gradient = summed(
            sources, num_features, features, examples, positions, factors, starts, pieces, sums, key, mask, column, dim,
            POOLED, WHOLE, ALIGNED, COLUMNS, BLOCK,
        )  # fmt: skip
        wrong = (gradient != gradient) | (tl.abs(gradient) == float("inf"))
        found = tl.max(tl.where(tl.max(wrong.to(tl.int32), axis=1) > 0, key, -1))
        if found >= 0:
            tl.atomic_max(nonfinite, found, sem="relaxed")
        place = key[:, None].to(tl.int64) * num_columns + first_column + column
        tl.store(totals + place, gradient, mask=mask[:, None] & (column < dim))


@kernel
def _find_largest(gradients: tensor, largest: tensor, amount: tensor, BLOCK: constexpr) -> None:
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = load(gradients + i, i < amount)
    # The bits of magnitudes have the order of the magnitudes, with infinity and NaN after all numbers.
    tl.atomic_max(largest, tl.max(found.to(tl.int32, bitcast=True) & _MAGNITUDE), sem="relaxed")


def find_largest(gradients: Sequence[Tensor], largest: Tensor) -> None:
    """Increases ``largest``, int32[1], to the bits of the largest magnitude in gradients, float32 and contiguous."""
    for each in gradients:
        launch(_find_largest, each.numel(), block_of(4096, each.numel()), each, largest, each.numel())


def safe_limit(num_terms: int) -> int:
    """Returns the bits of the largest safe magnitude, a float32.

    The sum of ``num_terms`` gradients up to this magnitude, with factors of at most 1, is finite.
    """
    return int(np.float32(2.0**126 / max(1, num_terms)).view(np.int32))


def described_terms(sources: Sources, terms: BagTerms) -> tuple[Any, ...]:
    """Returns the arguments of kernels for the terms of one segment."""
    return (
        sources.described,
        sources.described.shape[1],
        terms.features,
        terms.examples,
        terms.positions,
        terms.factors,
        terms.starts,
    )


def sum_pieces(sources: Sources, terms: BagTerms, pieces: Pieces, num_keys: Tensor, dim: int) -> Tensor:
    """Returns the sums of pieces of one segment, float32[Q, D]."""
    described, columns = sources.described, columns_of(dim)
    sums = torch.empty((max(1, pieces.most), dim), dtype=torch.float32, device=described.device)
    launch(
        _sum_pieces, pieces.most, 1, *described_terms(sources, terms), pieces.starts, num_keys, len(terms.starts) - 1, sums,
        dim, POOLED=sources.pooled, WHOLE=sources.whole, ALIGNED=sources.aligned and aligned(4 * dim), COLUMNS=columns, AT_ONCE=min(LONG, rows_at_once(columns)),
    )  # fmt: skip
    return sums


def sum_terms(
    sources: Sources,
    terms: BagTerms,
    pieces: Pieces,
    sums: Tensor,
    num_keys: Tensor,
    totals: Tensor,
    first_column: int,
    dim: int,
    nonfinite: Tensor,
    largest: Tensor | None = None,
    limit: int = 0,
) -> None:
    """Sums the gradients of keys for one segment. For keys with very many terms, adds the sums of their pieces.

    Args:
        totals: float32[n, W], output. Only the segment's columns are written.
        nonfinite: int32[1], increased to the number of a key whose gradient is NaN or infinite, if there is one.
        largest, limit: see :class:`FusedInputs`. The call does nothing if the kernel that updates rows forms the sums.
            With None, the call always forms the sums.
    """
    columns = columns_of(dim)
    launch(
        _sum_terms, len(terms.starts) - 1, rows_at_once(columns), *described_terms(sources, terms), pieces.starts, sums,
        num_keys, totals, totals.shape[1], first_column, nonfinite, nonfinite if largest is None else largest, limit, dim,
        POOLED=sources.pooled, WHOLE=sources.whole, ALIGNED=sources.aligned and aligned(4 * dim), DIRECT=largest is not None, COLUMNS=columns,
        in_turn=True,
    )  # fmt: skip
