"""Greedy refinement: moves work away from the busiest device as long as that helps (HT §3.2.1).

A step moves one bundle: the operators of a module, or one operator without a module. Sometimes no such step helps, for
example because a chain must be split in the middle. Then a step moves a stretch: connected bundles of one device, from
one end of their component. If memory is too small, a step may also swap two bundles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from girih.planner.operators import DisjointSets
from girih.planner.tagging.group import HierarchicalGroup
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import (
    CPU,
    MEMORY,
    NETWORK,
    Ledger,
    Load,
    examples_per_s,
    shared_s,
)

_TOLERANCE = 1e-9
"""Loads that differ by less than this fraction are equal. Such differences come from sums of floats in different
orders.
"""

SHARED_CORES = "the shared cores"


Burden = tuple[float, ...]
"""The burden of a placement. Lower is better.

The first numbers are the memory overload of each device. The seconds that devices and shared cores are busy follow.
Both are in descending order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A step of refinement.

    Attributes:
        operators: the moved operators, with all operators of their modules.
        source, target: devices.
        bottleneck: the busiest device before the move, or :data:`SHARED_CORES`.
        resource: its busiest resource: "cpu", "network" or "memory". For shared cores, "cpu".
        examples_per_s_before, examples_per_s_after: predicted speeds.
    """

    operators: tuple[str, ...]
    source: str
    target: str
    bottleneck: str
    resource: str
    examples_per_s_before: float
    examples_per_s_after: float


_Moves = tuple[tuple[int, int], ...]
"""Bundles, each with its target device."""
_Offer = tuple[Burden, _Moves]
"""A lower bound of the burden after some moves, and these moves."""


def refine(
    index: Index, group: HierarchicalGroup, placed: Sequence[int], effort: Iterator[object]
) -> tuple[list[int], tuple[Move, ...]]:
    """Moves bundles until no move lowers the burden of the placement, or the effort is used up.

    Bundles with parameters move only between servers.

    Args:
        placed: device of each bundle.
        effort: yields an item for each evaluated placement. Effort is a count, not a time, so that all machines get the
            same result.
    """
    search, moves = _Search(index, group, placed, effort), list[Move]()
    while any(search.step(offers()) for offers in (search.single_moves, search.stretches, search.swaps)):
        moves += search.last
    return search.ledger.placed, tuple(moves)


def bottleneck(loads: Sequence[Load]) -> tuple[int, str]:
    """Returns the most used device, and its most used resource.

    The resource is memory if there is too little of it. Otherwise it is the cores or the link.
    """
    fullest = max(range(len(loads)), key=lambda device: loads[device].memory)
    if loads[fullest].memory > 1:
        return fullest, MEMORY
    busiest = max(range(len(loads)), key=lambda device: loads[device].busy_s)
    load = loads[busiest]
    return busiest, CPU if load.cpu_s >= load.network_s else NETWORK


def burden(group: HierarchicalGroup, loads: Sequence[Load]) -> Burden:
    """Returns the burden of a placement.

    All devices count. So refinement can relieve two equally busy devices, one after the other.
    """
    beyond = sorted((max(0.0, load.memory - 1) for load in loads), reverse=True)
    busy_s = [load.busy_s for load in loads]
    return (*beyond, *sorted((*busy_s, shared_s(group, loads)), reverse=True))


def lower(one: Burden, other: Burden) -> bool:
    """Returns whether a burden is lower than another. The first number that differs decides."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(a, b):
            return a < b
    return False


