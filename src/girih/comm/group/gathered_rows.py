"""The rows of all trainers on each of them, with gradients.

Shapes: R trainers, N rows of all of them, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from girih.comm.group.trainers import TrainerGroup


def gathered_rows(rows: Tensor, ranks: TrainerGroup, sizes: Sequence[int]) -> Tensor:
    """T[N, ...]: the rows of all trainers, T[sizes[rank], ...] each, in the order of ranks.

    Called by all together, and so is its backward pass, in which each trainer gets the sum of what all have found for its rows.
    """
    if ranks.size == 1:
        return rows
    found: Tensor = _Gathered.apply(rows, ranks, tuple(sizes))  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: TrainerGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        width = rows.shape[1:].numel()
        ctx.counts = [size * width for size in sizes]
        own = [rows.numel()] * ranks.size
        flat = ranks.exchange(rows.detach().reshape(-1).repeat(ranks.size), own, ctx.counts)
        return flat.view(sum(sizes), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks, sizes = ctx.ranks, ctx.sizes
        own = [ctx.counts[ranks.rank]] * ranks.size
        parts = ranks.exchange(gradient.contiguous().reshape(-1), ctx.counts, own)
        found = parts.view(ranks.size, sizes[ranks.rank], *gradient.shape[1:])
        total = found[0].clone()
        for part in found[1:]:  # in the order of ranks, on all of them
            total += part
        return total, None, None
