"""Components: operators of one server that run without interruption (HT §3.1.1, §3.2.1).

A component takes its inputs from a trainer, and sends its outputs to it. It is connected and convex: no path leaves it
and returns through a trainer or another server. A set that would not be convex is divided into several components.
Tensors between these pass through the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from girih.planner.operators import DisjointSets, OperatorGraph, Tagging
from girih.planner.tagging.index import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component.

    Attributes:
        server: the server that runs it.
        stage: number of exchanges before it in a net's step; components of one stage run in parallel.
        operators: names, in the graph's order.
    """

    server: int
    stage: int
    operators: tuple[str, ...]


Division = tuple[list[int], list[int]]
"""The component number of each operator, from 1, or 0 for operators on trainers. The second list has the stage of each
component.
"""


def components(graph: OperatorGraph, tagging: Tagging) -> tuple[Component, ...]:
    """Returns the components of a tagged graph. They are ordered by stage, and within a stage as in the graph."""
    index = Index(graph)
    devices = index.devices(tagging)
    part_of, stages = divide(index, devices)
    members: dict[int, list[int]] = {}
    for number, part in enumerate(part_of):
        if part:
            members.setdefault(part, []).append(number)
    ordered = [
        Component(
            server=devices[numbers[0]] - 1,
            stage=stages[part],
            operators=tuple(graph.operators[number].name for number in numbers),
        )
        for part, numbers in members.items()
    ]
    return tuple(sorted(ordered, key=lambda component: component.stage))


def divide(index: Index, devices: Sequence[int]) -> Division:
    """Makes components from connected operators of one server and one stage.

    Two components become one if the result is convex.

    Args:
        devices: device of each operator.
    """
    levels = _levels(index, devices)
    sets = DisjointSets(range(len(devices)))
    crossing = []
    for producer, readers in enumerate(index.consumers):
        for consumer in readers:
            if devices[producer] and devices[producer] == devices[consumer]:
                if levels[producer] == levels[consumer]:
                    sets.join(producer, consumer)
                else:
                    crossing.append((producer, consumer))
    joined = bool(crossing) and _join(index, sets, crossing)
    numbers: dict[int, int] = {}
    part = [
        numbers.setdefault(sets.root(number), 1 + len(numbers)) if device else 0
        for number, device in enumerate(devices)
    ]
    if joined:
        return part, _stages(index, part, len(numbers))
    stages = [0] * (1 + len(numbers))
    for number, level in zip(part, levels, strict=True):
        stages[number] = level
    return part, [0, *stages[1:]]


def _levels(index: Index, devices: Sequence[int]) -> list[int]:
    """Returns the number of exchanges before each operator, if every operator runs as early as possible."""
    levels = [0] * len(devices)
    for number, device in enumerate(devices):
        level = 0
        for producer in index.producers[number]:
            answered = devices[producer] and devices[producer] != device
            level = max(level, levels[producer] + (1 if answered else 0))
        levels[number] = level
    return levels


def _join(index: Index, sets: DisjointSets[int], crossing: Sequence[tuple[int, int]]) -> bool:
    """Joins two components that an edge between stages connects, if no other path connects them.

    Returns whether any components were joined.
    """
    members = {sets.root(each[0]): each for each in sets.sets()}
    joined = False
    for producer, consumer in crossing:
        upper, lower = sets.root(producer), sets.root(consumer)
        if upper != lower and not _detour(index, sets, members, upper, lower):
            sets.join(upper, lower)
            members[upper] += members.pop(lower)
            joined = True
    return joined


def _detour(
    index: Index, sets: DisjointSets[int], members: Mapping[int, list[int]], upper: int, lower: int
) -> bool:
    """Returns whether a path leads from one component to another through a third one."""
    last = max(members[lower])  # later operators lead to no earlier ones
    seen = {upper}
    waiting = [upper]
    while waiting:
        node = waiting.pop()
        for number in members[node]:
            for consumer in index.consumers[number]:
                if consumer > last:
                    continue
                reader = sets.root(consumer)
                if reader == lower and node != upper:
                    return True
                if reader not in seen and reader != lower:
                    seen.add(reader)
                    waiting.append(reader)
    return False


def _stages(index: Index, part: Sequence[int], num_parts: int) -> list[int]:
    """Returns the stage of each component: the maximum number of components before it on a path."""
    nodes = [
        number or -1 - operator for operator, number in enumerate(part)
    ]  # each operator on trainers is a separate node
    before: dict[int, set[int]] = {node: set() for node in nodes}
    for producer, readers in enumerate(index.consumers):
        for consumer in readers:
            if nodes[producer] != nodes[consumer]:
                before[nodes[consumer]].add(nodes[producer])
    stages: dict[int, int] = {}
    for node in TopologicalSorter(before).static_order():
        stages[node] = max((stages[each] + (each > 0) for each in before[node]), default=0)
    return [0, *(stages[number] for number in range(1, 1 + num_parts))]
