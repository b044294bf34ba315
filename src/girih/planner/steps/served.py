"""Graphs of steps with rows in embedding servers: ``hybrid``, ``asynchronous``, ``hierarchical`` (Persia §4.1).

Loaders read ahead and send ids to workers, which find the keys. A trainer asks a worker for the rows of a batch, and the
worker asks all servers. Gradients go the opposite way. Each worker does one thing at a time. A server takes one request at a
time, and each thread of its shards does its parts of requests in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Unpack

from girih.planner.calibration import Link
from girih.planner.steps.basis import (
    BACKWARD,
    LOOKUP,
    OVERHEAD,
    PASS,
    READ_AHEAD,
    STEP,
    UPDATE,
    WIRE,
    Basis,
)
from girih.planner.steps.graph import (
    DENSE_SERVER,
    GROUP_SERVER,
    LOADER,
    PARAMETER_SERVER,
    SERVER,
    SHARDS,
    TRAINER,
    WORKER,
    OperationOptions,
    StepGraph,
)
from girih.planner.steps.group import Spread
from girih.planner.steps.in_step import After, GraphBuilder
from girih.planner.traffic import COUNT_BYTES, FLOAT_BYTES, KEY_BYTES, Traffic

AVERAGING, NORMS, PARAMETERS = "averaging", "norms", "parameters"
AT_WORKER = 0.5
"""Fraction of the work of lookups and of updates that workers do: keys and bags. Servers do the rest. Nominal."""
OF_TRAINER = 0.5
"""Fraction of the overhead on the trainer. The worker and the servers have equal parts of the rest. Nominal."""
NOTHING: Mapping[str, int] = {}
MAIN = "main"
"""The trainer's thread that asks for rows, and waits for rows and for the dense half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowService:
    """The processes that serve rows.

    Attributes:
        workers, servers, loaders: numbers of processes.
        link: the link between processes.
        sent: bytes that all processes send for one trainer's share of a step. See :func:`girih.planner.traffic.remote`.
    """

    workers: int
    servers: int
    loaders: int
    link: Link
    sent: Traffic


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


def hybrid(basis: Basis, service: RowService, *, staleness: int) -> StepGraph:
    """Returns a step of ``hybrid``: rows are read ahead, the dense half is in step (Persia, Algorithms 1 and 2).

    A trainer's main thread holds a step from the wait for its rows to the update of the parameters. Servers apply the
    gradients of a step when those of all trainers are there.
    """
    served = _Served(basis, service, in_step=True, main=MAIN)
    end = served.reduced_pass(served.turn(served.pull()), service.sent.dense)
    served.push(end, served.step((served.move((end,)),)))
    return served.graph_of(1 + staleness)


def asynchronous(basis: Basis, service: RowService, *, staleness: int) -> StepGraph:
    """Returns a step of ``asynchronous``, in which trainers never wait for each other.

    The dense server is a thread of the first trainer. It makes one update after the other.
    """
    served = _Served(basis, service, main=MAIN)
    end = served.add(basis.dense_pass("pass", 1.0, served.turn(served.pull())))
    served.push(end, served.step((end,)))
    size, count = (basis.parameter_bytes, 1) if basis.trainers > 1 else (0.0, 0)
    there, back = (TRAINER, PARAMETER_SERVER), (PARAMETER_SERVER, TRAINER)
    asked = served.message("dense gradients", there, size, (end,), count, PARAMETERS, kind="dense")
    moved = served.move((asked,), PARAMETER_SERVER, "dense server")
    served.message("new parameters", back, size, (moved,), count, PARAMETERS, kind="dense")
    return served.graph_of(1 + staleness, {PARAMETER_SERVER: 1})


