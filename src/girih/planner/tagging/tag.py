"""Tags an operator graph in three steps: rules, components over servers, refinement (HT §3.2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from girih.errors import ConfigError
from girih.planner.operators import OperatorGraph, Tagging
from girih.planner.tagging.balance import (
    InitialPlacement,
    check_memory,
    check_parameters,
    dealt,
    others,
    ruled,
)
from girih.planner.tagging.group import HierarchicalGroup
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import (
    Ledger,
    Load,
    Utilization,
    examples_per_s,
    shared_s,
    utilization,
)
from girih.planner.tagging.refine import SHARED_CORES, Move, refine

How = Literal["refined", "rules", "none"]
EFFORT = 15_000_000
"""The effort of refinement: the operators of all placements that it evaluates. This takes about ten seconds on one
core.
"""
AHEAD = 1.01
"""The predicted speed of another initial placement must be this many times the speed of the placement by rules.

The placement by rules has reasons, which are worth one per cent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A tagging, with its reasons and its predicted speed.

    Attributes:
        start: the initial placement: "rules" unless another start became better.
        tagging: operator → device.
        reasons: operator → reason for its device.
        moves: moves of refinement, in order.
        loads: device → its load per example.
        utilization: device → its utilization at ``examples_per_s``.
        examples_per_s: predicted speed of one group.
        shared_cores: fraction of the shared cores in use, or None if devices share no cores.
    """

    start: str
    tagging: Mapping[str, str]
    reasons: Mapping[str, str]
    moves: tuple[Move, ...]
    loads: Mapping[str, Load]
    utilization: Mapping[str, Utilization]
    examples_per_s: float
    shared_cores: float | None


def tag(
    graph: OperatorGraph,
    group: HierarchicalGroup,
    *,
    how: How = "refined",
    effort: int = EFFORT,
    tagging: Tagging | None = None,
) -> Tagged:
    """Tags each operator with the device that runs it.

    Args:
        how: "rules" skips the refinement; "none" also skips the rules, and deals movable operators to servers
            round-robin.
        effort: operators of all placements that refinement may evaluate.
        tagging: a tagging to keep, instead of a decision.

    Raises:
        ConfigError: the net does not fit into the memory of the group (names the operator, and a remedy), or
            ``tagging`` does not fit the graph.
    """
    if how not in ("refined", "rules", "none"):
        raise ConfigError(f"tagging = {how!r}: expected one of 'refined', 'rules', 'none'")
    index = Index(graph)
    check_parameters(index, group)
    if tagging is not None:
        planned = index.placed(tagging, len(group.devices))
        start = InitialPlacement("the plan", planned, ["as planned"] * len(index.operators))
    elif not group.servers:
        reasons = ["the group has no servers"] * len(index.operators)
        start = InitialPlacement("none", [0] * len(index.bundles), reasons)
    elif how == "none":
        start = dealt(index, group)
    else:
        start = ruled(index, group)
    searched = how == "refined" and tagging is None
    if searched and group.servers:
        start = _refined(index, group, start, iter(range(effort // max(1, len(index.operators)))))
    loads = Ledger(index, group, start.placed).exact_loads()
    check_memory(index, group, start.placed, loads, searched=searched)
    named = {device_name(device): load for device, load in enumerate(loads)}
    speed = examples_per_s(group, loads)
    explained = {each.name: reason for each, reason in zip(index.operators, start.reasons, strict=True)}
    for move in start.moves:
        explained |= dict.fromkeys(move.operators, _describe_move(move))
    return Tagged(
        start=start.name,
        tagging=index.tagging(start.placed),
        reasons=explained,
        moves=start.moves,
        loads=named,
        utilization=utilization(named, speed),
        examples_per_s=speed,
        shared_cores=None if group.cores is None else speed * shared_s(group, loads),
    )


def _refined(
    index: Index, group: HierarchicalGroup, ruled_start: InitialPlacement, effort: Iterator[object]
) -> InitialPlacement:
    """Refines the placement by rules. Takes another initial placement if its result is better by :data:`AHEAD`.

    If no result fits into memory, deals bundles to the servers in turn.
    """

    def reached(start: InitialPlacement) -> tuple[float, float, InitialPlacement]:
        """Returns the missing memory and the negative speed of an initial placement after refinement."""
        placed, moves = refine(index, group, start.placed, effort)
        loads = Ledger(index, group, placed).exact_loads()
        lacking = sum(max(0.0, load.memory - 1) for load in loads)
        return lacking, -examples_per_s(group, loads), replace(start, placed=placed, moves=moves)

    results = [reached(start) for start in (ruled_start, *others(index))]
    if all(lacking for lacking, *_ in results):
        results.append(reached(replace(dealt(index, group), name="dealt in turn")))
    first, best = results[0], min(results, key=lambda each: each[:2])
    ahead = best[0] < first[0] or (best[0] == first[0] and best[1] < first[1] * AHEAD)
    return (best if ahead else first)[2]


def _describe_move(move: Move) -> str:
    shared = move.bottleneck == SHARED_CORES
    busiest = f"{SHARED_CORES} were" if shared else f"{move.resource} of {move.bottleneck} was"
    return (
        f"moved from {move.source} while {busiest} the bottleneck:"
        f" {move.examples_per_s_before:,.0f} to {move.examples_per_s_after:,.0f} examples/s"
    )
