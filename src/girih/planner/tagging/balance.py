"""Spreads components over servers to balance dense bytes (HT §3.2.1), and refuses nets that do not fit (§4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from girih.errors import ConfigError
from girih.planner.operators import DisjointSets
from girih.planner.tagging.components import divide
from girih.planner.tagging.group import HierarchicalGroup, gigabytes
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import Load
from girih.planner.tagging.refine import Move
from girih.planner.tagging.rules import HAS_PARAMETERS, NOT_MOVABLE, by_rules


def balanced(index: Index, on_servers: Sequence[bool], group: HierarchicalGroup) -> list[int]:
    """Returns the device of each bundle.

    The longest component comes first. Each component goes to the server with the fewest parameter bytes that has memory
    for it. If no server has memory for a whole component, its bundles are placed one by one.

    Args:
        on_servers: whether each operator is on a server.
    """
    placed = [0] * len(index.bundles)
    total = [0] * len(group.devices)

    def room(device: int, size: int) -> bool:
        limit = group.devices[device].memory_bytes
        return limit is None or (total[device] + size) * group.held_copies(device) <= limit

    def place(bundles: Sequence[int]) -> None:
        size = sum(index.bundles[bundle].parameter_bytes for bundle in bundles)
        servers = range(1, len(total))
        least = min(servers, key=lambda device: (not room(device, size), total[device], device))
        if len(bundles) > 1 and not room(least, size):
            for single in _longest_first(index, [[bundle] for bundle in bundles]):
                place(single)
            return
        total[least] += size
        for bundle in bundles:
            placed[bundle] = least

    for bundles in _longest_first(index, _pieces(index, on_servers)):
        place(bundles)
    return placed


def check_parameters(index: Index, group: HierarchicalGroup) -> None:
    """Checks that some placement of the parameters fits into memory.

    Raises:
        ConfigError: the parameters of an operator fit on no server; an operator with parameters must stay on several
            trainers; or there are too few servers for all parameters.
    """
    if not group.servers:
        return
    limits = [server.memory_bytes for server in group.servers]
    largest = max(math.inf if limit is None else limit for limit in limits)
    copies, held = group.held_copies(1), _held(group)
    for bundle in index.bundles:
        operator = max((index.operators[n] for n in bundle.operators), key=lambda each: each.parameter_bytes)
        if bundle.parameter_bytes and not bundle.movable and group.trainers > 1:
            raise ConfigError(
                f"strategy: hierarchical: operator {operator.name!r} ({operator.kind}) has parameters but must stay on trainers,"
                f" and each of {group.trainers} would have a copy; expected one copy for a group: set trainers_per_group = 1,"
                " or servers_per_group = 0"
            )
        taken = bundle.parameter_bytes * copies
        if bundle.movable and taken > largest:
            raise ConfigError(
                f"strategy: hierarchical: operator {operator.name!r} ({operator.kind}) does not fit into memory: its parameters take"
                f" {gigabytes(taken)} {held}, but a group server has {gigabytes(largest)};"
                " set split_fc = true, which cuts fully connected layers, or nets lower, or give servers more memory"
            )
    total = sum(bundle.parameter_bytes for bundle in index.bundles if bundle.movable) * copies
    room = sum(math.inf if limit is None else limit for limit in limits)
    if total > room:
        raise ConfigError(
            f"strategy: hierarchical: the dense half's parameters take {gigabytes(total)} {held}, but"
            f" the {len(limits)} servers of a group have {gigabytes(room)}; set servers_per_group to at least"
            f" {math.ceil(total / largest)}, or nets lower"
        )


def check_memory(
    index: Index, group: HierarchicalGroup, placed: Sequence[int], loads: Sequence[Load], *, searched: bool
) -> None:
    """Checks that a placement fits into the memory of every device.

    Args:
        searched: True if refinement has looked for another placement.

    Raises:
        ConfigError: a device has too little memory. The error names the device, and the operator that needs most
            memory.
    """
    fullest = max(range(len(loads)), key=lambda device: loads[device].memory)
    load, limit = loads[fullest], group.devices[fullest].memory_bytes
    if limit is None or load.memory <= 1:
        return
    in_flight = group.nets_on(fullest) * group.batch_size

    def taken(number: int) -> float:
        bundle, operator = index.bundles[index.bundle_of[number]], index.operators[number]
        parameters = bundle.parameter_bytes * group.held_copies(fullest)
        return parameters + operator.output_bytes_per_example * in_flight

    there = [number for number, bundle in enumerate(index.bundle_of) if placed[bundle] == fullest]
    largest = max(there, key=taken)
    found_it = "" if searched else "tagging = 'refined', which looks for another place, or "
    mend = (
        "servers_per_group higher, split_fc = true, or nets or data.batch_size lower"
        if fullest
        else "nets or data.batch_size lower, or trainers_per_group higher"
    )
    raise ConfigError(
        f"strategy: hierarchical: {device_name(fullest)} would take {gigabytes(load.memory_bytes)}, but has"
        f" {gigabytes(limit)}: operator {index.operators[largest].name!r} ({index.operators[largest].kind}) takes"
        f" {gigabytes(taken(largest))} of it{', and no placement was found that fits' if searched else ''};"
        f" set {found_it}{mend}"
    )


def _pieces(index: Index, on_servers: Sequence[bool]) -> list[list[int]]:
    """Returns the bundles of each component. Components that share a bundle count as one."""
    part, _ = divide(index, [int(there) for there in on_servers])
    placed = [(component, index.bundle_of[number]) for number, component in enumerate(part) if component]
    pieces = DisjointSets(sorted({bundle for _, bundle in placed}))
    first: dict[int, int] = {}
    for component, bundle in placed:
        pieces.join(first.setdefault(component, bundle), bundle)
    return pieces.sets()


def _longest_first(index: Index, pieces: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return sorted(
        pieces, key=lambda bundles: -sum(index.bundles[bundle].parameter_bytes for bundle in bundles)
    )


def _held(group: HierarchicalGroup) -> str:
    """Describes the memory that is needed for parameters on servers, in addition to the parameters."""
    nets = group.nets_on(1)
    return f"with optimizer state and the gradient{'s' if nets > 1 else ''} of {nets} net{'s' if nets > 1 else ''}"


@dataclass(frozen=True, slots=True)
class InitialPlacement:
    """A placement before refinement, or the result of refinement.

    Attributes:
        placed: device of each bundle.
        reasons: reason for the initial device of each operator.
        moves: moves of refinement.
    """

    name: str
    placed: Sequence[int]
    reasons: Sequence[str]
    moves: tuple[Move, ...] = ()


def ruled(index: Index, group: HierarchicalGroup) -> InitialPlacement:
    """Returns the placement by rules, with components spread by bytes of parameters (HT §3.2.1)."""
    on_servers, reasons = by_rules(index)
    return InitialPlacement("rules", balanced(index, on_servers, group), reasons)


def dealt(index: Index, group: HierarchicalGroup) -> InitialPlacement:
    """Returns a placement that deals movable bundles to the servers in turn.

    This is the paper's ablation, without rules and refinement (HT §5.3).
    """
    placed, turn = [], 0
    for bundle in index.bundles:
        placed.append(1 + turn % len(group.servers) if bundle.movable else 0)
        turn += bundle.movable
    return _start("none", index, placed, "dealt to the servers round-robin")


def others(index: Index) -> list[InitialPlacement]:
    """Returns two more initial placements.

    One has all movable bundles on one server. The other has only the bundles with parameters there.
    """
    everything = [1 if bundle.movable else 0 for bundle in index.bundles]
    parameters = [1 if bundle.movable and bundle.parameter_bytes else 0 for bundle in index.bundles]
    return [
        _start("all on one server", index, everything, "refinement began with all on one server"),
        _start(
            "parameters on one server", index, parameters, "refinement began with parameters on one server"
        ),
    ]


def _start(name: str, index: Index, placed: Sequence[int], reason: str) -> InitialPlacement:
    bundles = [index.bundles[bundle] for bundle in index.bundle_of]
    reasons = [
        (HAS_PARAMETERS if bundle.parameter_bytes else reason) if bundle.movable else NOT_MOVABLE
        for bundle in bundles
    ]
    return InitialPlacement(name, placed, reasons)
