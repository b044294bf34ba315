"""Counters of rows in GPU memory that reach the host one step later, with the outcome of an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Numbers, Vote
from girih.sparse.groups.local_shards import LocalShards
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.gpu_state import GpuState


@dataclass(frozen=True)
class DeferredCounts:
    """Counters on their way to the host.

    Attributes:
        numbers: float64[K], on the device. by_name: these numbers on the host → counters, as in ``SparseStats``.
    """

    numbers: Tensor
    by_name: Callable[[Numbers], Mapping[str, int]]


def report_counts(vote: Vote, shards: LocalShards) -> None:
    """Makes a vote also report the counters of the shards, if all of them are in GPU memory alone."""
    counts = counts_of(shards)
    if counts is None:
        return
    num_words, error_from = len(vote.reported), vote.error_from
    vote.reported = torch.cat([vote.reported, counts.numbers])
    vote.error_from = lambda numbers: error_from(numbers[:num_words])
    vote.counters_from = lambda numbers: counts.by_name(numbers[num_words:])


def counts_of(shards: LocalShards) -> DeferredCounts | None:
    """Returns the counters of shards, after all launched work. Returns None unless all are in GPU memory alone."""
    stores = [store for _, store in shards.files()]
    memories = [store.state.memory for store in stores if isinstance(store.state, GpuState)]
    if not memories or len(memories) < len(stores):
        return None
    parts = [memory.counts() for memory in memories]
    ends = np.cumsum([len(part) for part in parts])
    # the host counts these, because they are requests to the stores themselves
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
    """Returns the counters summed over all trainers, which have the same tables. Launches the message."""
    numbers = counts.numbers.clone()
    ranks.all_reduce(numbers)
    return replace(counts, numbers=numbers)
