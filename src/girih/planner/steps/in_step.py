"""Graphs of steps with tables in the trainers, which make each step together: ``local``, ``synchronous``, ``substitution``.

Steps do not overlap, except that a thread reads ahead, and that keys of ``synchronous`` travel ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Unpack

from girih.planner.calibration import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Link
from girih.planner.costs import BUCKET_BYTES, VOTE_BYTES
from girih.planner.interleaving import exchanges_of
from girih.planner.steps.basis import (
    BACKWARD,
    LOOKUP,
    MOVE,
    OVERHEAD,
    READ,
    READ_AHEAD,
    STEP,
    UPDATE,
    WIRE,
    Basis,
)
from girih.planner.steps.graph import TRAINER, Operation, OperationOptions, StepGraph
from girih.planner.traffic import FLOAT_BYTES, PartialSizes, Traffic, ring_bytes

After = tuple[str, ...]


@dataclass
class GraphBuilder:
    """Collects operations of a trainer, in the order in which it begins them."""

    basis: Basis
    operations: list[Operation] = field(default_factory=list)

    def add(self, operation: Operation) -> str:
        """Adds an operation, and returns its name."""
        self.operations.append(operation)
        return operation.name

    def work(
        self, name: str, term: str, role: str, core_s: float, after: After, **more: Unpack[OperationOptions]
    ) -> str:
        """Adds work of a process, or a wait."""
        return self.add(Operation(name=name, term=term, role=role, core_s=core_s, after=after, **more))

    def send(
        self, name: str, term: str, roles: tuple[str, str], link: Link, sent_bytes: float, after: After, *,
        messages: float = 1.0, hops: float = 1.0, **more: Unpack[OperationOptions],
    ) -> str:  # fmt: skip
        """Adds a message, or several.

        Args:
            roles: the sender, and the receiver.
            messages: number of messages, which take core-seconds. hops: the number of them one after the other.
        """
        role, to = roles
        return self.add(
            Operation(
                name=name,
                term=term,
                role=role,
                to=to,
                core_s=link.cpu_s(messages, sent_bytes),
                sent_bytes=sent_bytes,
                bytes_per_s=link.bytes_per_s,
                hops=hops,
                after=after,
                **({"delay_s": hops * link.latency_s, "packet_s": link.message_cpu_s / 2} | more),
            )
        )

    def collective(
        self,
        name: str,
        link: str,
        hops: float,
        sent_bytes: float,
        after: After,
        **more: Unpack[OperationOptions],
    ) -> str:
        """Adds a collective of all trainers, in which each sends ``sent_bytes`` in a number of messages, in turn."""
        found = self.basis.calibration.links[link]
        more = {"together": True, "in_turns": link != ALL_REDUCE, **more}
        return self.send(
            name, WIRE, (TRAINER, TRAINER), found, sent_bytes, after, messages=hops, hops=hops, **more
        )

    def ring(self, name: str, rings: int, sent_bytes: float, after: After, kind: str = "dense") -> str:
        """Adds AllReduces, one after the other; 2(T − 1) messages each. Other rings wait."""
        hops = 2.0 * (self.basis.trainers - 1) * rings
        return self.collective(name, ALL_REDUCE, hops, sent_bytes, after, kind=kind, executor="rings")

    def vote(self, name: str, after: After) -> str:
        """Adds the small AllReduce with which trainers agree on a step."""
        return self.ring(name, 1, ring_bytes(VOTE_BYTES, self.basis.trainers), after, kind="")

    def reduced_pass(self, after: After, sent_bytes: float) -> str:
        """Adds a trainer's pass whose gradients are summed in buckets, and the vote.

        The last bucket is full when the backward pass ends. It has the parameters of the layers next to the input. Rings
        of earlier buckets run during the rest of the backward pass.
        """
        basis, model = self.basis, self.basis.facts.model
        last = 1.0 if model.last_bucket is None else model.last_bucket / max(1, model.num_parameters)
        if not sent_bytes:
            return self.add(basis.dense_pass("pass", 1.0, after))
        size = sent_bytes * basis.trainers / (2 * (basis.trainers - 1))
        rings = math.ceil(size / BUCKET_BYTES)
        early = 1 - BACKWARD + BACKWARD * (1 - last)
        began = self.add(basis.dense_pass("pass, until the last bucket", early, after))
        waits = [self.add(basis.dense_pass("pass, last bucket", 1 - early, (began,)))]
        if last < 1:
            waits.append(self.ring("rings", max(1, rings - 1), (1 - last) * sent_bytes, (began,)))
        summed = self.ring("last ring", 1 if last < 1 else rings, last * sent_bytes, tuple(waits))
        return self.vote("vote", (summed,))

    def move(self, after: After, role: str = TRAINER, executor: str = "") -> str:
        """Adds the update of the dense parameters."""
        busy = self.basis.busy_threads
        core_s = busy * self.basis.dense.update_s
        return self.work("move", MOVE, role, core_s, after, threads=busy, executor=executor)

    def finish(self, after: After) -> StepGraph:
        """Adds the updates of rows and parameters, and the rest of a step in which trainers hold their rows."""
        basis = self.basis
        (_, update_s), (work_s, delay_s) = basis.rows_s(), basis.overhead_s()
        threads = float(basis.facts.threads)
        rows = self.work("update", UPDATE, TRAINER, update_s, after, threads=threads, applies=True)
        step = self.work("step", STEP, TRAINER, basis.work.step_s, (self.move((rows,)),))
        self.work("overhead", OVERHEAD, TRAINER, work_s, (step,), delay_s=delay_s)
        roles = {TRAINER: basis.trainers}
        return StepGraph(examples=basis.batch_size, roles=roles, operations=tuple(self.operations))

    def read(self, role: str, readings: float) -> str:
        """Adds the thread that reads ahead."""
        core_s = self.basis.read_s(readings)
        return self.work("read", READ, role, core_s, (), executor="reader", ahead=READ_AHEAD)

    def lookup(self, name: str, fraction: float, after: After, *, begins: bool) -> str:
        """Adds a fraction of the lookups, with all threads of a trainer."""
        core_s, threads = fraction * self.basis.rows_s()[0], float(self.basis.facts.threads)
        return self.work(name, LOOKUP, TRAINER, core_s, after, threads=threads, begins=begins, reads=begins)


def local(basis: Basis) -> StepGraph:
    """Returns a step in one process. Lookups, pass and updates follow one another, and each uses all threads."""
    builder = GraphBuilder(basis)
    looked_up = builder.lookup("lookup", 1.0, (builder.read(TRAINER, 1.0),), begins=True)
    return builder.finish((builder.add(basis.dense_pass("pass", 1.0, (looked_up,))),))


def synchronous(basis: Basis, sent: Traffic) -> StepGraph:
    """Returns a step with an exchange of rows (PICASSO §III-A).

    Gradients are summed during the backward pass. Each trainer reads all examples and keeps its share. Keys travel
    ahead, if the schedule prefetches. Each set of groups travels while the rows of the next set are looked up.

    Args:
        sent: the bytes that a trainer sends.
    """
    if basis.trainers == 1:
        return local(basis)
    builder, others, early = GraphBuilder(basis), basis.trainers - 1, basis.facts.schedule.prefetch
    num_sets, parts = exchanges_of(basis.facts)

    def exchange(
        name: str, hops: float, sent_bytes: float, after: After, **more: Unpack[OperationOptions]
    ) -> str:
        options: OperationOptions = {"executor": "exchange", **more}
        return builder.collective(name, ALL_TO_ALL, hops * others, sent_bytes, after, **options)

    read, ahead = builder.read(TRAINER, basis.trainers), 1 if early else None
    keys = exchange("keys", 2, sent.ids, (read,), kind="ids", ahead=ahead, begins=not early)
    looked_up, came, size = keys, keys, sent.embeddings / num_sets
    for number in range(num_sets):
        begins = early and number == 0
        looked_up = builder.lookup(f"lookup {number}", 1 / num_sets, (looked_up,), begins=begins)
        came = exchange(f"rows {number}", parts, size, (looked_up, came), kind="embeddings")
    agreed = builder.vote("agreement", (builder.reduced_pass((came,), sent.dense),))
    # trainers that have just agreed begin at the same moment, so both directions are used
    pushed = exchange("row gradients", num_sets, sent.gradients, (agreed,), kind="gradients", in_turns=False)
    return builder.finish((pushed,))


def substitution(basis: Basis, sizes: PartialSizes) -> StepGraph:
    """Returns a step of ``substitution`` (DES, Algorithm 1). Each table is on one trainer, and partial results travel.

    A trainer computes the operators only for its own features, a T-th of all, for all B examples. It computes the upper
    network for all B examples, or for its share if the network is split. girih assumes that the operators' fraction of
    a pass equals their fraction of the parameters. The gradients of a split network are summed after the backward pass,
    in one message with the vote.
    """
    builder, model, size = GraphBuilder(basis), basis.facts.model, basis.trainers
    upper = 0.0 if sizes.split else model.upper_parameters / max(1, model.num_parameters)
    examples = basis.share + upper * (basis.batch_size - basis.share)
    column_bytes = basis.batch_size * sizes.partial_bytes

    def compute(name: str, fraction: float, after: str) -> str:
        return builder.add(basis.dense_pass(name, fraction, (after,), examples))

    def exchange(name: str, link: str, whole: float, after: str) -> str:
        others = size - 1
        return builder.collective(name, link, float(others), others / size * whole, (after,), kind="partials")

    end = builder.lookup("lookup", 1.0, (builder.read(TRAINER, size),), begins=True)
    end = compute("forward", 1 - BACKWARD, end)
    as_ring = not sizes.split and sizes.partial_bytes == FLOAT_BYTES
    sums = sizes.summed * column_bytes
    vectors = [columns * column_bytes / (size if sizes.split else 1) for columns in sizes.concatenated]
    if sizes.summed and as_ring:
        end = builder.ring("sums", 1, ring_bytes(sums, size), (end,), "partials")
    elif sizes.summed:
        end = exchange("sums", REDUCE_SCATTER, sums, end)
        if not sizes.split:
            end = exchange("sums to all", ALL_GATHER, sums, end)
    for number, vector in enumerate(vectors):
        end = exchange(f"vectors {number}", ALL_TO_ALL if sizes.split else ALL_GATHER, vector, end)
    end = compute("backward", BACKWARD, end)
    if sizes.split:
        for number, vector in enumerate(vectors):
            end = exchange(f"gradients of vectors {number}", ALL_TO_ALL, vector, end)
        if sizes.summed:
            end = exchange("gradients of sums", ALL_GATHER, sums, end)
        sent_bytes = ring_bytes(sizes.shared_parameters * FLOAT_BYTES, size)
        end = builder.ring("shared gradients", 1, sent_bytes, (end,))
    elif not (as_ring and sizes.summed):
        end = builder.vote("vote", (end,))
    return builder.finish((end,))
