"""Greedy refinement: what is on the busiest device moves off it, while that helps (HT §3.2.1).

A step moves one unit. Where none helps, as where a chain has to be cut in the middle and not at its end, a step is a run: units that are
connected on one device, from one end of their component on.
"""

from __future__ import annotations

import math
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
    """A step of refinement.

    Attributes:
        operators: that moved, with all of their modules.
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


@dataclass(frozen=True, slots=True, order=True)
class _Offer:
    """Units that may move, with the rank that the placement then has at least."""

    least: Rank
    units: tuple[int, ...]
    target: int


def refine(
    index: Index, group: Group, placed: Sequence[int], *, until: float
) -> tuple[list[int], tuple[Move, ...]]:
    """Moves units until no move lowers the rank of the placement, or time is up.

    Units with parameters move between servers only.

    Args:
        placed: device of each unit.
        until: when time is up, by :func:`time.monotonic`.
    """
    search = _Search(index, group, placed, until)
    moves: list[Move] = []
    while search.step(search.single_moves()) or search.step(search.runs()):
        moves.append(search.last)
    return search.ledger.placed, tuple(moves)


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


class _Search:
    """A placement on its way.

    Attributes:
        last: the step that was made last.
    """

    last: Move

    def __init__(self, index: Index, group: Group, placed: Sequence[int], until: float) -> None:
        self._index, self._group, self._until = index, group, until
        self.ledger = Ledger(index, group, placed)
        self._found = exact_loads(index, group, self.ledger)

    def step(self, offers: Iterator[_Offer]) -> bool:
        """Takes the offer with the lowest rank, if it lowers the placement's; tried in the order of the rank that they have at least."""
        current = rank(self._found)
        for offer in sorted(each for each in offers if lower(each.least, current)):
            source = self.ledger.placed[offer.units[0]]
            self._move(offer.units, offer.target)
            after = exact_loads(self._index, self._group, self.ledger)
            if lower(rank(after), current):
                self._note(offer, source, after)
                return True
            self._move(offer.units, source)
        return False

    def single_moves(self) -> Iterator[_Offer]:
        """Each unit of the busiest device to each other device."""
        busiest, resource = bottleneck(self._found)
        most_s = math.inf if resource == MEMORY else self._found[busiest].busy_s
        for unit, device in enumerate(self.ledger.placed):
            if device == busiest:
                for target in self._targets(unit):
                    if self._compute_s(target, unit) < most_s:
                        yield from self._run([unit], target)

    def runs(self) -> Iterator[_Offer]:
        """Each connected component of a device, from either end on, off the busiest device or onto it; of trainers' link, anywhere."""
        busiest, resource = bottleneck(self._found)
        if resource == MEMORY:
            return
        for units in self._connected():
            source = self.ledger.placed[units[0]]
            for target in range(len(self._group.devices)):
                if target != source and (
                    busiest in (source, target) or (busiest == 0 and resource == NETWORK)
                ):
                    can = [unit for unit in units if target in self._targets(unit)]
                    yield from self._run(can, target)
                    yield from self._run(can[::-1], target)

    def _run(self, units: Sequence[int], target: int) -> Iterator[_Offer]:
        """The first unit, the first two, and so on."""
        if not units or time.monotonic() > self._until:
            return
        source = self.ledger.placed[units[0]]
        for number, unit in enumerate(units, start=1):
            self.ledger.move(unit, target)
            yield _Offer(rank(least_loads(self._group, self.ledger)), tuple(units[:number]), target)
        self._move(units, source)

    def _targets(self, unit: int) -> list[int]:
        facts = self._index.units[unit]
        first = 1 if facts.parameter_bytes else 0
        devices = range(first, len(self._group.devices)) if facts.movable else ()
        return [device for device in devices if device != self.ledger.placed[unit]]

    def _compute_s(self, device: int, unit: int) -> float:
        """Seconds per example that a device would compute with one more unit."""
        cores = self._group.devices[device].cores * (1 if device else self._group.trainers)
        return (self.ledger.compute_s[device] + self.ledger.unit_s[device][unit]) / cores

    def _connected(self) -> list[list[int]]:
        """The units that can move, those that are connected on one device together, in the graph's order."""
        index, placed = self._index, self.ledger.placed
        neighbours: list[set[int]] = [set() for _ in index.units]
        for producer, readers in enumerate(index.consumers):
            for consumer in readers:
                one, other = index.unit_of[producer], index.unit_of[consumer]
                if placed[one] == placed[other] and index.units[one].movable and index.units[other].movable:
                    neighbours[one].add(other)
                    neighbours[other].add(one)
        found, seen = [], [not unit.movable for unit in index.units]
        for unit in range(len(index.units)):
            if seen[unit]:
                continue
            seen[unit] = True
            component = [unit]
            for each in component:
                new = [other for other in neighbours[each] if not seen[other]]
                for other in new:
                    seen[other] = True
                component += new
            found.append(sorted(component))
        return found

    def _move(self, units: Sequence[int], target: int) -> None:
        for unit in units:
            self.ledger.move(unit, target)

    def _note(self, offer: _Offer, source: int, after: list[Load]) -> None:
        busiest, resource = bottleneck(self._found)
        self.last = Move(
            operators=tuple(name for unit in sorted(offer.units) for name in self._index.names(unit)),
            source=device_name(source),
            target=device_name(offer.target),
            bottleneck=device_name(busiest),
            resource=resource,
            examples_per_s_before=examples_per_s(self._found),
            examples_per_s_after=examples_per_s(after),
        )
        self._found = after
