"""Greedy refinement: what is on the busiest device moves off it, while that helps (HT §3.2.1).

A step moves one bundle: the operators of a module, or one that has none. Where no such step helps, as where a chain is to part in the middle, a
step moves a stretch: bundles that are connected on one device, from one end of their component on. Where memory is too small for what is
there, a step may also have two bundles change places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from girih.planner.tagging.group import HierarchicalGroup
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
    shared_s,
)

_TOLERANCE = 1e-9
"""Relative differences below which two loads are the same: sums of floats that were added up in another order."""

SHARED_CORES = "the shared cores"


Burden = tuple[float, ...]
"""A placement's burden; the lower the better: memory beyond what there is, of each device, then busy seconds of devices and of the cores that
they share, both in falling order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A step of refinement.

    Attributes:
        operators: that moved, with all of their modules.
        source, target: devices. bottleneck, resource: the busiest device before, and what of it was: "cpu", "network" or "memory"; or
            :data:`SHARED_CORES` and "cpu".
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
class _BundleMove:
    """Bundles that may move, with the burden that the placement then has at least; ``back`` go the other way."""

    least: Burden
    bundles: tuple[int, ...]
    target: int
    back: tuple[int, ...] = ()


def refine(
    index: Index, group: HierarchicalGroup, placed: Sequence[int], effort: Iterator[object]
) -> tuple[list[int], tuple[Move, ...]]:
    """Moves bundles until no move lowers the burden of the placement, or the effort is spent.

    Bundles with parameters move between servers only.

    Args:
        placed: device of each bundle.
        effort: has an item for each placement that may be looked at: a number and not a time, so that all machines find the same.
    """
    search = _Search(index, group, placed, effort)
    moves: list[Move] = []
    while any(search.step(offers()) for offers in (search.single_moves, search.stretches, search.swaps)):
        moves += search.last
    return search.ledger.placed, tuple(moves)


def bottleneck(loads: Sequence[Load]) -> tuple[int, str]:
    """The device that is used most, and what of it: memory where there is too little of it, else cores or link."""
    fullest = max(range(len(loads)), key=lambda device: loads[device].memory)
    if loads[fullest].memory > 1:
        return fullest, MEMORY
    busiest = max(range(len(loads)), key=lambda device: loads[device].busy_s)
    load = loads[busiest]
    return busiest, CPU if load.cpu_s >= load.network_s else NETWORK


def burden(group: HierarchicalGroup, loads: Sequence[Load]) -> Burden:
    """The burden of a placement: all devices count, so that two that are equally busy can be relieved one after the other."""
    beyond = sorted((max(0.0, load.memory - 1) for load in loads), reverse=True)
    busy_s = [load.busy_s for load in loads]
    return (*beyond, *sorted((*busy_s, shared_s(group, loads)), reverse=True))


