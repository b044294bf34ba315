"""Row updates with a deferred outcome: the GPU decides whether to apply them, and the host learns it one step later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.sparse.groups.group import EmbeddingGroup, ReadRows, feature_of

Numbers = Sequence[float]
Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Joins the votes of all halves of all R trainers on a step, on the device; called once per step.

Takes a 0-d bool, whether these rows refuse the step, and float64[S], other numbers for all trainers. Returns a 0-d bool, whether
anybody refuses the step, and float64[R, S], the numbers of all trainers.
"""


def _no_result(numbers: Numbers) -> None:
    return None


@dataclass(frozen=True)
class DeferredUpdate:
    """A launched update, which moves nothing if its step is refused.

    Attributes:
        refused: 0-d bool, on the device: the step is refused.
        reported: float64[K], on the device: the numbers that the host reads later.
        error_from: the numbers on the host → why the rows refuse the step; None if they do not.
        counters_from: the numbers on the host → counters after the update; None if the half must be asked. Called once per step, in
            order.
        rollback: undoes on the host what the step changed there, once the host learns that it was refused.
        pending: the update on its way to other processes; None if everything launched later sees it.
    """

    refused: Tensor
    reported: Tensor
    error_from: Callable[[Numbers], NonFiniteError | None] = _no_result
    counters_from: Callable[[Numbers], Mapping[str, int] | None] = _no_result
    rollback: Callable[[], None] = lambda: None
    pending: Any = None

    def done(self) -> bool:
        """Whether reads see it, or will."""
        return self.pending is None or bool(self.pending.done())

    def wait(self) -> None:
        """Blocks until they do."""
        if self.pending is not None:
            self.pending.wait()


def nonfinite_gradient(feature: str) -> NonFiniteError:
    """The error that names a feature."""
    return NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite")


def apply_masked(
    agree: Agree,
    groups: Sequence[EmbeddingGroup],
    reads: Sequence[ReadRows],
    gradients: Sequence[Sequence[Any]],
    batch: Batch,
    step: int,
    lr_scale: float,
) -> DeferredUpdate:
    """Moves the rows of all groups, or of none if the step is refused. A gradient that is not finite refuses it.

    Args:
        groups: in GPU memory; other arguments are those of :func:`girih.sparse.groups.group.apply_all`.
    """
    updates: list[tuple[EmbeddingGroup, Any, Any]] = []
    for group, read, group_gradients in zip(groups, reads, gradients, strict=True):
        summed = group.gradients(read, group_gradients, batch)
        if summed is not None:
            updates.append((group, read, summed))
    first_group: Any = groups[0]
    none = torch.empty(0, dtype=torch.int32, device=first_group.device)
    keys = torch.cat([none, *(summed.refused for _, _, summed in updates)])
    refused, _ = agree((keys >= 0).any(), none.double())
    # as the kernels have it: a key's number where the step is refused, else -1
    flag = refused.to(torch.int32).reshape(1) - 1
    for group, read, summed in updates:
        group.apply(read, replace(summed, refused=flag), step, lr_scale)
    inverses = [(group, read.keys.unique.inverse) for group, read, _ in updates]

    def error_from(numbers: Numbers) -> NonFiniteError | None:
        for (group, inverse), key in zip(inverses, numbers, strict=True):
            if key >= 0:
                return nonfinite_gradient(feature_of(group.group, inverse.cpu().numpy(), int(key), batch))
        return None

    return DeferredUpdate(refused, keys.double(), error_from)
