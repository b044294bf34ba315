"""Predicts the seconds of communication in a step of each strategy, by the formulas of DES §3.2.3 and calibrated links.

α and C are the latency and the bandwidth of a link. N is the number of workers, which are trainers here. The formulas
assume that nothing overlaps. They do not subtract communication that is hidden behind computation. They do not add the
time that processes wait for a shared core.
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
"""Bytes of a replica's gradients in one message. Most messages are sent while the backward pass still runs."""
VOTE_BYTES = 24
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
    """Returns (N − 1)(α + S / (N C)), the time of one half of a ring: a reduce-scatter or an all-gather.

    An AllToAll of N equal parts takes the same time.

    Args:
        size_bytes: S, the bytes that are summed or gathered. For an AllToAll, S is all bytes of a worker, including the
            part for itself.
    """
    return (num_workers - 1) * one_way_s(size_bytes / num_workers, link)


def ring_s(size_bytes: float, num_workers: int, link: Link) -> float:
    """Returns T_ring = 2(N − 1)(α + S_g / (N C)): AllReduce of S_g bytes."""
    return 2 * half_ring_s(size_bytes, num_workers, link)


def des_s(sizes_bytes: Collection[float], num_workers: int, link: Link) -> float:
    """Returns T_DES = Σ_j T_ring(S_Mj), with one AllReduce for each aggregation, of S_Mj bytes."""
    return sum(ring_s(size, num_workers, link) for size in sizes_bytes)


def link_s(name: str, size_bytes: float, num_workers: int, link: Link) -> float:
    """Returns the time of one operation of a link of ``LINKS``.

    The operation is an AllReduce, another collective, or one message.
    """
    if name == ALL_REDUCE:
        return ring_s(size_bytes, num_workers, link)
    if name in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        return half_ring_s(size_bytes, num_workers, link)
    return one_way_s(size_bytes, link)


def fit(name: str, points: Sequence[Point], num_workers: int) -> Link:
    """Fits α ≥ 0 and C of a link to measured points.

    Each candidate is a line through two points, or through one point with α = 0. The best candidate has the smallest
    sum of |log(formula / measured)|. So small and large sizes count equally, and an outlier has little effect.
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
    """Returns the number of messages that all workers send in one operation of a link, and their bytes."""
    others = num_workers - 1
    if name == ALL_REDUCE:  # per worker N - 1 messages to sum and N - 1 to spread the result, each of an N-th
        return 2.0 * num_workers * others, 2.0 * others * size_bytes
    if name in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        return float(num_workers * others), others * size_bytes
    return 1.0, size_bytes


def with_cpu(name: str, link: Link, cpu_s: Sequence[tuple[int, float]], num_workers: int) -> Link:
    """Returns a link with core-seconds per message and per byte.

    They are a line through the smallest and the largest measured size.

    Args:
        cpu_s: (size, core-seconds of one operation at all ends), for at least two sizes.
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
    """Returns the seconds of communication in a step of ``synchronous``, by kind.

    Rows travel by AllToAll. One AllToAll carries the numbers of keys, and one carries the keys. Each set of groups that
    travel together has one for its gradients, and one per micro-batch for its rows. Dense gradients travel by
    AllReduce. Two small AllReduces agree on gradients and vote.
    """
    others, rows = num_trainers - 1, links[ALL_TO_ALL]
    agreed = ring_s(VOTE_BYTES, num_trainers, links[ALL_REDUCE])
    return {
        "ids": _messages_s(2 * others, sent.ids, rows),
        "embeddings": _messages_s(num_sets * micro_batches * others, sent.embeddings, rows),
        "gradients": _messages_s(num_sets * others, sent.gradients, rows) + agreed,
        "dense": _replica_s(sent.dense, num_trainers, links),
    }


def remote_step(
    sent: Traffic, num_trainers: int, links: Links, *, transport: str, in_step: bool
) -> Mapping[str, float]:
    """Returns the seconds of communication, by kind, in a step with tables in embedding servers.

    These messages follow one another: ids to the worker, the pull request, keys to the servers, rows, embeddings,
    gradients to the worker, gradients to the servers, and two empty answers. A worker asks all its servers in parallel.
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
    """Returns the seconds of communication in a step of ``substitution``, by kind.

    The result is T_DES if partial results are float32 and the upper network is "replicated".
    """
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
        dense_bytes = sizes.shared_parameters * FLOAT_BYTES + VOTE_BYTES
        return {"partials": partials, "dense": ring_s(dense_bytes, num_trainers, links[ALL_REDUCE])}
    partials += sum(half_ring_s(size, num_trainers, links[ALL_GATHER]) for size in vectors)
    votes = not (as_ring and sums)
    return {"partials": partials, "dense": votes * ring_s(VOTE_BYTES, num_trainers, links[ALL_REDUCE])}


def _replica_s(sent_bytes: float, num_trainers: int, links: Links) -> float:
    """Returns the seconds to sum the gradients of a replica, and to vote. Each bucket is one ring."""
    if num_trainers == 1:
        return 0.0
    size = sent_bytes * num_trainers / (2 * (num_trainers - 1))
    num_rings = math.ceil(size / BUCKET_BYTES)
    sizes = [size / max(1, num_rings)] * num_rings
    return des_s([*sizes, VOTE_BYTES], num_trainers, links[ALL_REDUCE])


def _messages_s(num_messages: int, sent_bytes: float, link: Link) -> float:
    """Returns the seconds of messages that follow one another, with ``sent_bytes`` in total."""
    return num_messages * link.latency_s + sent_bytes / link.bytes_per_s
