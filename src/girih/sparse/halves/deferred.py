"""Row updates with a deferred outcome. The GPU decides whether to apply them, and the host learns the outcome one step later."""

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
from girih.sparse.groups.group import EmbeddingGroup, feature_of
from girih.sparse.groups.local_shards import LocalShards
from girih.store import Store
from girih.store.gpu.gpu_memory import GpuMemory, to_device
from girih.store.gpu.gpu_state import GpuState

Numbers = Sequence[float]
Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Joins what all halves of all R trainers say of a step, on the device; called once.

Takes a 0-d bool, whether these rows refuse it, and float64[S], what else all are to be told. Returns a 0-d bool, whether anything
refuses it, and float64[R, S], what all told.
"""


def _nothing(numbers: Numbers) -> None:
    return None


@dataclass(frozen=True)
class DeferredUpdate:
    """An update that is launched, and that moves nothing where its step is refused.

    Attributes:
        refused: 0-d bool, on the device: the step is.
        reported: float64[K], on the device: the numbers that the host reads later.
        error_from: the reported numbers → the error of the rows that refuse the step; None if they do not refuse it.
        counters_from: the reported numbers → counters after the update; None if others must be asked. Called once, in the order of steps.
        rollback: undoes the step on the host, once the host learns that it was refused.
        pending: the update's way to other processes; None where whatever is launched later sees it.
    """

    refused: Tensor
    reported: Tensor
    error_from: Callable[[Numbers], NonFiniteError | None] = _nothing
    counters_from: Callable[[Numbers], Mapping[str, int] | None] = _nothing
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
    """The refusal that names a feature."""
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
    reads: Sequence[Any],
    given: Sequence[Sequence[Any]],
    batch: Batch,
    step: int,
    lr_scale: float,
) -> DeferredUpdate:
    """Moves the rows of all groups, or of none where the step is refused, as it is where a gradient is not finite.

    Args:
        groups: in GPU memory; other arguments are those of :func:`girih.sparse.groups.group.apply_all`.
    """
    updates = []
    for group, read, own in zip(groups, reads, given, strict=True):
        found: Any = group.gradients(read, own, batch)
        if found is not None:
            updates.append((group, read, found))
    there: Any = groups[0]
    none = torch.empty(0, dtype=torch.int32, device=there.device)
    keys = torch.cat([none, *(found.refused for _, _, found in updates)])
    refused, _ = agree((keys >= 0).any(), none.double())
    # as the kernels have it: a key's number where the step is refused, else -1
    flag = refused.to(torch.int32).reshape(1) - 1
    for group, read, found in updates:
        group.apply(read, replace(found, refused=flag), step, lr_scale)
    inverses = [(group, read.keys.unique.inverse) for group, read, _ in updates]

    def explain(numbers: Numbers) -> NonFiniteError | None:
        for (group, inverse), key in zip(inverses, numbers, strict=True):
            if key >= 0:
                return nonfinite_gradient(feature_of(group.group, inverse.cpu().numpy(), int(key), batch))
        return None

    return DeferredUpdate(refused, keys.double(), explain)


def with_counts(update: DeferredUpdate, shards: LocalShards) -> DeferredUpdate:
    """The same update, which tells the counters of shards after it as well, where all of them are in GPU memory alone."""
    stores = [store for _, store in shards.files()]
    memories = [store.state.memory for store in stores if isinstance(store.state, GpuState)]
    if len(memories) < len(stores):
        return update
    counts, num_own = counts_of(stores, memories), len(update.reported)
    return replace(
        update,
        reported=torch.cat([update.reported, counts.numbers]),
        error_from=lambda numbers: update.error_from(numbers[:num_own]),
        counters_from=lambda numbers: counts.by_name(numbers[num_own:]),
    )


def counts_of(stores: Sequence[Store], memories: Sequence[GpuMemory]) -> DeferredCounts:
    """Counters of stores in GPU memory as they are once all is done that was launched."""
    parts = [memory.counts() for memory in memories]
    ends = np.cumsum([len(part) for part in parts])
    # what stores themselves are asked for the host counts
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
