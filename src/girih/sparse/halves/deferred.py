"""Row updates with a deferred outcome: the GPU decides whether to apply them, and the host learns it one step later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.sparse.groups.group import EmbeddingGroup, ReadRows, feature_of
from girih.sparse.groups.local_shards import LocalShards
from girih.store import Store
from girih.store.gpu.gpu_memory import GpuMemory, to_device
from girih.store.gpu.gpu_state import GpuState

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


@dataclass(frozen=True)
class DeferredCounts:
    """Counters on their way to the host.

    Attributes:
        numbers: float64[K], on the device. by_name: these on the host → counters, as ``SparseStats`` has them.
    """

    numbers: Tensor
    by_name: Callable[[Numbers], Mapping[str, int]]


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


def with_counts(update: DeferredUpdate, shards: LocalShards) -> DeferredUpdate:
    """The same update, which also reports the counters of the shards if all of them are in GPU memory alone."""
    stores = [store for _, store in shards.files()]
    memories = [store.state.memory for store in stores if isinstance(store.state, GpuState)]
    if len(memories) < len(stores):
        return update
    counts, num_words = counts_of(stores, memories), len(update.reported)
    return replace(
        update,
        reported=torch.cat([update.reported, counts.numbers]),
        error_from=lambda numbers: update.error_from(numbers[:num_words]),
        counters_from=lambda numbers: counts.by_name(numbers[num_words:]),
    )


def counts_of(stores: Sequence[Store], memories: Sequence[GpuMemory]) -> DeferredCounts:
    """Counters of stores in GPU memory, after all launched work."""
    parts = [memory.counts() for memory in memories]
    ends = np.cumsum([len(part) for part in parts])
    # the host counts requests to the stores themselves
    of_host = [sum(store.num_peeks for store in stores), sum(store.num_absent for store in stores)]
    there = to_device(np.array(of_host, np.int64), memories[0].device)

    def by_name(numbers: Numbers) -> Mapping[str, int]:
        *of_memories, (peeks, absent) = np.split(np.array(numbers).astype(np.int64), ends)
        total = Counter(peeks=int(peeks), absent=int(absent))
        for memory, part in zip(memories, of_memories, strict=True):
            total.update(memory.counters_of(part))
        return dict(total)

    return DeferredCounts(torch.cat([*parts, there]).double(), by_name)


def summed_over(counts: DeferredCounts, ranks: TrainerGroup) -> DeferredCounts:
    """The counters of all trainers together, which have the same tables; their message is launched."""
    numbers = counts.numbers.clone()
    ranks.all_reduce(numbers)
    return replace(counts, numbers=numbers)
