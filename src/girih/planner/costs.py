"""Predicts seconds of communication from calibrated links: the formulas of DES §3.2.3, and a step of each strategy.

α, C: latency and bandwidth of a link. N: workers, here trainers. Nothing overlaps: these times ignore communication
hidden behind computation, and the waiting of processes that share a core.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from girih.planner.calibration import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Link,
    Links,
    Point,
)
from girih.planner.traffic import FLOAT_BYTES, PartialSizes, Traffic

BUCKET_BYTES = 1 << 20
"""Bytes of gradients of a replica that travel together. The first ones travel during most of the backward pass."""
_VOTE_BYTES = 24
_ANSWERS = 2  # empty messages: server to worker, and worker to trainer


def one_way_s(size_bytes: float, link: Link) -> float:
    """Returns α + S / C: the seconds of one message."""
    return link.latency_s + size_bytes / link.bytes_per_s


def parameter_server_s(
    batch_size: int, example_bytes: float, num_workers: int, link: Link, *, synchronous: bool
) -> float:
    """Returns T_sync,ps = 2N(α + B(S_f + S_w) / C), or T_async,ps = 2(α + B(S_f + S_w) / C).

    Args:
        batch_size: B, per worker.
        example_bytes: S_f + S_w, the bytes of keys and weights of one example.
    """
    return 2 * (num_workers if synchronous else 1) * one_way_s(batch_size * example_bytes, link)


def half_ring_s(size_bytes: float, num_workers: int, link: Link) -> float:
    """Returns (N − 1)(α + S / (N C)): reduce-scatter or all-gather, the halves of a ring; also AllToAll of N equal parts.

    Args:
        size_bytes: S, the bytes that are summed or gathered; in AllToAll, all bytes of a worker, with its own part.
    """
    return (num_workers - 1) * one_way_s(size_bytes / num_workers, link)


def ring_s(size_bytes: float, num_workers: int, link: Link) -> float:
    """Returns T_ring = 2(N − 1)(α + S_g / (N C)): AllReduce of S_g bytes."""
    return 2 * half_ring_s(size_bytes, num_workers, link)


def des_s(sizes_bytes: Collection[float], num_workers: int, link: Link) -> float:
    """Returns T_DES = Σ_j T_ring(S_Mj): an AllReduce for each aggregation, of S_Mj bytes of partial results."""
    return sum(ring_s(size, num_workers, link) for size in sizes_bytes)


def link_s(name: str, size_bytes: float, num_workers: int, link: Link) -> float:
    """Returns the time of one operation of a link of ``LINKS``: AllReduce, another collective, or one message."""
    if name == ALL_REDUCE:
        return ring_s(size_bytes, num_workers, link)
    if name in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        return half_ring_s(size_bytes, num_workers, link)
    return one_way_s(size_bytes, link)


def fit(name: str, points: Sequence[Point], num_workers: int) -> Link:
    """Fits α ≥ 0 and C of a link to its formula. Candidates go through two points, or through one with α = 0.

    The best one has the smallest sum of |log(formula / measured)|. So small and large sizes count equally, and an
    outlier has little effect.
    """

    def formula(size: float, latency_s: float, bytes_per_s: float) -> float:
        return link_s(name, size, num_workers, Link(latency_s, bytes_per_s))

    # each formula is α·a + b / C
    terms = [(formula(size, 1.0, math.inf), formula(size, 0.0, 1.0), seconds) for size, seconds in points]
    bounds = [(0.0, b / seconds) for _, b, seconds in terms]
    for (a1, b1, t1), (a2, b2, t2) in combinations(terms, 2):
        determinant, of_latency, of_bytes = a1 * b2 - a2 * b1, t1 * b2 - t2 * b1, a1 * t2 - a2 * t1
        if determinant and of_latency / determinant >= 0 and of_bytes / determinant > 0:
            bounds.append((of_latency / determinant, determinant / of_bytes))
    latency_s, bytes_per_s = min(
        bounds, key=lambda each: sum(abs(math.log(formula(size, *each) / s)) for size, s in points)
    )
    return Link(latency_s, bytes_per_s, tuple(points))


def sent_by_all(name: str, size_bytes: float, num_workers: int) -> tuple[float, float]:
    """Returns messages of one operation of a link, and their bytes, over all workers."""
    others = num_workers - 1
    if name == ALL_REDUCE:  # per worker N - 1 messages to sum and N - 1 to spread the result, each of an N-th
        return 2.0 * num_workers * others, 2.0 * others * size_bytes
    if name in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        return float(num_workers * others), others * size_bytes
    return 1.0, size_bytes


def with_cpu(name: str, link: Link, cpu_s: Sequence[tuple[int, float]], num_workers: int) -> Link:
    """Adds core-seconds per message and per byte to a link: a line through the smallest and the largest size.

    Args:
        cpu_s: (size, core-seconds of one operation at all ends), for two sizes or more.
    """
    (small, few_s), (large, many_s) = min(cpu_s), max(cpu_s)
    messages, least = sent_by_all(name, small, num_workers)
    most = sent_by_all(name, large, num_workers)[1]
    byte_cpu_s = max(0.0, many_s - few_s) / (most - least)
    message_cpu_s = max(0.0, few_s - least * byte_cpu_s) / messages
    return replace(link, message_cpu_s=message_cpu_s, byte_cpu_s=byte_cpu_s)


def synchronous_step(
    sent: Traffic, num_trainers: int, links: Links, *, num_sets: int = 1, micro_batches: int = 1
) -> Mapping[str, float]:
    """Returns seconds of a step of ``synchronous``, by kind: AllToAlls for rows, AllReduces for dense gradients.

    There is an AllToAll for numbers of keys, and one for keys. For each set of groups that travel together, there is
    one for its rows in each micro-batch, and one for its gradients. There are two small AllReduces, for gradients and
    vote.
    """
    others, rows = num_trainers - 1, links[ALL_TO_ALL]
    agreed = ring_s(_VOTE_BYTES, num_trainers, links[ALL_REDUCE])
    return {
        "ids": _messages_s(2 * others, sent.ids, rows),
        "embeddings": _messages_s(num_sets * micro_batches * others, sent.embeddings, rows),
        "gradients": _messages_s(num_sets * others, sent.gradients, rows) + agreed,
        "dense": _replica_s(sent.dense, num_trainers, links),
    }


def remote_step(
    sent: Traffic, num_trainers: int, links: Links, *, transport: str, in_step: bool
) -> Mapping[str, float]:
    """Returns seconds of a step with tables in embedding servers, by kind. A worker asks all its servers in parallel.

    Messages in sequence: ids to the worker, the pull request, keys to servers; rows, embeddings; gradients to the
    worker and to servers, and two empty answers.
    """
    link = links[transport]
    if in_step:
        dense = _replica_s(sent.dense, num_trainers, links)
    else:  # T_async,ps of DES
        dense = _messages_s(2, sent.dense, link) if sent.dense else 0.0
    return {
        "ids": _messages_s(3, sent.ids, link),
        "embeddings": _messages_s(2, sent.embeddings, link),
        "gradients": _messages_s(2 + _ANSWERS, sent.gradients, link),
        "dense": dense,
    }


def substitution_step(
    batch_size: int, num_trainers: int, links: Links, sizes: PartialSizes
) -> Mapping[str, float]:
    """Returns seconds of a step of ``substitution``, by kind: T_DES if partial results are float32 and "replicated"."""
    split, column_bytes = sizes.split, batch_size * sizes.partial_bytes
    vectors = [column_bytes * columns for columns in sizes.concatenated]
    sums = [column_bytes * sizes.summed] if sizes.summed else []
    as_ring = not split and sizes.partial_bytes == FLOAT_BYTES
    if as_ring:
        partials = des_s(sums, num_trainers, links[ALL_REDUCE])
    else:  # reduce-scatter, then all-gather; so values are rounded only twice
        halves = [links[REDUCE_SCATTER], links[ALL_GATHER]]
        partials = sum(half_ring_s(size, num_trainers, link) for size in sums for link in halves)
    if split:  # columns of a trainer's examples, and their gradients back
        shares = [size / num_trainers for size in vectors]
        partials += 2 * sum(half_ring_s(size, num_trainers, links[ALL_TO_ALL]) for size in shares)
        dense_bytes = sizes.shared_parameters * FLOAT_BYTES + _VOTE_BYTES
        return {"partials": partials, "dense": ring_s(dense_bytes, num_trainers, links[ALL_REDUCE])}
    partials += sum(half_ring_s(size, num_trainers, links[ALL_GATHER]) for size in vectors)
    votes = not (as_ring and sums)
    return {"partials": partials, "dense": votes * ring_s(_VOTE_BYTES, num_trainers, links[ALL_REDUCE])}


def _replica_s(sent_bytes: float, num_trainers: int, links: Links) -> float:
    """Returns seconds to sum the gradients of a replica, in rings of one bucket each, and for the vote."""
    if num_trainers == 1:
        return 0.0
    size = sent_bytes * num_trainers / (2 * (num_trainers - 1))
    num_rings = math.ceil(size / BUCKET_BYTES)
    sizes = [size / max(1, num_rings)] * num_rings
    return des_s([*sizes, _VOTE_BYTES], num_trainers, links[ALL_REDUCE])


def _messages_s(num_messages: int, sent_bytes: float, link: Link) -> float:
    """Returns seconds of messages in sequence, with a total of ``sent_bytes``."""
    return num_messages * link.latency_s + sent_bytes / link.bytes_per_s
