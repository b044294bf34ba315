"""The status of a run's other processes, for the training log. Status files are up to a second old."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from girih.telemetry.stats import STALENESS
from girih.telemetry.status_file import EVERY_S, ProcessId, ProcessStatus, num_cores, read_all

SILENT_S = 5.0
"""A process that has written nothing for this many seconds counts as not working."""


class PeerStatus:
    """The status of all other processes of a run.

    Args:
        this_process: this process, which is not included.
        unsynchronized: returns whether trainers run at their own pace.
    """

    def __init__(self, run: Path, this_process: ProcessId, unsynchronized: Callable[[], bool]) -> None:
        self._run, self._this_process, self._unsynchronized = run, this_process, unsynchronized
        self._read_s, self._shown = 0.0, list[ProcessStatus]()
        self._counted: dict[str, Counter[int]] = {}

    def resident_bytes(self) -> int:
        """Returns the memory of all other processes in bytes."""
        return sum(shown.now["rss_bytes"] for shown in self._known())

    def staleness(self) -> Counter[int]:
        """Counts the batches of other trainers by staleness, since the last call."""
        new_batches: Counter[int] = Counter()
        for shown in self._known():
            counts = shown.now["stats"]["histograms"].get(STALENESS)
            if counts is not None:
                key = f"{shown.title}, life {shown.incarnation}"
                now = Counter({int(value): times for value, times in counts.items()})
                new_batches += now - self._counted.get(key, Counter())
                self._counted[key] = now
        return new_batches

    def samples_per_s(self, local_rate: float | None) -> float | None:
        """Returns the rate of all trainers.

        If trainers make each step together, the rate is ``local_rate``. Otherwise the rates are added, and a trainer
        with an unknown rate counts with ``local_rate``.
        """
        if local_rate is None or not self._unsynchronized():
            return local_rate
        rates = [
            shown.per_second("examples") for shown in self._known() if shown.role == self._this_process.role
        ]
        known = [rate for rate in rates if rate is not None]
        return local_rate / (1 + len(rates)) * (1 + len(rates) - len(known)) + sum(known)

    def _known(self) -> list[ProcessStatus]:
        now = time.time()
        if now - self._read_s > EVERY_S:
            itself = (self._this_process.role, self._this_process.index)
            self._shown = [
                shown
                for shown in read_all(self._run)
                if (shown.role, shown.index) != itself and now - shown.now["at_s"] < SILENT_S
            ]
            self._read_s = now
        return self._shown


BOTTLENECK: Final = 0.6
"""The smallest busy share of a bottleneck. If no process reaches it, processes alternately wait for each other."""
SPARE_CORES: Final = 0.5
"""A host with fewer free cores than this is full, because one more process would slow down all processes."""


def busy_of(shown: Iterable[ProcessStatus], counts: Mapping[str, int]) -> dict[str, float]:
    """Returns the busy share of the busiest process of each role, or an empty dict if a process has not reported.

    Args:
        counts: the number of processes of each role.
    """
    shares, now = dict[str, list[float]](), time.time()
    for each in shown:
        if each.busy is None or now - each.now["at_s"] > SILENT_S:
            return {}
        shares.setdefault(each.role, []).append(each.busy)
    if {role: len(busy_shares) for role, busy_shares in shares.items()} != dict(counts):
        return {}  # a process has not reported yet, or is still ending
    return {role: max(busy_shares) for role, busy_shares in shares.items()}


def cores_used(shown: Iterable[ProcessStatus]) -> float:
    """Returns the number of cores that the processes use on this host."""
    this_host = socket.gethostname()
    return sum(each.cpu_cores or 0.0 for each in shown if each.host == this_host)


def is_full(used: float) -> bool:
    """Returns whether a host with this number of used cores is full."""
    return used > num_cores() - SPARE_CORES
