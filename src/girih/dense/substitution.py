"""Exchanges partial results between trainers and returns their gradients (DES, Algorithm 1).

There are two ways. "replicated": each trainer gets the totals of all examples, by one AllReduce in the forward pass.
The backward pass needs no communication. "split": each trainer gets the totals of its share of the examples, by a
reduce-scatter in the forward pass and an all-gather of the gradients in the backward pass. The reduce-scatter is
implemented as an AllToAll and a sum, because gloo's reduce-scatter sends the same number of bytes as its AllReduce.

Shapes: B examples, b of them in this trainer's share, W columns, w of them on this trainer, R trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.models.operators import ParameterSplit
from girih.telemetry.stats import Stats

Way = Callable[[Tensor], Tensor]


class Aggregation:
    """Exchange of partial results between trainers.

    Args:
        half: True sends partial results as bfloat16, and with "split" also their gradients. Sums are always float32.
        stats: counts time and bytes sent.
    """

    def __init__(self, ranks: TrainerGroup, stats: Stats, *, half: bool = False) -> None:
        self.ranks, self.stats = ranks, stats
        self.dtype = torch.bfloat16 if half else torch.float32

    def summed(self, partial: Tensor, *, split: bool, polls_stop: bool = False) -> Tensor:
        """Sums partial results, float32[B, W], over trainers: float32[B, W], or with ``split`` float32[b, W].

        Args:
            polls_stop: True sends requests to stop with the partial results. It needs float32, without ``split``.
        """
        num_examples = len(partial)
        if split:  # each trainer has only the gradients of its share
            return _crossed(partial, self._sum_share, lambda gradient: self._gather(gradient, num_examples))
        # each trainer has the whole gradient
        return _crossed(
            partial, lambda values: self._sum_all(values, polls_stop=polls_stop), lambda gradient: gradient
        )

    def joined(self, columns: Tensor, places: Sequence[Tensor], *, split: bool) -> Tensor:
        """Joins each trainer's columns, float32[B, w], to all columns: float32[B, W], or with ``split`` float32[b, W].

        Args:
            places: the positions of each trainer's columns among all W.
        """
        rank, size, shape = self.ranks.rank, self.ranks.size, columns.shape
        counts = self.shares(len(columns)) if split else [len(columns)] * size
        of_own = [count * shape[1] for count in counts]
        of_each = [counts[rank] * len(each) for each in places]

        def there(columns: Tensor) -> Tensor:
            flat = columns.reshape(-1)
            received = self._exchange(flat if split else flat.repeat(size), of_own, of_each)
            whole = columns.new_empty(counts[rank], sum(len(each) for each in places))
            for part, where in zip(received.split(of_each), places, strict=True):  # type: ignore[no-untyped-call]
                whole.index_copy_(1, where, part.view(counts[rank], len(where)))
            return whole

        def back(gradient: Tensor) -> Tensor:
            if not split:
                return gradient.index_select(1, places[rank])
            sent = torch.cat([gradient.index_select(1, each).reshape(-1) for each in places])
            return self._exchange(sent, of_each, of_own).view(shape)

        return _crossed(columns, there, back)

    def shares(self, num_examples: int) -> list[int]:
        """Returns the number of examples of each trainer, as in ``share_of``."""
        size = self.ranks.size
        return [(rank + 1) * num_examples // size - rank * num_examples // size for rank in range(size)]

    def _sum_all(self, values: Tensor, *, polls_stop: bool) -> Tensor:
        """Returns the sum over all trainers, on every trainer."""
        if self.ranks.size == 1:
            return values
        if self.dtype == torch.bfloat16:  # a ring would round the sum at every step
            return self._gather(self._sum_share(values), len(values))
        stops = values.new_full((int(polls_stop),), self.ranks.stop_requested)
        joined = torch.cat([values.reshape(-1), stops])
        with self.stats.spans("aggregate"):
            self.ranks.all_reduce(joined)
        self.stats.sent("partials", 2 * (self.ranks.size - 1) * values.numel() * 4 // self.ranks.size)
        if polls_stop:
            self.ranks.note_stops(joined[-1].item())
        return joined[: values.numel()].view_as(values)

    def _sum_share(self, values: Tensor) -> Tensor:
        """Sums [B, W] over all trainers, and returns the rows of this trainer's examples, [b, W]."""
        width, size = values.shape[1], self.ranks.size
        counts = self.shares(len(values))
        num_local = counts[self.ranks.rank]
        received = self._exchange(
            values.reshape(-1), [width * count for count in counts], [width * num_local] * size
        )
        return received.view(size, num_local, width).sum(0)

    def _gather(self, share: Tensor, num_examples: int) -> Tensor:
        """Gathers the examples of all trainers: [b, W] to [B, W]."""
        width = share.shape[1]
        sizes = [width * count for count in self.shares(num_examples)]
        sent = share.reshape(-1).repeat(self.ranks.size)
        return self._exchange(sent, [share.numel()] * self.ranks.size, sizes).view(num_examples, width)

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """AllToAllv of float32 numbers, which may be sent as bfloat16."""
        rank, itemsize = self.ranks.rank, self.dtype.itemsize
        if self.ranks.size == 1:
            return sent
        self.stats.sent("partials", itemsize * (sum(sent_sizes) - sent_sizes[rank]))
        raw = sent.contiguous().to(self.dtype).view(torch.uint8)
        with self.stats.spans("aggregate"):
            received = self.ranks.exchange(
                raw, [itemsize * n for n in sent_sizes], [itemsize * n for n in received_sizes]
            )
        return received.view(self.dtype).float()