def lower(one: Burden, other: Burden) -> bool:
    """Whether a burden is below another, in the first place where they differ."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(a, b):
            return a < b
    return False


class _Search:
    """A placement on its way.

    Attributes:
        last: the step that was made last; of a swap, both moves.
    """

    last: tuple[Move, ...]

    def __init__(
        self, index: Index, group: HierarchicalGroup, placed: Sequence[int], effort: Iterator[object]
    ) -> None:
        self._index, self._group, self._effort = index, group, effort
        self.ledger = Ledger(index, group, placed)
        self._loads = exact_loads(index, group, self.ledger)

    def step(self, offers: Iterator[_BundleMove]) -> bool:
        """Takes the offer with the lowest burden, if it lowers the placement's; tried in the order of the burden that they have at least."""
        current = burden(self._group, self._loads)
        for offer in sorted(each for each in offers if lower(each.least, current)):
            if next(self._effort, None) is None:
                break
            source = self.ledger.placed[offer.bundles[0]]
            self._move(offer.bundles, offer.target)
            self._move(offer.back, source)
            after = exact_loads(self._index, self._group, self.ledger)
            if lower(burden(self._group, after), current):
                self._note(offer, source, after)
                return True
            self._move(offer.back, offer.target)
            self._move(offer.bundles, source)
        return False

    def single_moves(self) -> Iterator[_BundleMove]:
        """Each bundle of the busiest device to each other device."""
        busiest, resource = bottleneck(self._loads)
        most_s = math.inf if resource == MEMORY else self._loads[busiest].busy_s
        for bundle, device in enumerate(self.ledger.placed):
            if device == busiest:
                for target in self._targets(bundle):
                    if self._compute_s(target, bundle) < most_s:
                        yield from self._stretch([bundle], target)

    def stretches(self) -> Iterator[_BundleMove]:
        """Each connected component of a device, from either end on, off the busiest device or onto it; of trainers' link, anywhere."""
        busiest, resource = bottleneck(self._loads)
        if resource == MEMORY:
            return
        for bundles in self._connected():
            source = self.ledger.placed[bundles[0]]
            for target in range(len(self._group.devices)):
                if target != source and (
                    busiest in (source, target) or (busiest == 0 and resource == NETWORK)
                ):
                    can = [bundle for bundle in bundles if target in self._targets(bundle)]
                    yield from self._stretch(can, target)
                    yield from self._stretch(can[::-1], target)

    def swaps(self) -> Iterator[_BundleMove]:
        """Each bundle of the device with too little memory for a bundle of another one."""
        fullest, resource = bottleneck(self._loads)
        if resource != MEMORY:
            return
        placed = self.ledger.placed
        for bundle in [bundle for bundle, device in enumerate(placed) if device == fullest]:
            for other, target in enumerate(list(placed)):
                if target in self._targets(bundle) and fullest in self._targets(other):
                    if next(self._effort, None) is None:
                        return
                    self._move([bundle], target)
                    self._move([other], fullest)
                    least = burden(self._group, least_loads(self._group, self.ledger))
                    yield _BundleMove(least, (bundle,), target, (other,))
                    self._move([other], target)
                    self._move([bundle], fullest)

    def _stretch(self, bundles: Sequence[int], target: int) -> Iterator[_BundleMove]:
        """The first bundle, the first two, and so on."""
        if not bundles:
            return
        source = self.ledger.placed[bundles[0]]
        for number, bundle in enumerate(bundles, start=1):
            if next(self._effort, None) is None:
                break
            self.ledger.move(bundle, target)
            yield _BundleMove(
                burden(self._group, least_loads(self._group, self.ledger)), tuple(bundles[:number]), target
            )
        self._move(bundles, source)

    def _targets(self, bundle: int) -> list[int]:
        facts = self._index.bundles[bundle]
        first = 1 if facts.parameter_bytes else 0
        devices = range(first, len(self._group.devices)) if facts.movable else ()
        return [device for device in devices if device != self.ledger.placed[bundle]]

    def _compute_s(self, device: int, bundle: int) -> float:
        """Seconds per example that a device would compute with one more bundle."""
        cores = self._group.devices[device].cores * (1 if device else self._group.trainers)
        return (self.ledger.compute_s[device] + self.ledger.bundle_s[device][bundle]) / cores

    def _connected(self) -> list[list[int]]:
        """The bundles that can move, those that are connected on one device together, in the graph's order."""
        index, placed = self._index, self.ledger.placed
        neighbours: list[set[int]] = [set() for _ in index.bundles]
        for producer, readers in enumerate(index.consumers):
            for consumer in readers:
                one, other = index.bundle_of[producer], index.bundle_of[consumer]
                if (
                    placed[one] == placed[other]
                    and index.bundles[one].movable
                    and index.bundles[other].movable
                ):
                    neighbours[one].add(other)
                    neighbours[other].add(one)
        components, seen = [], [not bundle.movable for bundle in index.bundles]
        for bundle in range(len(index.bundles)):
            if seen[bundle]:
                continue
            seen[bundle] = True
            component = [bundle]
            for each in component:
                new = [other for other in neighbours[each] if not seen[other]]
                for other in new:
                    seen[other] = True
                component += new
            components.append(sorted(component))
        return components

    def _move(self, bundles: Sequence[int], target: int) -> None:
        for bundle in bundles:
            self.ledger.move(bundle, target)

    def _note(self, offer: _BundleMove, source: int, after: list[Load]) -> None:
        before = self._loads
        self.last = (self._moved(offer.bundles, source, offer.target, before, after),)
        if offer.back:
            self.last += (self._moved(offer.back, offer.target, source, after, after),)
        self._loads = after

    def _moved(
        self, bundles: Sequence[int], source: int, target: int, before: list[Load], after: list[Load]
    ) -> Move:
        busiest, resource = bottleneck(self._loads)
        busiest_name = device_name(busiest)
        if resource != MEMORY and shared_s(self._group, self._loads) > self._loads[busiest].busy_s:
            busiest_name, resource = SHARED_CORES, CPU
        return Move(
            operators=tuple(name for bundle in sorted(bundles) for name in self._index.names(bundle)),
            source=device_name(source),
            target=device_name(target),
            bottleneck=busiest_name,
            resource=resource,
            examples_per_s_before=examples_per_s(self._group, before),
            examples_per_s_after=examples_per_s(self._group, after),
        )
