"""Updates the rows of all groups of a process, if the vote on the step allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.trainers import Numbers, Vote
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.sparse.groups.embedding_group import AnyGroup, ReadRows
from girih.sparse.groups.group import feature_of
from girih.sparse.groups.pack import Group

Inverses = Sequence[tuple[Group, NDArray[np.int32] | Tensor]]
"""Groups, each with the key number of each of its ids, int32[N], on its device."""


def nonfinite_gradient(feature: str | None) -> NonFiniteError | None:
    """Returns the error that names a feature, or None without a feature."""
    return (
        None if feature is None else NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite")
    )


def nonfinite_feature(inverses: Inverses, batch: Batch, keys: Numbers) -> str | None:
    """Returns a feature whose gradient is NaN or infinite, or None.

    Args:
        keys: for each group a key whose gradient is NaN or infinite, or -1.
    """
    for (group, inverse), key in zip(inverses, keys, strict=True):
        if key >= 0:
            on_host = inverse.cpu().numpy() if isinstance(inverse, Tensor) else inverse
            return feature_of(group, on_host, int(key), batch)
    return None


def apply_all(
    groups: Sequence[AnyGroup],
    reads: Sequence[ReadRows],
    gradients: Sequence[Sequence[Any]],
    batch: Batch,
    step: int,
    lr_scale: float,
    vote: Vote,
) -> Callable[[Numbers], str | None]:
    """Casts the vote. Unless the step is refused, updates the rows of all groups by the gradients of their outputs.

    Returns:
        A function: ``vote.reported`` on the host → a feature whose gradient is NaN or infinite, or None.
    """
    updates: list[tuple[AnyGroup, Any, Any]] = []
    for group, read, group_gradients in zip(groups, reads, gradients, strict=True):
        summed = group.gradients(read, group_gradients, batch)
        if summed is not None:
            updates.append((group, read, summed))
    vote.reported = numbers_on(vote.loss.device, [summed.nonfinite_key for _, _, summed in updates])
    vote.cast((vote.reported >= 0).any())
    if not vote.known_refused:
        for group, read, summed in updates:
            if vote.deferred:  # kernels expect -1 if they must update rows, and the number of a key otherwise
                flag = vote.refused.to(torch.int32).reshape(1) - 1
                summed = replace(summed, nonfinite_key=flag)
            group.apply(read, summed, step, lr_scale)
    inverses = [(group.group, group.inverse(read)) for group, read, _ in updates]
    feature_from = partial(nonfinite_feature, inverses, batch)
    vote.error_from = lambda numbers: nonfinite_gradient(feature_from(numbers))
    return feature_from


def numbers_on(device: torch.device, numbers: Sequence[int | Tensor]) -> Tensor:
    """Returns float64[K] on a device, from K numbers or tensors of one number. Never waits for a GPU."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)  # one call, because each takes time
    parts = [n.reshape(1) if isinstance(n, Tensor) else torch.full((1,), n, device=device) for n in numbers]
    return torch.cat([torch.empty(0, dtype=torch.float64, device=device), *parts])
