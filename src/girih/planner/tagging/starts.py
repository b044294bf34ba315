"""Placements that refinement starts from: that of the rules, two that put everything in one place for it to take apart, and one by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from girih.planner.tagging.balance import balanced
from girih.planner.tagging.group import HierarchicalGroup
from girih.planner.tagging.index import Index
from girih.planner.tagging.rules import HAS_PARAMETERS, NOT_MOVABLE, TaggingRule, by_rules


@dataclass(frozen=True, slots=True)
class InitialPlacement:
    """A placement before refinement.

    Attributes:
        placed: device of each bundle.
        reasons: of each operator, why it is there.
    """

    name: str
    placed: Sequence[int]
    reasons: Sequence[str]


def ruled(index: Index, group: HierarchicalGroup, rules: Sequence[TaggingRule]) -> InitialPlacement:
    """Rules say what goes to servers, its components are spread by bytes of parameters (HT §3.2.1)."""
    on_servers, reasons = by_rules(index, rules)
    return InitialPlacement("rules", balanced(index, on_servers, group), reasons)


def dealt(index: Index, group: HierarchicalGroup) -> InitialPlacement:
    """Bundles that can be moved dealt to the servers in turn: the paper's ablation, without rules and refinement (HT §5.3)."""
    placed, turn = [], 0
    for bundle in index.bundles:
        placed.append(1 + turn % len(group.servers) if bundle.movable else 0)
        turn += bundle.movable
    return _start("none", index, placed, "dealt to the servers in turn")


def others(index: Index) -> list[InitialPlacement]:
    """All that can be moved on one server; or only what has parameters."""
    everything = [1 if bundle.movable else 0 for bundle in index.bundles]
    parameters = [1 if bundle.movable and bundle.parameter_bytes else 0 for bundle in index.bundles]
    return [
        _start("all on one server", index, everything, "refinement began with all on one server"),
        _start(
            "parameters on one server", index, parameters, "refinement began with parameters on one server"
        ),
    ]


def packed(index: Index, group: HierarchicalGroup) -> InitialPlacement:
    """All that can be moved on servers, what takes most memory first, each where least is taken: for servers that have hardly enough."""
    in_flight = group.nets_on(1) * group.batch_size

    def taken(number: int) -> float:
        bundle = index.bundles[number]
        outputs = sum(index.operators[each].output_bytes_per_example for each in bundle.operators)
        return bundle.parameter_bytes * group.held_copies(1) + outputs * in_flight

    placed, total = [0] * len(index.bundles), [0.0] * len(group.devices)
    for number in sorted(range(len(placed)), key=lambda number: -taken(number)):
        if index.bundles[number].movable:
            placed[number] = min(range(1, len(total)), key=lambda device: total[device])
            total[placed[number]] += taken(number)
    return _start(
        "spread by memory", index, placed, "refinement began with all spread over servers by memory"
    )


def _start(name: str, index: Index, placed: Sequence[int], reason: str) -> InitialPlacement:
    bundles = [index.bundles[bundle] for bundle in index.bundle_of]
    told = [
        (HAS_PARAMETERS if bundle.parameter_bytes else reason) if bundle.movable else NOT_MOVABLE
        for bundle in bundles
    ]
    return InitialPlacement(name, placed, told)
