"""Updates of rows in GPU memory that the device itself refuses, so that the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from girih.data.batch import Batch
from girih.sparse.groups.group import EmbeddingGroup, feature_of


@dataclass(frozen=True)
class LateUpdate:
    """An update that is launched, and that moves nothing where its step is refused.

    Attributes:
        refused: 0-d bool, on the device: the step is.
        nonfinite_keys: int32[1] of each group that took part: a key whose gradient is not finite, or -1.
        name_of: (number of such a group, key) → name of a feature that has it.
        take_back: what the host is to do once it learns that the step was refused.
    """

    refused: Tensor
    nonfinite_keys: Sequence[Tensor]
    name_of: Callable[[int, int], str]
    take_back: Callable[[], None] = lambda: None

    def done(self) -> bool:
        """Always true: whatever is launched later sees it."""
        return True

    def wait(self) -> None:
        """Returns at once."""


def apply_unless(
    refused: Tensor,
    groups: Sequence[EmbeddingGroup],
    reads: Sequence[Any],
    given: Sequence[Sequence[Any]],
    batch: Batch,
    step: int,
    lr_scale: float,
) -> LateUpdate:
    """Moves the rows of all groups, or of none where the flag is set or a gradient is not finite.

    Args:
        refused: 0-d bool, on the device.
        groups: in GPU memory; other arguments are those of :func:`girih.sparse.groups.group.apply_all`.
    """
    updates = []
    for group, read, own in zip(groups, reads, given, strict=True):
        found: Any = group.gradients(read, own, batch)
        if found is not None:
            updates.append((group, read, found))
    keys = [found.refused for _, _, found in updates]
    if keys:
        refused = refused | (torch.cat(keys) >= 0).any()
    # as the kernels have it: a key's number where the step is refused, else -1
    flag = refused.to(torch.int32).reshape(1) - 1
    for group, read, found in updates:
        group.apply(read, replace(found, refused=flag), step, lr_scale)
    inverses = [(group, read.keys.unique.inverse) for group, read, _ in updates]

    def name_of(number: int, key: int) -> str:
        group, inverse = inverses[number]
        return feature_of(group.group, inverse.cpu().numpy(), key, batch)

    return LateUpdate(refused, keys, name_of)