def replicas(basis: Basis, service: RowService, *, nets: int, averaging: AveragingLoad) -> StepGraph:
    """Returns a step of ``hierarchical`` without group servers (HT §2.2). Each net has its own step in flight.

    A net has t / r threads, at least one, if a trainer has r nets.
    """
    served = _Served(basis, service)
    threads = min(basis.busy_threads, max(1, basis.facts.threads // nets))
    end = served.add(replace(basis.dense_pass("pass", 1.0, (served.pull(),)), threads=threads))
    served.push(end, served.step((served.move((end,)),)))
    served.average(averaging, TRAINER, end)
    return served.graph_of(nets, {DENSE_SERVER: averaging.servers})


def grouped(
    basis: Basis,
    service: RowService,
    net: Spread,
    *,
    nets: int,
    averaging: AveragingLoad,
    clips: bool = False,
) -> StepGraph:
    """Returns a step of ``hierarchical`` with group servers (HT §3.1). The tagging spreads each net over devices.

    Trainer and servers compute their parts one after the other, forward and backward, with an exchange in between. On a
    server a net has one thread. The cores' work of exchanges and of the update is a part of each device's work.

    Args:
        clips: True if the trainers ask all servers of a group for norms, in parallel, before the update.
    """
    served, link = _Served(basis, service), service.link
    threads = min(basis.busy_threads, max(1, basis.facts.threads // nets))
    free = replace(link, message_cpu_s=0.0, byte_cpu_s=0.0, latency_s=net.latency_s / 4)

    def exchange(name: str, roles: tuple[str, str], sent_bytes: float, after: After) -> After:
        options: OperationOptions = {"packet_s": link.message_cpu_s / 2, "member": net.busiest}
        return (served.send(name, WIRE, roles, free, sent_bytes, after, **options),)

    ends: After = (served.pull(),)
    for name, part in (("forward", 1 - BACKWARD), ("backward", BACKWARD)):
        here = served.work(f"{name}, trainer", PASS, TRAINER, part * net.trainer_s, ends, threads=threads)
        ends = exchange(f"{name}, there", (TRAINER, GROUP_SERVER), net.sent_bytes / 2, (here,))
        ends = tuple(
            served.work(f"{name}, server {number}", PASS, GROUP_SERVER, part * core_s, ends, member=number)
            for number, core_s in enumerate(net.servers_s)
        )
        ends = exchange(f"{name}, back", (GROUP_SERVER, TRAINER), net.received_bytes / 2, ends)
    if clips:
        core_s = averaging.holders * link.cpu_s(2, 0)
        ends = (served.work("norms", NORMS, TRAINER, core_s, ends, delay_s=2 * link.latency_s),)
    served.push(ends[0], served.step(ends))
    served.average(averaging, GROUP_SERVER, ends[0])
    roles = {DENSE_SERVER: averaging.servers, GROUP_SERVER: averaging.copies * averaging.holders}
    return served.graph_of(nets, roles, averaging.copies)


class _Served(GraphBuilder):
    """Collects the operations of a step with rows from servers.

    Args:
        in_step: True if servers wait for the gradients of all trainers.
        main: the thread that asks for rows, if it also waits for them. Empty if each net waits in a thread of its own.
    """

    def __init__(self, basis: Basis, service: RowService, *, in_step: bool = False, main: str = "") -> None:
        super().__init__(basis)
        self.service, self.in_step, self.main = service, in_step, main
        self._rows = FLOAT_BYTES * basis.profile.numbers_of_share
        self._keys = (KEY_BYTES + COUNT_BYTES) * basis.profile.keys_of_share
        self._lookup_s, self._update_s = basis.rows_s()
        self._work_s, self._delay_s = basis.overhead_s()

    def graph_of(self, in_flight: int, more: Mapping[str, int] = NOTHING, groups: int = 1) -> StepGraph:
        """Returns the graph, with further roles."""
        service = self.service
        roles = {
            TRAINER: self.basis.trainers, WORKER: service.workers, SERVER: service.servers, LOADER: service.loaders,
            **{name: count for name, count in more.items() if count},
        }  # fmt: skip
        return StepGraph(
            examples=self.basis.batch_size, roles=roles, operations=tuple(self.operations), in_flight=in_flight,
            groups=groups,
        )  # fmt: skip

    def message(
        self, name: str, roles: tuple[str, str], sent_bytes: float, after: After, messages: float = 1,
        term: str = WIRE, **more: Unpack[OperationOptions],
    ) -> str:  # fmt: skip
        """Adds messages that travel at the same time. They have ``sent_bytes`` in total."""
        hops = 1.0 if messages else 0.0
        return self.send(
            name, term, roles, self.service.link, sent_bytes, after, messages=messages, hops=hops, **more
        )

    def at(
        self, name: str, term: str, role: str, core_s: float, after: str, **more: Unpack[OperationOptions]
    ) -> str:
        """Adds work of a worker, or of the thread of a server that takes requests."""
        options: OperationOptions = {"executor": "requests", **more}
        return self.work(name, term, role, core_s, (after,), **options)

    def pull(self) -> str:
        """Adds reading, and the way of rows to the trainer. Returns the operation after which the rows are there."""
        sent, servers, ahead = self.service.sent, self.service.servers, READ_AHEAD
        overhead_s, find_s = (1 - OF_TRAINER) / 2 * self._work_s, AT_WORKER / 2 * self._lookup_s
        examples = FLOAT_BYTES * self.basis.share * (len(self.basis.facts.schema.numeric) + 1)
        to_worker, to_server = (TRAINER, WORKER), (WORKER, SERVER)
        read = self.read(LOADER, self.service.loaders)
        came = self.message("examples", (LOADER, TRAINER), examples, (read,), 0, ahead=ahead)
        ids = self.message(
            "ids", (LOADER, WORKER), sent.ids - self._keys, (read,), 2, kind="ids", ahead=ahead
        )
        found = self.at("find keys", LOOKUP, WORKER, find_s, ids, ahead=ahead)
        asked = self.message("pull", to_worker, 0.0, (found, came), begins=True, executor=self.main)
        keys = self.message("keys", to_server, self._keys, (asked,), servers, kind="ids")
        began = self.at("overhead of a server", OVERHEAD, SERVER, overhead_s, keys)
        lookup_s = (1 - AT_WORKER) * self._lookup_s
        read = self.at("lookup", LOOKUP, SERVER, lookup_s, began, executor=SHARDS, reads=True)
        rows = self.message("rows", (SERVER, WORKER), self._rows, (read,), servers, kind="embeddings")
        began = self.at("overhead of a worker", OVERHEAD, WORKER, overhead_s, rows)
        pooled = self.at("pool", LOOKUP, WORKER, find_s, began)
        size = sent.embeddings - self._rows
        bags = self.message("bags", (WORKER, TRAINER), size, (pooled,), kind="embeddings")
        return self.work("other waits", OVERHEAD, TRAINER, 0.0, (bags,), delay_s=self._delay_s)

    def turn(self, rows: str) -> After:
        """Adds the turn of the main thread, which holds one step after the other. Returns what a pass waits for."""
        return self.work("turn", STEP, TRAINER, 0.0, ("pull",), takes=MAIN, follows="step"), rows

    def step(self, after: After) -> str:
        """Adds the rest of the trainer's step."""
        rest = self.work("overhead", OVERHEAD, TRAINER, OF_TRAINER * self._work_s, after)
        return self.work("step", STEP, TRAINER, self.basis.work.step_s, (rest,), frees=self.main)

    def push(self, computed: str, step: str) -> None:
        """Adds the way of gradients to servers, from the end of a pass on, and the answers."""
        servers, size = self.service.servers, self.service.sent.gradients - self._rows
        pushed = self.message("push", (TRAINER, WORKER), size, (computed,), kind="gradients")
        scattered = self.at("scatter", UPDATE, WORKER, AT_WORKER * self._update_s, pushed)
        sent = self.message(
            "row gradients", (WORKER, SERVER), self._rows, (scattered,), servers, kind="gradients"
        )
        update_s = (1 - AT_WORKER) * self._update_s
        applied = self.at(
            "update", UPDATE, SERVER, update_s, sent, executor=SHARDS, together=self.in_step, applies=True
        )
        told = self.message("applied", (SERVER, WORKER), 0.0, (applied,), servers)
        self.message("pushed", (WORKER, TRAINER), 0.0, (told, step))

    def average(self, load: AveragingLoad, holder: str, after: str) -> None:
        """Adds averaging in the background. The holders of each copy ask all dense servers, and receive corrections."""
        if not load.servers:
            return
        part = load.copies / load.every_steps / self.basis.trainers
        size, messages = part * self.basis.parameter_bytes, part * load.holders * load.servers
        kind, member = ("dense", None) if holder == TRAINER else ("", 0)
        for name, roles in (("copies", (holder, DENSE_SERVER)), ("corrections", (DENSE_SERVER, holder))):
            after = self.message(
                name, roles, size, (after,), messages, AVERAGING, kind=kind, background=True, member=member
            )
