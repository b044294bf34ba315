"""Limits of a run, as the files of its processes show them: the role that is busiest, and the cores that are left."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from typing import Final

from girih.runs.live.others import SILENT_S
from girih.runs.live.process import num_cores
from girih.runs.live.reading import ProcessStatus

BOTTLENECK: Final = 0.6
"""The busiest process is what a run waits for where it works this share of the time; where none does, they wait for each other in turn."""
SPARE_CORES: Final = 0.5
"""A host with less than this is full: one more process would take its time from others."""


def busy_of(shown: Iterable[ProcessStatus], counts: Mapping[str, int]) -> dict[str, float]:
    """Role → the busy share of its busiest process, which the others of a run wait for; empty where a process does not show its own.

    Args:
        counts: role → processes that there are.
    """
    shares, now = dict[str, list[float]](), time.time()
    for each in shown:
        if each.busy is None or now - each.now["at_s"] > SILENT_S:
            return {}
        shares.setdefault(each.role, []).append(each.busy)
    if {role: len(found) for role, found in shares.items()} != dict(counts):
        return {}  # one has not shown itself yet, or has not gone
    return {role: max(found) for role, found in shares.items()}


def cores_used(shown: Iterable[ProcessStatus]) -> float:
    """Cores of this host that processes use."""
    here = socket.gethostname()
    return sum(each.cpu_cores or 0.0 for each in shown if each.host == here)


def is_full(used: float) -> bool:
    """Whether this host, with so many cores in use, has none to spare."""
    return used > num_cores() - SPARE_CORES
