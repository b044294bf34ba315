"""Measures the links of a machine: collectives of trainers, calls between two processes by message size, and codecs of messages.

A point is what the fastest tenth of rounds took at most, averaged over trainers; rounds begin when all are there. So
it is the link's own time: a median jumps tenfold where other processes want the cores as well. Rounds are made in
several passes over all points: what disturbs for a while disturbs a few rounds of many points, not all of one. Calls
go back and forth with equal arrays, written in place before they are sent; a point is half of it.

Processor time is that of all rounds, less what as many rounds of nothing take. Both ends of a call do the same, so that it
is twice that of one.

Shapes: S bytes of a message, as in :mod:`girih.planner.costs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from girih.comm.codecs.tensors import ACTIVATIONS, GRADIENTS, Codec, ErrorFeedback, TopK
from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client, Request
from girih.comm.service import connect, listen
from girih.dense.accel.process_settings import keep_freed_memory
from girih.kernels.cpu import ahead
from girih.planner.calibration import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    CodecSpeed,
    Links,
    Point,
)
from girih.planner.costs import fit, with_cpu

SIZES = tuple(128 << 2 * power for power in range(9))
"""128 B to 8 MiB."""
POINT_S = 0.2
"""A point is measured so long, but for the fewest rounds."""
_PASSES, _WARM_UP, _FEWEST, _MOST = 4, 2, 2, 100  # rounds of a pass
Work = Callable[[], object]
Cpu = tuple[int, float]
"""Size and core-seconds."""
Works = Mapping[tuple[str, int], Work]
"""Link and size → one operation."""


def measure_links(
    ranks: TrainerGroup, *, host: str, secret: bytes, sizes: Sequence[int] = SIZES, point_s: float = POINT_S
) -> Links | None:
    """Measures all links and fits them; returns them on rank 0. Called by all trainers, of which there are two or more.

    Args:
        host: where this trainer listens.
        secret: the run's.
        sizes: S; of collectives rounded up to 4 bytes for each trainer.
    """
    keep_freed_memory()  # as trainers do: large messages cost page faults otherwise
    points, cpu_s = _measure(
        {k: work for size in sizes for k, work in _collectives(ranks, size)}, ranks, point_s
    )
    for name, address in (("tcp", f"tcp://{host}:*"), ("shared", "shm://")):
        with _to_rank_1(ranks, address, secret) as client:
            if client is not None:
                calls = {(name, size): partial(_call, client, size) for size in sizes}
                there_and_back, own_s = _measure(calls, TrainerGroup(), point_s)
                points[name] = [(size, seconds / 2) for size, seconds in there_and_back[name]]
                cpu_s[name] = own_s[name]  # of a message there and one back at one end: of one at both ends
    if not ranks.first:
        return None
    return {
        name: with_cpu(name, fit(name, measured, ranks.size), cpu_s[name], ranks.size)
        for name, measured in points.items()
    }


def _collectives(ranks: TrainerGroup, size: int) -> Iterator[tuple[tuple[str, int], Work]]:
    """Collectives as halves call them."""
    counts = [-(-size // (4 * ranks.size))] * ranks.size
    flat = torch.zeros(sum(counts))
    size = flat.nbytes
    part = flat[: counts[0]].clone()
    exchange = partial(ranks.exchange, flat, counts, counts)
    yield (ALL_REDUCE, size), lambda: ranks.all_reduce(flat)
    yield (REDUCE_SCATTER, size), lambda: exchange().view(ranks.size, -1).sum(0)
    yield (ALL_GATHER, size), lambda: ranks.exchange(part.repeat(ranks.size), counts, counts)
    yield (ALL_TO_ALL, size), exchange


@contextmanager
def _to_rank_1(ranks: TrainerGroup, address: str, secret: bytes) -> Iterator[Client | None]:
    """On rank 0, a client of a server on rank 1 that answers with what it was asked with; the others wait."""
    with ExitStack() as stack:
        served = ""
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


def _measure(
    works: Works, ranks: TrainerGroup, point_s: float
) -> tuple[dict[str, list[Point]], dict[str, list[Cpu]]]:
    """Link → its points, and size with core-seconds of all ranks; all ranks make as many rounds."""
    took: dict[tuple[str, int], list[float]] = {each: [] for each in works}
    busy_s: dict[tuple[str, int], float] = dict.fromkeys(works, 0.0)
    for _ in range(_PASSES):
        for each, work in works.items():
            start = time.perf_counter()
            _rounds_s(work, ranks, _WARM_UP)
            round_s = ranks.largest([time.perf_counter() - start])[0] / _WARM_UP
            num_rounds = max(_FEWEST, min(_MOST, int(point_s / _PASSES / round_s)))
            before = time.process_time()
            took[each] += _rounds_s(work, ranks, num_rounds)
            busy_s[each] += time.process_time() - before
    started = time.process_time()
    _rounds_s(_idle_round, ranks, _MOST)
    idle_s = (time.process_time() - started) / _MOST
    cpu_s: dict[str, list[Cpu]] = {}
    for (name, size), seconds in busy_s.items():
        each_s = seconds / len(took[name, size]) - idle_s
        cpu_s.setdefault(name, []).append((size, max(0.0, ranks.sum([each_s])[0])))
    points: dict[str, list[Point]] = {}
    for (name, size), rounds_s in took.items():
        points.setdefault(name, []).append((size, ranks.sum([_fast_s(rounds_s)])[0] / ranks.size))
    return points, cpu_s


def _idle_round() -> None:
    """Does nothing, to time an empty round."""


def _fast_s(rounds_s: Sequence[float]) -> float:
    """The first decile."""
    return sorted(rounds_s)[len(rounds_s) // 10]


def _rounds_s(work: Work, ranks: TrainerGroup, num_rounds: int) -> list[float]:
    took = []
    for _ in range(num_rounds):
        ranks.barrier()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return took


SHAPE = (256, 1024)
"""A message of 1 MiB of float32: 256 examples' outputs of a layer of 1,024. As most messages, it is larger than a core's own cache."""
_ROUNDS = 30


def measure_codecs(ranks: TrainerGroup) -> Mapping[str, CodecSpeed]:
    """The speeds of all codecs of activations and gradients, by name; the mean over trainers, who measure at once, as they train."""
    ahead.make_ready(ahead.packing_tensors())
    speeds = {}
    for name, codec in {**ACTIVATIONS, **GRADIENTS}.items():
        speed = measure_codec(codec)
        sums = ranks.sum([speed.pack_s_per_byte, speed.unpack_s_per_byte])
        speeds[name] = CodecSpeed(*(each / ranks.size for each in sums))
    return speeds


def measure_codec(codec: Codec, rounds: int = _ROUNDS) -> CodecSpeed:
    """The speed of one codec in this thread; of top-k with error feedback. A time is that of the fastest tenth of rounds."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    stream = ErrorFeedback(codec) if isinstance(codec, TopK) else codec

    def pack() -> object:
        packed = stream.pack(values)
        if isinstance(stream, ErrorFeedback):
            stream.apply()
        return packed

    packed = codec.pack(values)
    alone, unpack = TrainerGroup(), partial(codec.unpack, packed, SHAPE)
    pack(), unpack()
    return CodecSpeed(*(_fast_s(_rounds_s(work, alone, rounds)) / values.nbytes for work in (pack, unpack)))