def _crossed(partial: Tensor, there: Way, back: Way) -> Tensor:
    """Sends a partial result ``there``, in a graph that sends its gradient ``back``.

    Trainers without parameters to learn need the graph too, because all take part in the backward communication.
    """
    if torch.is_grad_enabled() and not partial.requires_grad:
        partial.requires_grad_()
    whole: Tensor = _Crossed.apply(partial, there, back)  # type: ignore[no-untyped-call]
    return whole


class _CrossedContext(Protocol):
    back: Way


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CrossedContext, partial: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(partial)

    @staticmethod
    def backward(ctx: _CrossedContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


Change = Callable[[ParameterSplit, Tensor], Tensor]


class ShardedParameters(dict[nn.Parameter, ParameterSplit]):
    """Maps each sharded parameter of a module to this trainer's part.

    Args:
        optimizer: the optimizer of the module's parameters. Each state of a parameter must have the size of the
            parameter, or be a single number.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: TrainerGroup
    ) -> None:
        super().__init__()
        self._module, self._optimizer, self._ranks = module, optimizer, ranks

    def keep(self, parameter: nn.Parameter, split: ParameterSplit) -> None:
        """Records that this trainer has only a part of a parameter now, and cuts its optimizer state to this part."""
        self[parameter] = split
        if self._optimizer is not None and parameter in self._optimizer.state:
            self._optimizer.state[parameter] = _changed(
                self._optimizer.state[parameter], split, ParameterSplit.part_of
            )

    def whole(self, state: DenseState) -> DenseState:
        """Returns a dense half's state in which all parameters and their optimizer state are whole.

        All trainers must call this method together.
        """
        return self._with(state, self._joined)

    def part(self, state: DenseState) -> DenseState:
        """Returns this trainer's part of a whole state. The inverse of :meth:`whole`."""
        return self._with(state, ParameterSplit.part_of)

    def _with(self, state: DenseState, change: Change) -> DenseState:
        splits = {name: self[p] for name, p in self._module.named_parameters() if p in self}
        model = {n: change(splits[n], value) if n in splits else value for n, value in state["model"].items()}
        optimizer = dict(state["optimizer"])
        if optimizer and self._optimizer is not None:
            order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            moments = dict(optimizer["state"])
            for number, parameter in enumerate(order):
                if parameter in self and number in moments:
                    moments[number] = _changed(moments[number], self[parameter], change)
            optimizer["state"] = moments
        return {**state, "model": model, "optimizer": optimizer}

    def _joined(self, split: ParameterSplit, part: Tensor) -> Tensor:
        shape = [split.size if dim == split.dim else size for dim, size in enumerate(part.shape)]
        whole = part.new_zeros(shape).index_copy_(split.dim, split.places.to(part.device), part)
        self._ranks.all_reduce(whole)  # exact, because all other summands are zero
        return whole


def _changed(moments: Mapping[str, object], split: ParameterSplit, change: Change) -> dict[str, object]:
    """Applies a change to the optimizer state of a parameter, except to single numbers."""
    return {
        key: change(split, value) if isinstance(value, Tensor) and value.dim() else value
        for key, value in moments.items()
    }
