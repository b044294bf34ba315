"""The simulated processes and hosts: at most a few of each role, which stand for all.

All trainers do the same, and so do all processes of another role. If there are more than :data:`MOST` trainers, one of
every f is simulated, with one of every f processes of each role, and one of every f hosts. Rounding changes no load: each
simulated process has the load of a real one, and so has each host. What trainers do together takes as long as the
slowest of all. A role with fewer processes than f keeps one, which has its whole load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from girih.planner.simulator.engine import Capacity, Engine, Executor
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.steps.graph import LOADER, PARAMETER_SERVER, SHARDS, SPREAD, TRAINER, Operation, StepGraph

MOST = 8
MOST_SHARD_THREADS = 8
"""A server has a thread for each core of its host, and at most this number. The simulator does not know ``store.shards``."""


@dataclass(frozen=True, slots=True)
class Host:
    """A simulated host: its cores, and its link if processes share it."""

    group: HostGroup
    cores: Capacity
    out: Capacity
    into: Capacity


@dataclass(slots=True)
class Process:
    """A simulated process.

    Attributes:
        pid: equal for roles in one process.
        load: factor of the work of an operation, see the module.
        out, into: the directions of its link.
        executors: name → its threads that do one thing at a time.
    """

    title: str
    pid: str
    host: Host
    load: float
    out: Capacity
    into: Capacity
    executors: dict[str, Executor] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Its role, without its number."""
        return self.title.rpartition(" ")[0]

    def threads(self, executor: str) -> list[str]:
        """Returns the names of the threads that each do a part of an operation of an executor."""
        if executor != SHARDS:
            return [executor]
        count = max(1, min(MOST_SHARD_THREADS, int(self.host.group.cores)))
        return [f"{SHARDS} {number}" for number in range(count)]

    def executor(self, engine: Engine, name: str) -> Executor:
        """Returns a thread by its name."""
        if name not in self.executors:
            self.executors[name] = Executor(engine, f"{self.title}: {name}")
        return self.executors[name]


class Cluster:
    """All simulated processes.

    Attributes:
        trainers: number of simulated trainers. stands_for: number of trainers that each of them stands for, f.
        processes: role → its processes.
    """

    def __init__(self, graph: StepGraph, hosts: Hosts) -> None:
        total = graph.trainers
        self.trainers = min(total, MOST)
        self.stands_for = factor = total / self.trainers
        self.groups = max(1, min(graph.groups, round(graph.groups / factor)))
        grouped = {each.role for each in graph.operations if each.member is not None}
        grouped |= {each.to for each in graph.operations if each.member is not None and each.to}
        grouped -= {TRAINER, *SPREAD}
        counts = {
            role: self.groups * (count // graph.groups)
            if role in grouped
            else max(1, min(count, round(count / factor)))
            for role, count in graph.roles.items()
        }
        counts[TRAINER] = self.trainers
        numbers = [max(1, round(each.count / factor)) for each in hosts.hosts]
        self.hosts: dict[tuple[int, int], Host] = {}
        for number, group in enumerate(hosts.hosts):
            size = group.count / factor / numbers[number]  # of a simulated host, in real hosts
            for index in range(numbers[number]):
                self.hosts[number, index] = _host(group, f"host {number}.{index}", size)
        places = hosts.place(counts, numbers)
        self.processes: dict[str, list[Process]] = {role: [] for role in counts}
        for (role, index), place in places.items():
            host, title = self.hosts[place], f"{role} {index}"
            if role == PARAMETER_SERVER:
                first = self.processes[TRAINER][0]
                process = Process(title, first.pid, host, factor, first.out, first.into)
            else:
                load = (total / graph.roles[role]) / (self.trainers / counts[role])
                out, into = host.out, host.into
                if host.group.link_per_process:
                    out, into = _link(host.group, title, 1.0)
                process = Process(title, title, host, load, out, into)
            self.processes[role].append(process)

    def of(self, operation: Operation, role: str, lane: int, step: int) -> list[Process]:
        """Returns the processes of a role that do an operation for a trainer's step."""
        processes = self.processes[role]
        if role == TRAINER:
            return [processes[lane]]
        if operation.member is not None and role not in SPREAD:
            members = len(processes) // self.groups
            group = lane * self.groups // self.trainers
            return [processes[group * members + operation.member % members]]
        if role in SPREAD:
            return processes
        return [processes[(lane if role == LOADER else step + lane) % len(processes)]]


def _host(group: HostGroup, title: str, size: float) -> Host:
    cores = Capacity(f"cores of {title}", group.cores * size)
    return Host(group, cores, *_link(group, title, size))


def _link(group: HostGroup, title: str, size: float) -> tuple[Capacity, Capacity]:
    rate, burst = group.gbit * 1e9 / 8 * size, 1e3 * group.burst_kb * size
    return Capacity(f"link of {title}, out", rate, burst), Capacity(f"link of {title}, in", rate, burst)
