"""Greedy refinement: what is on the busiest device moves off it, one unit at a time, while that helps (HT §3.2.1)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from girih.planner.tagging.group import Group
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import Ledger
from girih.planner.tagging.utilization import (
    CPU,
    MEMORY,
    NETWORK,
    Load,
    exact_loads,
    examples_per_s,
    least_loads,
)

_TOLERANCE = 1e-9
"""Relative differences below which two loads are the same: sums of floats that were added up in another order."""

Rank = tuple[float, ...]
"""A placement's rank; the lower the better: memory beyond what there is, of each device, then busy seconds, both in falling order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move of refinement.

    Attributes:
        operators: of one module, or one without a module.
        source, target: devices. bottleneck, resource: the busiest device before, and what of it was: "cpu", "network" or "memory".
        examples_per_s_before, examples_per_s_after: predicted.
    """

    operators: tuple[str, ...]
    source: str
    target: str
    bottleneck: str
    resource: str
    examples_per_s_before: float
    examples_per_s_after: float


def refine(
    index: Index, group: Group, placed: Sequence[int], *, limit_s: float
) -> tuple[list[int], tuple[Move, ...]]:
    """Moves units until no move lowers the rank of the placement, or time is up.

    Units with parameters move between servers only.

    Args:
        placed: device of each unit.
    """
    ledger = Ledger(index, group, placed)
    until = time.monotonic() + limit_s
    moves: list[Move] = []
    found = exact_loads(index, group, ledger)
    while time.monotonic() < until:
        step = _best_move(index, group, ledger, found, until)
        if step is None:
            break
        unit, source, after = step
        busiest, resource = bottleneck(found)
        moves.append(
            Move(
                operators=index.names(unit),
                source=device_name(source),
                target=device_name(ledger.placed[unit]),
                bottleneck=device_name(busiest),
                resource=resource,
                examples_per_s_before=examples_per_s(found),
                examples_per_s_after=examples_per_s(after),
            )
        )
        found = after
    return ledger.placed, tuple(moves)


def bottleneck(found: Sequence[Load]) -> tuple[int, str]:
    """The device that is used most, and what of it: memory where there is too little of it, else cores or link."""
    fullest = max(range(len(found)), key=lambda device: found[device].memory)
    if found[fullest].memory > 1:
        return fullest, MEMORY
    busiest = max(range(len(found)), key=lambda device: found[device].busy_s)
    load = found[busiest]
    return busiest, CPU if load.cpu_s >= load.network_s else NETWORK


def rank(found: Sequence[Load]) -> Rank:
    """The rank of a placement: all devices count, so that two that are equally busy can be relieved one after the other."""
    beyond = sorted((max(0.0, load.memory - 1) for load in found), reverse=True)
    return (*beyond, *sorted((load.busy_s for load in found), reverse=True))


def lower(one: Rank, other: Rank) -> bool:
    """Whether a rank is below another, in the first place where they differ."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(a, b):
            return a < b
    return False


def _best_move(
    index: Index, group: Group, ledger: Ledger, found: Sequence[Load], until: float
) -> tuple[int, int, list[Load]] | None:
    """Makes the move with the lowest rank, of those that :func:`_offers` has and that lower it.

    They are tried in the order of the rank that they have at least, which is quick to tell.

    Returns:
        The unit, where it came from, and the loads after; None where nothing helps.
    """
    current = rank(found)
    offers = []
    for unit, target in _offers(index, group, ledger, found):
        source = ledger.placed[unit]
        ledger.move(unit, target)
        least = rank(least_loads(group, ledger))
        ledger.move(unit, source)
        if lower(least, current):
            offers.append((least, unit, target))
        if time.monotonic() > until:
            return None
    for _, unit, target in sorted(offers):
        source = ledger.placed[unit]
        ledger.move(unit, target)
        after = exact_loads(index, group, ledger)
        if lower(rank(after), current):
            return unit, source, after
        ledger.move(unit, source)
    return None


def _offers(index: Index, group: Group, ledger: Ledger, found: Sequence[Load]) -> Iterator[tuple[int, int]]:
    """Units of the busiest device, each with the devices that it may go to and that its computation would not make as busy."""
    busiest, resource = bottleneck(found)
    most = found[busiest].busy_s
    for number, unit in enumerate(index.units):
        if ledger.placed[number] != busiest or not unit.movable:
            continue
        for target in range(1 if unit.parameter_bytes else 0, len(group.devices)):
            if target != busiest and (resource == MEMORY or fits_in(ledger, group, number, target, most)):
                yield number, target


def fits_in(ledger: Ledger, group: Group, unit: int, device: int, most_s: float) -> bool:
    """Whether a device would compute less than ``most_s`` per example with one more unit."""
    cores = group.devices[device].cores * (1 if device else group.trainers)
    return (ledger.compute_s[device] + ledger.unit_s[device][unit]) / cores < most_s
