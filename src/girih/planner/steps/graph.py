"""The work and the messages of one step, as a graph of operations.

A graph has the operations of one trainer's share of a step. All trainers do the same. A step of a run is one copy of the
graph for each trainer, and ``together`` joins the copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from girih.errors import ConfigError

TRAINER, WORKER, SERVER, LOADER = "trainer", "embedding-worker", "embedding-server", "loader"
DENSE_SERVER, GROUP_SERVER = "dense-server", "group-server"
PARAMETER_SERVER = "parameter-server"
"""The dense server of ``asynchronous``: a thread of the first trainer."""
SPREAD = frozenset({SERVER, DENSE_SERVER})
"""Roles whose processes all do an equal part of an operation."""
SHARDS = "shard"
"""The executor of work that the threads of a server's shards do, each an equal part (decision 91)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Work on cores, or a message if ``to`` is set.

    An operation starts when all operations in ``after`` have ended, in the same step of the same trainer. An operation
    without cores and bytes only takes its delay.

    Attributes:
        name: unique in its graph. term: the part of a step in explanations.
        role: the role of the process that computes or sends. to: the role that receives.
        core_s: core-seconds; of a message, at both ends together.
        threads: number of cores that it can use at the same time.
        sent_bytes: bytes of a message. kind: their kind in :class:`girih.planner.traffic.Traffic`; empty for messages
            that it does not count.
        bytes_per_s: the highest rate of the message without other traffic.
        delay_s: seconds that pass on no resource, such as latency.
        packet_s: core-seconds of a receiver that waits for each packet, because its link is slower than it reads.
        hops: number of messages one after the other, for the delay between hosts.
        in_turns: True if two processes send to each other in turns. gloo's AllToAll does: a process that comes later sends at
            once, and its answer that it is ready to receive comes after its message, on the same connection.
        together: True if it starts when all trainers are ready, and ends when all have ended.
        executor: the thread of its process that does it, one operation at a time. Empty: any thread.
        takes, frees: the thread that this operation begins to hold, or that is free at its end.
        ahead: number of steps by which it may run ahead of the trainer. None: only with the trainer's step.
        begins: True for the operation that waits until the trainer may begin one more step.
        reads, applies: True for the operation that reads rows, and the one that changes them.
        follows: operation of the same trainer's previous step that must have ended.
        background: True if the step ends without it.
        member: number of the process within the trainer's group; None if the role has no groups.
    """

    name: str
    term: str
    role: str
    to: str = ""
    core_s: float = 0.0
    threads: float = 1.0
    sent_bytes: float = 0.0
    kind: str = ""
    bytes_per_s: float = math.inf
    delay_s: float = 0.0
    packet_s: float = 0.0
    hops: float = 1.0
    in_turns: bool = False
    after: tuple[str, ...] = ()
    together: bool = False
    executor: str = ""
    takes: str = ""
    frees: str = ""
    ahead: int | None = None
    begins: bool = False
    reads: bool = False
    applies: bool = False
    follows: str = ""
    background: bool = False
    member: int | None = None


class OperationOptions(TypedDict, total=False):
    """Arguments of :class:`Operation` that few operations have."""

    kind: str
    threads: float
    delay_s: float
    packet_s: float
    in_turns: bool
    together: bool
    executor: str
    takes: str
    frees: str
    ahead: int | None
    begins: bool
    reads: bool
    applies: bool
    follows: str
    background: bool
    member: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """One step.

    Attributes:
        examples: number of examples of all trainers together.
        roles: role → number of processes, ``trainer`` included.
        operations: the operations, each after those that it follows.
        in_flight: number of steps that a trainer may have begun and not ended.
        groups: number of groups of trainers, each with an equal part of the processes of roles with members.
    """

    examples: float
    roles: Mapping[str, int]
    operations: tuple[Operation, ...]
    in_flight: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for each in self.operations:
            if each.name in seen or not seen.issuperset(each.after):
                raise ConfigError(
                    f"step graph: {each.name!r} after {each.after}: expected a new name, after earlier operations"
                )
            missing = {each.role, each.to or each.role} - {*self.roles}
            if missing:
                raise ConfigError(
                    f"step graph: {each.name!r}: no role {sorted(missing)} in {sorted(self.roles)}"
                )
            seen.add(each.name)

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return self.roles[TRAINER]

    @property
    def last(self) -> tuple[str, ...]:
        """Returns the operations that only background work waits for. A step ends with them."""
        waited = {name for each in self.operations for name in each.after if not each.background}
        return tuple(
            each.name
            for each in self.operations
            if each.name not in waited and each.ahead is None and not each.background
        )

    def work_s(self) -> dict[str, float]:
        """Returns term → core-seconds of a step of all trainers."""
        work: dict[str, float] = {}
        for each in self.operations:
            work[each.term] = work.get(each.term, 0.0) + self.trainers * each.core_s
        return {term: seconds for term, seconds in work.items() if seconds}

    def sent_bytes(self) -> dict[str, float]:
        """Returns kind → bytes that all processes send for one trainer's share of a step."""
        sent: dict[str, float] = {}
        for each in self.operations:
            if each.kind:
                sent[each.kind] = sent.get(each.kind, 0.0) + each.sent_bytes
        return sent
