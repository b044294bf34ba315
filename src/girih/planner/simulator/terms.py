"""Costs that a calibration does not have: tables larger than caches, and trainers with GPUs. The numbers are nominal.

Predictions with these terms are extrapolated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.simulator.hosts import Hosts
from girih.planner.steps.basis import LOOKUP, PASS, UPDATE
from girih.planner.steps.graph import SERVER, TRAINER, Operation, StepGraph
from girih.planner.traffic import FLOPS_PER_WEIGHT

LINE_BYTES = 64
CALIBRATED_ROWS = 160_000.0
"""Rows of the calibrated lookups: eight tables of 20,000 ids."""
LINES_PER_S = ((1e6, 234e6), (1e7, 84e6), (1e8, 58e6))
"""Rows of a shard → random cache lines per second, by ``girih bench capacity`` on an Intel Xeon."""
DEVICES = {"v100": 15.7e12, "a100": 19.5e12, "h100": 67e12}
"""Name of a GPU → its nominal float32 operations per second."""
EFFICIENCY, LAUNCHES_S = 0.3, 1e-3
"""Part of the nominal speed that products of a step reach, and seconds per pass for kernel launches."""


def lines_per_s(rows: float) -> float:
    """Returns random cache lines per second in a shard with a number of rows, between the measured points by logarithm."""
    points = LINES_PER_S
    if rows <= points[0][0]:
        return points[0][1]
    for (few, fast), (many, slow) in pairwise(points):
        if rows <= many:
            part = math.log(rows / few) / math.log(many / few)
            return float(fast * (slow / fast) ** part)
    return points[-1][1]


def extended(graph: StepGraph, facts: Facts, hosts: Hosts) -> tuple[StepGraph, list[str]]:
    """Returns the graph with terms for large tables and GPUs, and the reasons why it is extrapolated.

    Raises:
        ConfigError: rows do not fit into the memory of their hosts, or a device is unknown.
    """
    reasons = []
    holder = SERVER if SERVER in graph.roles else TRAINER
    count = graph.roles[holder]
    rows = sum(each.max_rows or 0 for each in facts.tables)
    row_bytes = max((each.row_bytes for each in facts.tables), default=0)
    size = sum((each.max_rows or 0) * each.row_bytes for each in facts.tables) / count
    _check_memory(hosts, holder, count, size)
    if rows / count > CALIBRATED_ROWS:
        lines = 1 + row_bytes / LINE_BYTES
        seconds = lines * (1 / lines_per_s(rows / count) - 1 / lines_per_s(CALIBRATED_ROWS))
        if seconds > 0 and facts.profile is not None:
            graph = _slower_rows(graph, holder, seconds * facts.profile.keys_of_share)
        reasons.append(
            f"{rows / count:,.0f} rows of each {holder}; calibrated tables have {CALIBRATED_ROWS:,.0f}"
        )
    devices = {
        each.device for each in hosts.hosts if each.device and (not each.roles or TRAINER in each.roles)
    }
    for device in sorted(devices):
        if device not in DEVICES:
            raise ConfigError(f"hosts: device = {device!r}: expected one of {', '.join(DEVICES)}")
        graph = _on_device(graph, facts, DEVICES[device])
        reasons.append(f"passes on {device} from its nominal speed")
    return graph, reasons


def _check_memory(hosts: Hosts, role: str, count: int, size: float) -> None:
    able = [each for each in hosts.hosts if not each.roles or role in each.roles]
    number = sum(each.count for each in able)
    here = math.ceil(count / number) if number else 0
    for each in able:
        if size * here > 1e9 * each.memory_gb:
            raise ConfigError(
                f"hosts: memory_gb = {each.memory_gb:g}: {here} × {role} on a host need {size * here / 1e9:,.0f} GB for rows;"
                f" add hosts, or lower max_rows of tables"
            )


def _slower_rows(graph: StepGraph, role: str, seconds: float) -> StepGraph:
    """Adds core-seconds of cache misses to the lookups and the updates of rows."""

    def slower(operation: Operation) -> Operation:
        if operation.role == role and (
            (operation.reads and operation.term == LOOKUP) or (operation.applies and operation.term == UPDATE)
        ):
            return replace(operation, core_s=operation.core_s + seconds)
        return operation

    return replace(graph, operations=tuple(slower(each) for each in graph.operations))


def _on_device(graph: StepGraph, facts: Facts, flops_per_s: float) -> StepGraph:
    """Moves the passes of trainers to a GPU."""
    whole = sum(each.core_s for each in graph.operations if each.term == PASS and each.role == TRAINER) or 1.0
    flops = FLOPS_PER_WEIGHT * facts.model.num_parameters * graph.examples / graph.trainers
    pass_s = flops / (EFFICIENCY * flops_per_s) + LAUNCHES_S

    def moved(operation: Operation) -> Operation:
        if operation.term != PASS or operation.role != TRAINER:
            return operation
        return replace(operation, core_s=0.0, delay_s=pass_s * operation.core_s / whole, executor="gpu")

    return replace(graph, operations=tuple(moved(each) for each in graph.operations))
