"""The number of processes that a run should have, by how much of their time they work: what ``girih status`` shows.

One more of a role where it is the bottleneck and works nearly all of the time, one fewer where the others would have enough to do.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from girih.cluster.options import Bounded
from girih.runs.live.others import SILENT_S
from girih.runs.live.reading import read_all

LOOKS: Final = 3
"""So many looks in a row must say the same."""
BUSY: Final = 0.8
"""A bottleneck that works this share of the time gets one more of its kind."""
IDLE: Final = 0.5
"""One of a role goes where the others would work less than this."""

Wanted = tuple[str, int, str]
"""A role, how many of it there should be, and why."""


class Autoscaler:
    """Looks at the processes of a run, and says what to change.

    Args:
        ranges: role → how few and how many there may be.
        every_s: a change needs :data:`LOOKS` looks, which take so long.
    """

    def __init__(self, run: Path, ranges: Mapping[str, Bounded], every_s: float) -> None:
        self._run, self._ranges, self._pause_s = run, ranges, every_s / LOOKS
        self._looks: deque[Wanted | None] = deque(maxlen=LOOKS)
        self._next_s = time.monotonic() + self._pause_s

    def wanted(self, counts: Mapping[str, int]) -> Wanted | None:
        """What to change now, if anything; quick where it is not time to look.

        Args:
            counts: role → processes that there are.
        """
        now = time.monotonic()
        if now < self._next_s:
            return None
        self._next_s = now + self._pause_s
        found = decided(loads_of(self._run, counts), counts, self._ranges)
        self._looks.append(found)
        if found is None or len({None if each is None else each[:2] for each in self._looks}) > 1:
            return None
        if len(self._looks) < LOOKS:
            return None
        self._looks.clear()
        return found


def decided(
    loads: Mapping[str, float], counts: Mapping[str, int], ranges: Mapping[str, Bounded]
) -> Wanted | None:
    """The change that loads ask for; None where all is well, or nothing is known.

    Args:
        loads: role → the share of the time in which its processes work, on average.
    """
    for role, allowed in ranges.items():
        count = min(max(counts[role], allowed.floor), allowed.ceiling)
        if count != counts[role]:
            return role, count, f"{allowed.floor} to {allowed.ceiling} are to be there"
    if not loads:
        return None
    busiest = max(loads, key=lambda role: loads[role])
    may_grow = busiest in ranges and counts[busiest] < ranges[busiest].ceiling
    if may_grow and loads[busiest] >= BUSY:
        return busiest, counts[busiest] + 1, _told(busiest, loads)
    for role in sorted(ranges, key=lambda role: loads.get(role, 1.0)):
        rest = counts[role] - 1
        if role in loads and rest >= ranges[role].floor and loads[role] * counts[role] / rest < IDLE:
            return role, rest, _told(role, loads)
    return None


def loads_of(run: Path, counts: Mapping[str, int]) -> dict[str, float]:
    """The loads of all roles, see :func:`decided`; empty where a process does not say its own."""
    now, shares = time.time(), defaultdict[str, list[float]](list)
    for shown in read_all(run):
        if shown.busy is None or now - shown.now["at_s"] > SILENT_S:
            return {}
        shares[shown.role].append(shown.busy)
    if {role: len(each) for role, each in shares.items()} != dict(counts):
        return {}  # one has not shown itself yet, or has not gone
    return {role: sum(each) / len(each) for role, each in shares.items()}


def _told(role: str, loads: Mapping[str, float]) -> str:
    return f"each {role} works {loads[role]:.0%} of the time"
