"""Batch norm over the examples of all trainers, without changes to the model.

This is "Global BN" of Chen et al., "A simple framework for contrastive learning of visual representations" (ICML
2020), §2.2. PICASSO's discussion (§IV) asks for it if batches are very large. ``nn.SyncBatchNorm`` only works on GPUs.

Shapes: B examples of this rank, C channels, R ranks. An input may have more dimensions after [B, C].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from girih.comm.group import TrainerGroup
from girih.models.layers.autograd import Context
from girih.models.layers.mlp import lacks_variance
from girih.telemetry.stats import Stats


class _BatchNorm(NamedTuple):
    """The arguments of a call of ``torch.nn.functional.batch_norm``."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class GlobalBatchNorm(TorchFunctionMode):
    """A torch mode in which ``torch.nn.functional.batch_norm`` in training uses the moments of all ranks' examples.

    A mode also works with users' ``nn.BatchNorm1d`` layers (decision 0006). All ranks must run the same layers in the
    same order, forward and backward. If the step has one example in total, the running moments normalize it.

    Args:
        counted: True if this rank's examples count. False if an example only replaces an empty share. This example
            changes no moment and gets gradients of 0.
        stats: counts the bytes sent.
    """

    def __init__(self, ranks: TrainerGroup, stats: Stats, *, counted: bool = True) -> None:
        super().__init__()
        self._ranks, self._stats, self._counted = ranks, stats, counted

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is lacks_variance:
            return False  # batch_norm itself checks whether the step has too few examples
        if func is F.batch_norm:
            return self._batch_norm(_BatchNorm(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _batch_norm(self, call: _BatchNorm) -> Tensor:
        """Computes ``torch.nn.functional.batch_norm``, from [B, C, ...] to [B, C, ...]."""
        input, running_mean, running_var = call.input, call.running_mean, call.running_var
        if call.training:
            mean, variance, count = self._moments(input.detach())
            if count > 1:
                if running_mean is not None and running_var is not None:
                    running_mean.lerp_(mean.to(running_mean.dtype), call.momentum)
                    unbiased = variance * (count / (count - 1))
                    running_var.lerp_(unbiased.to(running_var.dtype), call.momentum)
                if torch.is_grad_enabled() and not input.requires_grad:
                    input = input.detach().requires_grad_()  # all ranks take part in the backward sums
                scale = (variance + call.eps).rsqrt()
                way = self._sum, count, self._counted
                output: Tensor = _Normalized.apply(input, call.weight, call.bias, mean, scale, way)  # type: ignore[no-untyped-call]
                return output
            if running_mean is None or running_var is None:
                raise ValueError(
                    "batch norm without running moments: expected two examples in a step, got one"
                )
        return F.batch_norm(*call._replace(training=False))

    def _moments(self, input: Tensor) -> tuple[Tensor, Tensor, float]:
        """Returns mean and biased variance of all ranks' examples, [C] each, and the number of values per channel.

        Each rank sends its number of values, their mean, and the sum of squared deviations from this mean. The moments
        are combined by eq. 1.5 of Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983). The
        mean of squares minus the square of the mean would lose precision in float32 if the mean is far from 0.
        """
        values, channels = _at_least_float32(input), input.shape[1]
        local = values.new_zeros(1 + 2 * channels)
        if self._counted and len(values):
            local_mean = values.mean(_others(values))
            local[0] = values.numel() // channels
            local[1 : 1 + channels] = local_mean
            local[1 + channels :] = (values - _shaped(local_mean, values)).square_().sum(_others(values))
        gathered = self._ranks.all_gather(local)
        self._stats.sent("dense", (self._ranks.size - 1) * local.nbytes)
        counts, means, squares = gathered.split([1, channels, channels], dim=1)  # type: ignore[no-untyped-call]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        square = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        return mean, square / count, count.item()

    def _sum(self, local: Tensor) -> Tensor:
        """Returns the sum over all ranks."""
        total = local.clone()
        self._ranks.all_reduce(total)
        self._stats.sent("dense", 2 * (self._ranks.size - 1) * local.nbytes // self._ranks.size)
        return total


class _NormalizedContext(Context, Protocol):
    way: tuple[Callable[[Tensor], Tensor], float, bool]
    dtype: torch.dtype


class _Normalized(torch.autograd.Function):
    """Computes (x − mean) · scale · weight + bias. Mean and scale are functions of x on all ranks."""

    @staticmethod
    def forward(
        ctx: _NormalizedContext,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        way: tuple[Callable[[Tensor], Tensor], float, bool],
    ) -> Tensor:
        normal = (_at_least_float32(input) - _shaped(mean, input)).mul_(_shaped(scale, input))
        ctx.save_for_backward(normal, weight, scale)
        ctx.way, ctx.dtype = way, input.dtype
        # The result is always a new tensor, because the next layer may work in place.
        output = normal.clone() if weight is None else normal * _shaped(weight, normal)
        if bias is not None:
            output += _shaped(bias, normal)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _NormalizedContext, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        """Computes the gradients of Ioffe and Szegedy, "Batch normalization" (2015), §3, with sums over all ranks.

        The gradients of weight and bias stay local. They are summed later, together with other parameters' gradients.
        """
        normal, weight, scale = ctx.saved_tensors
        sum_over_ranks, count, counted = ctx.way
        gradient = gradient.to(normal.dtype)
        local = torch.stack([(gradient * normal).sum(_others(normal)), gradient.sum(_others(normal))])
        along, mean = (sum_over_ranks(local) / count).unbind()
        if counted:
            of_input = gradient - _shaped(mean, normal) - normal * _shaped(along, normal)
            of_input *= _shaped(scale if weight is None else scale * weight, normal)
        else:
            of_input = torch.zeros_like(normal)
        of_weight, of_bias = local
        return (
            of_input.to(ctx.dtype),
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _others(values: Tensor) -> list[int]:
    """Returns all dimensions except the channels."""
    return [0, *range(2, values.dim())]


def _shaped(by_channel: Tensor, values: Tensor) -> Tensor:
    """Reshapes [C] to [1, C, 1, ...]."""
    return by_channel.view(1, -1, *[1] * (values.dim() - 2))
