"""Partial results of all trainers become whole, and their gradients find the way back (DES, Algorithm 1).

Everybody gets the whole of all examples ("replicated": one AllReduce forward, nothing back), or each the whole of its
own examples ("split": a reduce-scatter forward, an all-gather of the gradients back). Reduce-scatter is an AllToAll
and a sum here, since gloo's own sends as many bytes as its AllReduce.

Shapes: B examples, b of them this trainer's, W columns, w of them this trainer's, R trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.runs.stats import Stats


class Aggregation:
    """Exchange of partial results between trainers.

    Args:
        half: partial results, and with "split" their gradients, travel as bfloat16; sums are float32's all the same.
        stats: where time and bytes sent are counted.
    """

    def __init__(self, ranks: TrainerGroup, stats: Stats, *, half: bool = False) -> None:
        self.ranks, self.half, self.stats = ranks, half, stats
        self.itemsize = 2 if half else 4

    def summed(self, partial: Tensor, *, split: bool) -> Tensor:
        """float32[B, W], each trainer's own, to their sum: float32[B, W], or with ``split`` float32[b, W]."""
        kind = _SumOfShare if split else _Sum
        whole: Tensor = kind.apply(_on_the_way_back(partial), self)  # type: ignore[no-untyped-call]
        return whole

    def joined(self, own: Tensor, places: Sequence[Tensor], *, split: bool) -> Tensor:
        """float32[B, w], each trainer's own columns, to all columns: float32[B, W], or with ``split`` float32[b, W].

        Args:
            places: where each trainer's columns stand among all W.
        """
        kind = _JoinOfShare if split else _Join
        whole: Tensor = kind.apply(_on_the_way_back(own), self, places)  # type: ignore[no-untyped-call]
        return whole

    def shares(self, num_examples: int) -> list[int]:
        """The number of examples that are each trainer's: see ``share_of``."""
        bounds = [rank * num_examples // self.ranks.size for rank in range(self.ranks.size + 1)]
        return [last - first for first, last in pairwise(bounds)]

    def sum_all(self, values: Tensor) -> Tensor:
        """The sum over all trainers, everywhere."""
        if self.ranks.size == 1:
            return values
        if self.half:  # a ring would round at every step
            num_examples = len(values)
            return self.gather(self.sum_share(values), num_examples)
        values = values.contiguous().clone()
        with self.stats.spans("aggregate"):
            self.ranks.all_reduce(values)
        self.stats.sent("partials", 2 * (self.ranks.size - 1) * values.numel() * 4 // self.ranks.size)
        return values

    def sum_share(self, values: Tensor) -> Tensor:
        """[B, W] to the sum over all trainers of this trainer's examples, [b, W]."""
        width, size = values.shape[1], self.ranks.size
        shares = self.shares(len(values))
        here = shares[self.ranks.rank]
        received = self.exchange(
            values.reshape(-1), [width * share for share in shares], [width * here] * size
        )
        return received.view(size, here, width).sum(0)

    def gather(self, share: Tensor, num_examples: int) -> Tensor:
        """Each trainer's examples, [b, W], to those of all, [B, W]."""
        width = share.shape[1]
        sizes = [width * count for count in self.shares(num_examples)]
        sent = share.reshape(-1).repeat(self.ranks.size)
        return self.exchange(sent, [share.numel()] * self.ranks.size, sizes).view(num_examples, width)

    def exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """AllToAllv of numbers, float32 on both ends."""
        rank = self.ranks.rank
        if self.ranks.size == 1:
            return sent
        itemsize = self.itemsize
        self.stats.sent("partials", itemsize * (sum(sent_sizes) - sent_sizes[rank]))
        raw = sent.contiguous().to(torch.bfloat16 if self.half else torch.float32).view(torch.uint8)
        with self.stats.spans("aggregate"):
            received = self.ranks.exchange(
                raw, [itemsize * n for n in sent_sizes], [itemsize * n for n in received_sizes]
            )
        return received.view(torch.bfloat16 if self.half else torch.float32).float()


def _on_the_way_back(partial: Tensor) -> Tensor:
    """Has a partial result take part in the backward pass, even where nothing is to be learned from it.

    Trainers with nothing to learn from it need this too: all take part in what crosses the wire backward.
    """
    needed = torch.is_grad_enabled() and not partial.requires_grad
    return partial.requires_grad_() if needed else partial


class _Sum(torch.autograd.Function):
    """All trainers go on alike, so that each has the whole gradient of the sum, which is that of its own part."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, wire: Aggregation) -> Tensor:
        return wire.sum_all(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumOfShare(torch.autograd.Function):
    """Each goes on with its own examples: the gradients of the others' are theirs to tell."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, wire: Aggregation) -> Tensor:
        ctx.wire, ctx.num_examples = wire, len(partial)
        return wire.sum_share(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.gather(gradient, ctx.num_examples), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, wire: Aggregation, places: Sequence[Tensor]) -> Tensor:
        ctx.own = places[wire.ranks.rank]
        size, num_examples = wire.ranks.size, len(own)
        sizes = [num_examples * len(each) for each in places]
        received = wire.exchange(own.reshape(-1).repeat(size), [own.numel()] * size, sizes)
        return _laid(received.split(sizes), places, num_examples)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.own), None, None


class _JoinOfShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, wire: Aggregation, places: Sequence[Tensor]) -> Tensor:
        ctx.wire, ctx.places, ctx.num_examples = wire, places, len(own)
        shares = wire.shares(len(own))
        here = shares[wire.ranks.rank]
        sent = [share * own.shape[1] for share in shares]
        sizes = [here * len(each) for each in places]
        received = wire.exchange(own.reshape(-1), sent, sizes)
        return _laid(received.split(sizes), places, here)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        wire, places, here = ctx.wire, ctx.places, len(gradient)
        width = len(places[wire.ranks.rank])
        sent = torch.cat([gradient.index_select(1, each).reshape(-1) for each in places])
        sizes = [share * width for share in wire.shares(ctx.num_examples)]
        received = wire.exchange(sent, [here * len(each) for each in places], sizes)
        return received.view(ctx.num_examples, width), None, None


def _laid(parts: Sequence[Tensor], places: Sequence[Tensor], num_examples: int) -> Tensor:
    """Columns of each trainer, flat, where they belong."""
    whole = parts[0].new_empty(num_examples, sum(len(each) for each in places))
    for part, where in zip(parts, places, strict=True):
        whole.index_copy_(1, where, part.view(num_examples, len(where)))
    return whole
