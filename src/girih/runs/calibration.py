"""Measures the links of a machine: collectives of trainers, and calls between two processes, by message size.

Each round of a collective begins when all trainers are there; a point is the median of its rounds, averaged over
trainers. Calls go back and forth with equal arrays, written in place before they are sent; a point is half of it.

Shapes: S bytes of a message, as in :mod:`girih.planner.costs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median

import numpy as np
import torch

from girih.comm.endpoints import connect, listen
from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client, Request
from girih.planner.calibration import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Links, Point
from girih.planner.costs import fit

SIZES = tuple(128 << 2 * power for power in range(9))
"""128 B to 8 MiB."""
POINT_S = 0.2
"""How long a point is measured, but for the fewest rounds."""
_FEWEST, _MOST, _PILOTS = 7, 400, 3
Work = Callable[[], object]


def measure_links(
    ranks: TrainerGroup, *, host: str, secret: bytes, sizes: Sequence[int] = SIZES, point_s: float = POINT_S
) -> Links | None:
    """Measures all links and fits them; returns them on rank 0. Called by all trainers, of which there are two or more.

    Args:
        host: where this trainer listens.
        secret: the run's.
        sizes: S in turn, multiples of 4 bytes for each trainer.
    """
    points: dict[str, list[Point]] = {}
    for size in sizes:
        for name, work in _collectives(ranks, size).items():
            points.setdefault(name, []).append((size, _median_s(work, ranks, point_s)))
    alone = TrainerGroup()
    for name, address in (("tcp", f"tcp://{host}:*"), ("shared", "shm://")):
        with _to_rank_1(ranks, address, secret) as client:
            if client is not None:
                there_and_back = [_median_s(partial(_call, client, size), alone, point_s) for size in sizes]
                points[name] = [(size, each / 2) for size, each in zip(sizes, there_and_back, strict=True)]
    return {name: fit(name, found, ranks.size) for name, found in points.items()} if ranks.first else None


def _collectives(ranks: TrainerGroup, size: int) -> Mapping[str, Work]:
    """Collectives as halves call them."""
    counts = [size // 4 // ranks.size] * ranks.size
    flat = torch.zeros(sum(counts))
    part = flat[: counts[0]].clone()
    exchange = partial(ranks.exchange, flat, counts, counts)
    return {
        ALL_REDUCE: lambda: ranks.all_reduce(flat),
        REDUCE_SCATTER: lambda: exchange().view(ranks.size, -1).sum(0),
        ALL_GATHER: lambda: ranks.exchange(part.repeat(ranks.size), counts, counts),
        ALL_TO_ALL: exchange,
    }


@contextmanager
def _to_rank_1(ranks: TrainerGroup, address: str, secret: bytes) -> Iterator[Client | None]:
    """On rank 0, a client of a server on rank 1 that answers with what it was asked with; the others wait."""
    with ExitStack() as stack:
        served = None
        if ranks.rank == 1:
            served = stack.enter_context(listen(_answer, address=address, secret=secret)).address
        addresses = ranks.gather(served)
        yield None if addresses is None else stack.enter_context(connect(addresses[1], secret=secret))
        ranks.barrier()


def _answer(request: Request) -> None:
    array = request.buffer(np.uint8, request.frame.arrays[0].size)
    array.fill(0)
    request.reply((), (array,))


def _call(client: Client, size: int) -> None:
    array = client.buffer(np.uint8, size)
    array.fill(0)
    client.call(1, (), (array,)).wait()


def _median_s(work: Work, ranks: TrainerGroup, point_s: float) -> float:
    """Seconds of a median round, on average over ranks; all of them make as many rounds."""
    start = time.perf_counter()
    _rounds_s(work, ranks, _PILOTS)
    pilot_s = ranks.largest([time.perf_counter() - start])[0] / _PILOTS
    num_rounds = max(_FEWEST, min(_MOST, int(point_s / pilot_s)))
    return ranks.sum([median(_rounds_s(work, ranks, num_rounds))])[0] / ranks.size


def _rounds_s(work: Work, ranks: TrainerGroup, num_rounds: int) -> list[float]:
    took = []
    for _ in range(num_rounds):
        ranks.barrier()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return took
