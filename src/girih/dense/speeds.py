"""Speeds at which trainers compute and talk to each other, measured in a moment, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from girih.comm.group import TrainerGroup
from girih.planner.traffic import Speeds, ring_bytes

NUMBERS, SIDE, TRIES = 1 << 20, 512, 5


def measure_speeds(ranks: TrainerGroup) -> Speeds:
    """Rank 0's measured speeds, on all ranks, per second and trainer.

    They are the bytes that a trainer sends in AllReduce, and the operations of its matrix products. All
    compute and send at the same time, as they do in training.
    """
    buffer, matrix = torch.zeros(NUMBERS), torch.ones(SIDE, SIDE)
    sending_s = _seconds(lambda: ranks.all_reduce(buffer), ranks)
    computing_s = _seconds(lambda: torch.mm(matrix, matrix), ranks)
    found = [ring_bytes(4 * NUMBERS, ranks.size) / sending_s, 2 * SIDE**3 / computing_s]
    bytes_per_s, flops_per_s = ranks.broadcast(found)
    return Speeds(bytes_per_s, flops_per_s)


def _seconds(work: Callable[[], object], ranks: TrainerGroup) -> float:
    took = []
    for _ in range(TRIES):
        ranks.barrier()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return median(took)