class _Search:
    """A placement during refinement.

    Attributes:
        last: the last step; for a swap, both moves.
    """

    last: list[Move]

    def __init__(
        self, index: Index, group: HierarchicalGroup, placed: Sequence[int], effort: Iterator[object]
    ) -> None:
        self._index, self._group, self._effort = index, group, effort
        self.ledger = Ledger(index, group, placed)
        self._loads = self.ledger.exact_loads()

    def step(self, offers: Iterator[_Offer]) -> bool:
        """Takes the first offer that lowers the burden, in the order of the offers' lower bounds.

        Returns whether there was one.
        """
        current = burden(self._group, self._loads)
        for _, moves in sorted(each for each in offers if lower(each[0], current)):
            if next(self._effort, None) is None:
                break
            back = tuple((bundle, self.ledger.placed[bundle]) for bundle, _ in moves)
            self._move(moves)
            after = self.ledger.exact_loads()
            if lower(burden(self._group, after), current):
                self._note(moves, back, after)
                return True
            self._move(back)
        return False

    def single_moves(self) -> Iterator[_Offer]:
        """Yields the moves of each bundle on the busiest device to each other device."""
        busiest, _ = bottleneck(self._loads)
        for bundle, device in enumerate(self.ledger.placed):
            if device == busiest:
                for target in self._targets(bundle):
                    yield from self._offers([(bundle, target)])

    def stretches(self) -> Iterator[_Offer]:
        """Yields moves of connected bundles, from either end, away from the busiest device or onto it.

        If the trainers' link is the bottleneck, bundles of any device may move.
        """
        busiest, resource = bottleneck(self._loads)
        if resource == MEMORY:
            return
        for bundles in self._connected():
            source = self.ledger.placed[bundles[0]]
            for target in range(len(self._group.devices)):
                if target != source and (
                    busiest in (source, target) or (busiest == 0 and resource == NETWORK)
                ):
                    moves = [(bundle, target) for bundle in bundles if target in self._targets(bundle)]
                    yield from self._offers(moves)
                    yield from self._offers(moves[::-1])

    def swaps(self) -> Iterator[_Offer]:
        """Yields swaps of two bundles. One is on the device with too little memory, and one is on another device."""
        fullest, resource = bottleneck(self._loads)
        placed = list(self.ledger.placed) if resource == MEMORY else []
        for bundle in [bundle for bundle, device in enumerate(placed) if device == fullest]:
            for other, target in enumerate(placed):
                if target in self._targets(bundle) and fullest in self._targets(other):
                    yield from self._offers([(bundle, target), (other, fullest)], fewest=2)

    def _offers(self, moves: Sequence[tuple[int, int]], fewest: int = 1) -> Iterator[_Offer]:
        """Yields offers that grow by one move each time. The first offer has the first ``fewest`` moves."""
        back = tuple((bundle, self.ledger.placed[bundle]) for bundle, _ in moves)
        for number in range(fewest, len(moves) + 1):
            if next(self._effort, None) is None:
                break
            self._move(moves[number - 1 if number > fewest else 0 : number])
            yield burden(self._group, self.ledger.least_loads()), tuple(moves[:number])
        self._move(back)

    def _targets(self, bundle: int) -> list[int]:
        facts = self._index.bundles[bundle]
        first = 1 if facts.parameter_bytes else 0
        devices = range(first, len(self._group.devices)) if facts.movable else ()
        return [device for device in devices if device != self.ledger.placed[bundle]]

    def _connected(self) -> list[list[int]]:
        """Returns sets of movable bundles that are connected on one device. Bundles are in the graph's order."""
        index, placed = self._index, self.ledger.placed
        movable = [number for number, bundle in enumerate(index.bundles) if bundle.movable]
        sets, members = DisjointSets(movable), frozenset(movable)
        for producer, readers in enumerate(index.consumers):
            one = index.bundle_of[producer]
            for other in (index.bundle_of[consumer] for consumer in readers):
                if placed[one] == placed[other] and one in members and other in members:
                    sets.join(one, other)
        return sets.sets()

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        for bundle, target in moves:
            self.ledger.move(bundle, target)

    def _note(self, moves: _Moves, back: _Moves, after: list[Load]) -> None:
        """Records the moves; moves from one device to another count as one."""
        before, self._loads, self.last = self._loads, after, []
        busiest, resource = bottleneck(before)
        name = device_name(busiest)
        if resource != MEMORY and shared_s(self._group, before) > before[busiest].busy_s:
            name, resource = SHARED_CORES, CPU
        ways: dict[tuple[int, int], list[int]] = {}
        for (bundle, target), (_, source) in zip(moves, back, strict=True):
            ways.setdefault((source, target), []).append(bundle)
        for (source, target), bundles in ways.items():
            move = Move(
                operators=tuple(each for bundle in sorted(bundles) for each in self._index.names(bundle)),
                source=device_name(source),
                target=device_name(target),
                bottleneck=name,
                resource=resource,
                examples_per_s_before=examples_per_s(self._group, after if self.last else before),
                examples_per_s_after=examples_per_s(self._group, after),
            )
            self.last.append(move)
