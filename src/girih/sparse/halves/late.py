"""Updates of rows in GPU memory that the device itself refuses, so that the host waits for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.data.batch import Batch
from girih.sparse.groups.group import EmbeddingGroup, feature_of
from girih.sparse.groups.local_shards import LocalShards
from girih.store.gpu.gpu_state import GpuState


@dataclass(frozen=True)
class LateCounts:
    """Counters on their way to the host.

    Attributes:
        numbers: float64[K], on the device. by_name: these on the host → counters, as ``SparseStats`` has them.
    """

    numbers: Tensor
    by_name: Callable[[Sequence[float]], Mapping[str, int]]


@dataclass(frozen=True)
class LateUpdate:
    """An update that is launched, and that moves nothing where its step is refused.

    Attributes:
        refused: 0-d bool, on the device: the step is.
        nonfinite_keys: int32[1] of each group that took part: a key whose gradient is not finite, or -1.
        name_of: (number of such a group, key) → name of a feature that has it.
        take_back: what the host is to do once it learns that the step was refused.
        counts: counters after the update; None where the host has to ask for some.
    """

    refused: Tensor
    nonfinite_keys: Sequence[Tensor]
    name_of: Callable[[int, int], str]
    take_back: Callable[[], None] = lambda: None
    counts: LateCounts | None = None

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


def counts_of(shards: LocalShards) -> LateCounts | None:
    """Counters of shards as they are once all is done that was launched; None where some are not in GPU memory alone."""
    stores = [store for _, store in shards.files()]
    memories = [store.state.memory for store in stores if isinstance(store.state, GpuState)]
    if not memories or len(memories) < len(stores):
        return None
    parts = [memory.counts() for memory in memories]
    ends = np.cumsum([len(part) for part in parts])
    of_host: Counter[str] = Counter()
    for store in stores:
        of_host.update(peeks=store.num_peeks, absent=store.num_absent)

    def by_name(numbers: Sequence[float]) -> Mapping[str, int]:
        total = Counter(of_host)
        for memory, part in zip(memories, np.split(np.array(numbers), ends[:-1]), strict=True):
            total.update(memory.counters_of(part.astype(np.int64)))
        return dict(total)

    return LateCounts(torch.cat(parts).double(), by_name)
