"""Speeds at which trainers compute and talk to each other, measured in a moment, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from girih.comm.group import TrainerGroup
from girih.planner.traffic import Speeds, ring_bytes

NUMBERS, SIDE, TRIES = 1 << 20, 512, 5
MEMORY_NUMBERS = 1 << 23
"""Numbers that are copied, more than caches hold."""


def measure_speeds(ranks: TrainerGroup) -> Speeds:
    """Rank 0's measured speeds, on all ranks, per second and trainer.

    They are the bytes that a trainer sends in AllReduce, the operations of its matrix products, the bytes that a copy
    reads and writes, and the time of a message that has hardly any. All compute, send and copy at the same time, as they do
    in training.
    """
    buffer, matrix, one = torch.zeros(NUMBERS), torch.ones(SIDE, SIDE), torch.zeros(1)
    source, target = torch.ones(MEMORY_NUMBERS), torch.zeros(MEMORY_NUMBERS)
    sending_s = _seconds(lambda: ranks.all_reduce(buffer), ranks)
    computing_s = _seconds(lambda: torch.mm(matrix, matrix), ranks)
    copying_s = _seconds(lambda: target.copy_(source), ranks)
    asking_s = _seconds(lambda: ranks.all_reduce(one), ranks)
    num_messages = 2 * (ranks.size - 1)  # of a ring, one after the other
    found = [
        ring_bytes(4 * NUMBERS, ranks.size) / sending_s,
        2 * SIDE**3 / computing_s,
        2 * 4 * MEMORY_NUMBERS / copying_s,
        asking_s / max(1, num_messages),
    ]
    return Speeds(*ranks.broadcast(found))


def _seconds(work: Callable[[], object], ranks: TrainerGroup) -> float:
    took = []
    for _ in range(TRIES):
        ranks.barrier()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return median(took)
