"""A stage of a net on group servers, for autograd. All its parts run in parallel, forward and backward (HT §3.1.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih.comm.rpc import Frame
from girih.comm.service import as_text, from_text
from girih.errors import NonFiniteError
from girih.hierarchical.group_client import GroupClient, settled
from girih.hierarchical.optimizer_recipe import OptimizerOptions
from girih.hierarchical.wire import GradientStreams, GroupVerb
from girih.kernels.cpu.arrays import U8
from girih.models.layers.autograd import Context

T = TypeVar("T")
Stage = list[tuple[str, list[Tensor]]]
"""Parts that run in parallel: the name of each, and its inputs."""


class BatchOnServers:
    """One batch of a net on the servers of a group, from the first forward pass until it is applied or dropped.

    Args:
        streams: the codecs of the net's gradients.

    Attributes:
        refusal: the name of a parameter on the servers with a gradient that is NaN or infinite.
    """

    def __init__(self, group: GroupClient, net: int, number: int, streams: GradientStreams) -> None:
        self.refusal: NonFiniteError | None = None
        self._group, self._net, self._number, self._streams = group, net, number, streams
        self._calls = count()
        self._touched: set[int] = set()
        self._leaf = torch.zeros((), requires_grad=True)

    def exchange(self, stage: Stage) -> list[list[Tensor]]:
        """Runs the parts of a stage on their servers. Returns the outputs of each."""
        tensors = [tensor for _, inputs in stage for tensor in inputs]
        if not torch.is_grad_enabled():
            return self.forward(stage, tuple(tensors), (False,) * len(tensors), train=False)[1]
        counts: list[int] = []
        # even without inputs that need gradients, a part has gradients of its parameters
        outputs = _StageFunction.apply(self._leaf, self, stage, counts, *tensors)  # type: ignore[no-untyped-call]
        return _pieces(outputs, counts)

    def norms(self) -> dict[str, float]:
        """The norms of the gradients on the servers, by the names of parameters."""
        norms: dict[str, float] = {}
        for frame in self._ask(GroupVerb.NORMS):
            norms |= from_text(frame.arrays[0])
        return norms

    def apply(self, options: tuple[OptimizerOptions, ...], scale: float = 1.0) -> None:
        """Updates the parameters on the servers with the gradients times ``scale``. Returns when all are done."""
        self._ask(GroupVerb.APPLY, as_text((options, scale)))
        self._streams.apply()

    def discard(self) -> None:
        """Drops the batch on the servers."""
        self._streams.discard()
        self._ask(GroupVerb.DISCARD)

    def _ask(self, verb: GroupVerb, *arrays: U8) -> list[Frame]:
        return self._group.ask(verb, (self._net, self._number), arrays, sorted(self._touched))

    def forward(
        self, stage: Stage, tensors: tuple[Tensor, ...], needs: tuple[bool, ...], *, train: bool
    ) -> tuple[list[int], list[list[Tensor]], list[list[bool]]]:
        """Runs the parts of a stage. Returns the passes' numbers, the outputs, and flags of those with gradients."""
        numbers = [next(self._calls) for _ in stage]
        if train:
            self._touched.update(self._group.server_of(name) for name, _ in stage)
        wanted = _pieces(needs, [len(inputs) for _, inputs in stage])
        inputs_of = _pieces(tensors, map(len, wanted))  # the tensors from autograd, not those in ``stage``
        waiting = [
            self._group.forward((self._net, self._number, number), name, inputs, flags, train=train)
            for number, (name, _), inputs, flags in zip(numbers, stage, inputs_of, wanted, strict=True)
        ]
        found = settled(waiting)
        return numbers, [outputs for outputs, _ in found], [has for _, has in found]

    def backward(
        self, numbers: list[int], names: list[str], gradients: list[list[Tensor | None]]
    ) -> list[list[Tensor | None] | None]:
        """Returns the gradients of the inputs of each part, or None if the part's outputs took no part in the loss."""
        waiting = [
            self._group.backward((self._net, self._number, number), name, given, self._streams.of(name))
            for number, name, given in zip(numbers, names, gradients, strict=True)
            if any(gradient is not None for gradient in given)
        ]
        found = iter(settled(waiting))
        answers: list[list[Tensor | None] | None] = []
        for given in gradients:
            if all(gradient is None for gradient in given):
                answers.append(None)
                continue
            of_inputs, nonfinite = next(found)
            if nonfinite is not None and self.refusal is None:
                self.refusal = NonFiniteError(
                    f"the gradient of dense parameter {nonfinite!r} is NaN or infinite"
                )
            answers.append(of_inputs)
        return answers


def _pieces(values: Sequence[T], sizes: Iterable[int]) -> list[list[T]]:
    """Splits values into lists of these lengths."""
    following = iter(values)
    return [list(islice(following, size)) for size in sizes]


class _Passes(Context, Protocol):
    passes: tuple[BatchOnServers, list[int], list[str]]
    sizes: tuple[list[int], list[int]]


class _StageFunction(torch.autograd.Function):
    """Maps the inputs of all parts to their outputs. Puts the number of outputs of each part into ``counts``."""

    @staticmethod
    def forward(
        ctx: _Passes, leaf: Tensor, batch: BatchOnServers, stage: Stage, counts: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        numbers, outputs, has = batch.forward(stage, tensors, ctx.needs_input_grad[4:], train=True)
        counts.extend(map(len, outputs))
        ctx.passes = batch, numbers, [name for name, _ in stage]
        ctx.sizes = [len(inputs) for _, inputs in stage], list(counts)
        flat = [output for each in outputs for output in each]
        known = [flag for each in has for flag in each]
        ctx.mark_non_differentiable(*(o for o, flag in zip(flat, known, strict=True) if not flag))
        return tuple(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Passes, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (batch, numbers, names), (sizes, counts) = ctx.passes, ctx.sizes
        flat: list[Tensor | None] = []
        answers = batch.backward(numbers, names, _pieces(gradients, counts))
        for size, of_inputs in zip(sizes, answers, strict=True):
            flat += [None] * size if of_inputs is None else of_inputs
        return (None, None, None, None, *flat)
