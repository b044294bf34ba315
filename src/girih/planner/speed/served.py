"""Costs of a step with rows in embedding servers: ``hybrid``, ``asynchronous``, ``hierarchical`` (Persia §4.1).

A trainer has several steps in flight, so girih divides the path of a step by their number. Usually the busiest process
or link decides. Other processes do the reading, lookups and updates, and the amount of work is the same as in one
process. Messages use cores at both ends.

B, T, t, c: the same as in :mod:`girih.planner.speed.step`. W, S, L: embedding workers, embedding servers, loaders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from girih.planner.calibration import ALL_REDUCE, Link
from girih.planner.costs import one_way_s
from girih.planner.speed.group import Spread
from girih.planner.speed.in_step import reduced_s, ring_messages
from girih.planner.speed.step import MOVE, PASS, STEP, TRAINER_LINK, WIRE, Basis, StepCost
from girih.planner.traffic import COUNT_BYTES, FLOAT_BYTES, KEY_BYTES, Traffic

SERVER_THREADS = 1
"""Threads of a group server for each part of a net. The server computes parts of several nets in parallel."""
TRAINER, DENSE_SERVER, AVERAGING, NORMS = "a trainer", "the dense server", "averaging", "norms"
WORKER_LINK, SERVER_LINK = "an embedding worker's link", "an embedding server's link"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowService:
    """The processes that serve rows.

    Attributes:
        workers, servers, loaders: W, S, L.
        link: the link between processes.
        sent: bytes that all processes send for one trainer's share of a step. See :func:`girih.planner.traffic.remote`.
        message_s: seconds of a step's messages, one after the other, without dense messages.
    """

    workers: int
    servers: int
    loaders: int
    link: Link
    sent: Traffic
    message_s: float

    def links_s(self, basis: Basis) -> dict[str, float]:
        """Returns the seconds per step in the busier direction of the links of a trainer, a worker and a server.

        Trainers receive pooled rows and send gradients. Servers send rows and receive gradients and keys. Workers do
        both, and receive ids.
        """
        profile, trainers = basis.profile, basis.trainers
        rows = FLOAT_BYTES * profile.numbers_of_share
        keys = (KEY_BYTES + COUNT_BYTES) * profile.keys_of_share
        ids, pooled, back = self.sent.ids - keys, self.sent.embeddings - rows, self.sent.gradients - rows
        to_worker, from_worker = ids + rows + back, pooled + rows + keys
        busiest = {
            TRAINER_LINK: max(pooled, back),
            WORKER_LINK: trainers * max(to_worker, from_worker) / self.workers,
            SERVER_LINK: trainers * (rows + keys) / self.servers,
        }
        return {name: size / self.link.bytes_per_s for name, size in busiest.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingLoad:
    """The load of averaging in the background.

    Attributes:
        copies: number of copies of the dense parameters. holders: processes that hold one copy: a trainer, or its
            group's servers.
        every_steps: steps of a trainer from one round to the next.
        servers: number of dense servers. It is 0 with one copy, which needs no averaging.
    """

    copies: int
    holders: int
    every_steps: int
    servers: int


def hybrid(basis: Basis, service: RowService, *, staleness: int, rings_s: float) -> StepCost:
    """Predicts a step of ``hybrid``, which reads rows ahead and keeps the dense half in step (Persia, Algorithms 1 and
    2).

    1 + τ steps are in flight. A trainer is busy for forward + max(backward + last ring, rings) + dense update + step.

    Trainers in step ask for rows, and send gradients, at the same moments. A worker has k = T / W trainers. Their
    messages pass its link like jobs through two stages, in and out. They need k + 1 times the time of one message per
    direction, not 2 k times.

    Args:
        rings_s: seconds of the rings of a replica's gradients.
    """
    cost = _served(basis, service, passes_s=reduced_s(basis, basis.share, rings_s), in_flight=1 + staleness)
    at_a_worker = max(1.0, basis.trainers / service.workers)
    reduced = basis.calibration.links[ALL_REDUCE]
    dense = service.sent.dense
    wire_s = basis.trainers * reduced.cpu_s(ring_messages(dense, basis.trainers), dense)
    busy_s = cost.busy_s[TRAINER_LINK] + dense / reduced.bytes_per_s
    return cost.adding(
        work_s={"rings": wire_s},
        path_s={WIRE: service.message_s * (at_a_worker + 1) / 2},
        busy_s={TRAINER_LINK: busy_s, TRAINER: _one_trainer_s(cost)},
    )


def asynchronous(basis: Basis, service: RowService, *, staleness: int) -> StepCost:
    """Predicts a step of ``asynchronous``, in which trainers never wait for each other.

    The dense server is a thread of the first trainer. It is busy for T · (dense update + its messages, 2(α + S / C)
    with S bytes of parameters) per step.
    """
    cost = _served(basis, service, passes_s=basis.pass_s(basis.share), in_flight=1 + staleness)
    size = basis.parameter_bytes if basis.trainers > 1 else 0.0
    wire_s = basis.trainers * service.link.cpu_s(2 if size else 0, 2 * size)
    messages_s = 2 * one_way_s(size, service.link) if size else 0.0
    trainer_s = _one_trainer_s(cost) - cost.path_s[MOVE]
    busy_s = {TRAINER: trainer_s, DENSE_SERVER: basis.trainers * (basis.dense.update_s + messages_s / 2)}
    through_first = max(1, basis.trainers - 1) * size  # parameters of all other trainers, one way
    busy_s[TRAINER_LINK] = cost.busy_s[TRAINER_LINK] + through_first / service.link.bytes_per_s
    return cost.adding(work_s={"parameters": wire_s}, busy_s=busy_s)


def replicas(basis: Basis, service: RowService, *, nets: int, averaging: AveragingLoad) -> StepCost:
    """Predicts ``hierarchical`` without group servers (HT §2.2).

    A trainer has r nets, and each net has its own step in flight.

    A net's pass takes t / max(1, t // r) times as long as a pass with all t threads. The trainer's other nets are also
    steps in flight. The step already waits for these at the busiest resource, so the pass does not count them again. In
    the background, averaging sends S bytes of parameters there and back in each round.

    Args:
        nets: number of nets per trainer, r.
    """
    passes_s = _pass_s(basis, _threads_of_net(basis, nets))
    cost = _served(basis, service, passes_s=passes_s, in_flight=nets)
    if averaging.servers:
        sent_s = basis.parameter_bytes / averaging.every_steps / service.link.bytes_per_s
        cost = cost.adding(busy_s={TRAINER_LINK: cost.busy_s[TRAINER_LINK] + sent_s})
    return _averaged(cost, basis, service.link, averaging)


def grouped(
    basis: Basis,
    service: RowService,
    net: Spread,
    *,
    nets: int,
    averaging: AveragingLoad,
    clips: bool = False,
) -> StepCost:
    """Predicts ``hierarchical`` with group servers (HT §3.1). The tagging spreads each net over devices.

    A net's path is its pass and its exchanges. On a trainer, the pass uses the threads of one net, see
    :func:`replicas`. On a server, it uses one thread. Each device computes, encodes and sends its part. The servers'
    links also carry averaging.

    Args:
        clips: True if the trainers ask all servers of a group for norms, in parallel, before the update.
    """
    on_trainer_s, on_server_s = _pass_s(basis, _threads_of_net(basis, nets)), _pass_s(basis, SERVER_THREADS)
    passes_s = net.served * on_server_s + (1 - net.served) * on_trainer_s
    cost = _served(basis, service, passes_s=passes_s + net.exchange_s, in_flight=nets)
    links = {f"{name}'s link": each for name, each in net.links_s.items()}
    cost = cost.adding(work_s={PASS: net.work_s, MOVE: 0.0}, busy_s={**net.devices_s, **links})
    if clips:
        asked_s = basis.trainers * averaging.holders * service.link.cpu_s(2, 0)
        cost = cost.adding(work_s={NORMS: asked_s}, path_s={NORMS: 2 * service.link.latency_s})
    return _averaged(cost, basis, service.link, averaging)


def _threads_of_net(basis: Basis, nets: int) -> int:
    """Returns the number of threads of one net of a trainer."""
    return max(1, basis.facts.threads // nets)


def _pass_s(basis: Basis, threads: int) -> float:
    """Returns the seconds of a net's pass with ``threads`` threads.

    Meanwhile one net of each other trainer computes too.
    """
    crowd = max(1.0, basis.trainers * threads / basis.cores)
    return basis.dense.seconds(basis.share) * basis.facts.threads / threads * crowd


def _served(basis: Basis, service: RowService, *, passes_s: float, in_flight: float) -> StepCost:
    """Returns the part that these strategies share.

    The number of workers that handle rows in parallel is at most the number of trainers, and at most the number of
    cores.
    """
    sent = service.sent
    num_messages = (
        6 + 4 * service.servers
    )  # ids, pull and push with their answers; of each server, lookups and updates
    wire_s = basis.trainers * service.link.cpu_s(num_messages, sent.ids + sent.embeddings + sent.gradients)
    cost = basis.cost(
        readings=service.loaders,
        examples=basis.share,
        passes_s=passes_s,
        rows_at_once=max(1, min(service.workers, basis.trainers, basis.cores)),
        steps_s=basis.work.step_s,
    ).adding(work_s={WIRE: wire_s}, path_s={WIRE: service.message_s}, busy_s=service.links_s(basis))
    return replace(cost, in_flight=in_flight)


def _one_trainer_s(cost: StepCost) -> float:
    """Returns the seconds of a step in which the trainer itself is busy."""
    return cost.path_s[PASS] + cost.path_s[MOVE] + cost.path_s[STEP]


def _averaged(cost: StepCost, basis: Basis, link: Link, its: AveragingLoad) -> StepCost:
    """Adds the averaging in the background. The holders of each copy ask all dense servers, and receive corrections."""
    if not its.servers:
        return cost
    size = its.copies * basis.parameter_bytes / its.every_steps
    num_messages = 2 * its.copies * its.holders * its.servers / its.every_steps
    busy_s = {"a dense server's link": size / its.servers / link.bytes_per_s}
    return cost.adding(work_s={AVERAGING: link.cpu_s(num_messages, 2 * size)}, busy_s=busy_s)
