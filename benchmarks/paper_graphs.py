"""Changes of step graphs: each replaces one assumption about a system by another one.

They show which assumption decides the shape of a curve. The names of ``CHANGES`` stand in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from girih.planner.calibration import ALL_REDUCE
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import Facts
from girih.planner.simulator.hosts import Hosts
from girih.planner.steps.basis import LOOKUP, OVERHEAD, PASS, READ, STEP, UPDATE
from girih.planner.steps.graph import (
    GROUP_SERVER,
    LOADER,
    PARAMETER_SERVER,
    SERVER,
    TRAINER,
    WORKER,
    Operation,
    StepGraph,
)
from girih.planner.traffic import FLOAT_BYTES

INSTANT_S = 1e-6
"""Seconds of reading if another system reads. The simulator needs some."""
Edit = Callable[[StepGraph], StepGraph]


@dataclass(frozen=True)
class Step:
    """A step of a case, and the hosts that it runs on."""

    graph: StepGraph
    facts: Facts
    hosts: Hosts

    def edited(self, *edits: Edit) -> Step:
        """The same with a changed graph."""
        graph = self.graph
        for edit in edits:
            graph = edit(graph)
        return replace(self, graph=graph)


def each_of(graph: StepGraph, edit: Callable[[Operation], Operation]) -> StepGraph:
    """The graph with changed operations."""
    return replace(graph, operations=tuple(map(edit, graph.operations)))


def reads_own_share(graph: StepGraph) -> StepGraph:
    """Each process reads a trainer's share in place of all examples."""
    return each_of(
        graph,
        lambda each: replace(each, core_s=each.core_s / _readings(graph)) if each.term == READ else each,
    )


def _readings(graph: StepGraph) -> float:
    return float(graph.roles.get(LOADER, graph.trainers))


def without_overheads(graph: StepGraph) -> StepGraph:
    """No time of Python code between the parts of a step."""
    gone = (OVERHEAD, STEP)
    return each_of(graph, lambda each: replace(each, core_s=0.0, delay_s=0.0) if each.term in gone else each)


def without_reading(graph: StepGraph) -> StepGraph:
    """Examples come from another system, ready to use."""
    return each_of(graph, lambda each: replace(each, core_s=INSTANT_S) if each.term == READ else each)


def rows_in_gpu_time(graph: StepGraph) -> StepGraph:
    """Lookups and row updates of trainers take no cores, because the time of the GPU includes them."""
    rows = (LOOKUP, UPDATE)
    return each_of(
        graph,
        lambda each: replace(each, core_s=0.0) if each.term in rows and each.role == TRAINER else each,
    )


def parallel_requests(graph: StepGraph) -> StepGraph:
    """Workers and servers do many things at a time, each with up to eight threads."""
    served = (WORKER, SERVER)
    return each_of(
        graph,
        lambda each: replace(each, executor="", threads=8.0) if each.role in served and not each.to else each,
    )


def no_dense_server(graph: StepGraph) -> StepGraph:
    """Trainers send no dense gradients to a dense server."""
    gone = {each.name for each in graph.operations if PARAMETER_SERVER in (each.role, each.to)}
    return replace(graph, operations=tuple(each for each in graph.operations if each.name not in gone))


def rings_of_buckets(graph: StepGraph, facts: Facts, buckets: int) -> StepGraph:
    """Each bucket has one ring. ``step_graph`` counts a ring for each MB, but no tensor is in two buckets."""
    model = facts.model
    counted = max(1, math.ceil(FLOAT_BYTES * model.num_parameters / BUCKET_BYTES) - 1)
    fewer = min(1.0, max(1, buckets - 1) / counted)

    def edit(each: Operation) -> Operation:
        if each.name != "rings" or facts.calibration is None:
            return each
        messages_s = each.hops * facts.calibration.links[ALL_REDUCE].message_cpu_s
        return replace(
            each,
            hops=fewer * each.hops,
            delay_s=fewer * each.delay_s,
            core_s=each.core_s - (1 - fewer) * messages_s,
        )

    return each_of(graph, edit)


def spread_over_servers(graph: StepGraph, servers: int) -> StepGraph:
    """The exchanges of a net go to all servers of its group, in equal parts. ``step_graph`` has all bytes at the busiest one."""
    made: list[Operation] = []
    parts: dict[str, tuple[str, ...]] = {}
    for each in graph.operations:
        after = tuple(name for old in each.after for name in parts.get(old, (old,)))
        if GROUP_SERVER in (each.role, each.to) and TRAINER in (each.role, each.to):
            names = parts[each.name] = tuple(f"{each.name}, {number}" for number in range(servers))
            made += [
                replace(
                    each, name=name, after=after, member=number, sent_bytes=each.sent_bytes / servers, core_s=each.core_s / servers
                )
                for number, name in enumerate(names)
            ]  # fmt: skip
        else:
            made.append(replace(each, after=after))
    return replace(graph, operations=tuple(made))


def mesh(graph: StepGraph) -> StepGraph:
    """Each trainer has a loader and a worker on its host, so examples and bags cross no link (``mesh.py``)."""
    local = ({TRAINER, WORKER}, {LOADER, WORKER}, {LOADER, TRAINER})
    return reads_own_share(
        each_of(
            graph,
            lambda each: replace(each, sent_bytes=0.0) if each.to and {each.role, each.to} in local else each,
        )
    )


def on_gpu(graph: StepGraph, seconds: float) -> StepGraph:
    """The pass of a trainer is on its own GPU, and takes a number of seconds."""
    passes = [each for each in graph.operations if each.term == PASS and each.role == TRAINER]
    whole, names = sum(each.core_s for each in passes), {each.name for each in passes}
    return each_of(
        graph,
        lambda each: (
            replace(each, core_s=0.0, delay_s=seconds * each.core_s / whole, executor="gpu")
            if each.name in names
            else each
        ),
    )


def edits(changes: Mapping[str, tuple[Edit, ...]], name: str) -> tuple[Edit, ...]:
    """The edits of a change by its name; none for the empty name."""
    return changes[name] if name else ()
