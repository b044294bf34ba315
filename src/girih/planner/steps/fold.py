"""A step graph without queues: its work, and the path of a step that meets no other traffic.

Overheads of a calibration are relative to this summary. A bound follows from it. With N steps in flight, a step takes at
least the time of the busiest resource. N steps take at least one path and N − 1 times the busiest resource (Zahorjan,
Sevcik, Eager and Galler, CACM 25(2), 1982).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from girih.planner.steps.graph import TRAINER, Operation, StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The summary.

    Attributes:
        work_s: term → core-seconds of all processes, in a step of all trainers.
        path_s: term → seconds of the longest chain of operations of a step.
    """

    work_s: Mapping[str, float]
    path_s: Mapping[str, float]


def fold(graph: StepGraph, cores: float) -> Fold:
    """Returns the summary of a graph on a machine with a number of cores.

    Trainers begin a step at the same time. So an operation of a process that serves k trainers takes k times as long.
    """
    chains: dict[str, dict[str, float]] = {}
    for each in graph.operations:
        before = max((chains[name] for name in each.after), key=_total, default={})
        chains[each.name] = dict(before)
        if each.ahead is None:
            seconds = seconds_alone(each, graph, cores)
            chains[each.name][each.term] = before.get(each.term, 0.0) + seconds
    longest = max((chains[name] for name in graph.last), key=_total)
    return Fold(work_s=graph.work_s(), path_s={term: seconds for term, seconds in longest.items() if seconds})


def seconds_alone(operation: Operation, graph: StepGraph, cores: float) -> float:
    """Returns the seconds of an operation while only operations of the same name run."""
    trainers = graph.trainers
    if operation.to:
        return operation.delay_s + operation.sent_bytes / operation.bytes_per_s
    served = (
        1.0 if operation.role == TRAINER or not operation.executor else trainers / graph.roles[operation.role]
    )
    crowd = trainers * operation.threads / cores if operation.role == TRAINER else 1.0
    return operation.delay_s + operation.core_s / operation.threads * max(1.0, served, crowd)


def step_seconds(busiest_s: float, path_s: float, in_flight: float) -> float:
    """Returns seconds from one step to the next: max(busiest, (path + (N − 1) · busiest) / N), N = ``in_flight``."""
    return max(busiest_s, (path_s + (in_flight - 1) * busiest_s) / in_flight)


def _total(chain: Mapping[str, float]) -> float:
    return sum(chain.values())
