"""Status files, by which the processes of a run show themselves: each writes its own once a second, ``girih status`` reads all."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from girih.config import build
from girih.config.bounds import Finite
from girih.config.train import MetricsOptions
from girih.errors import UserError
from girih.files.sealed import open_file, parse, refusing
from girih.processes.segments import stat_fields

LIVE, LOGS, TARGETS = "live", "logs", "targets"
"""Directories of a run: files of its processes, their logs, and where they serve metrics."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of a run.

    Attributes:
        incarnation: how often this role and index has been restarted.
    """

    role: str
    index: int
    incarnation: int = 0

    @property
    def file_name(self) -> str:
        """The name of its files, without an ending."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class StatusTarget:
    """The run that processes show themselves in, as a launcher tells them.

    Attributes:
        run: the run directory, absolute; None writes no file.
    """

    run: Path | None = None
    metrics: MetricsOptions = field(default_factory=MetricsOptions)

    @property
    def name(self) -> str:
        """The run's name, for labels."""
        return "" if self.run is None else self.run.name

    @property
    def targets(self) -> Path | None:
        """The directory of target files."""
        if self.metrics.targets is not None:
            return Path(self.metrics.targets)
        return None if self.run is None else self.run / TARGETS

    def to_text(self) -> str:
        """JSON."""
        run = None if self.run is None else str(self.run)
        return json.dumps({"run": run, "metrics": asdict(self.metrics)})

    @classmethod
    def from_hello(cls, hello: Mapping[str, object]) -> StatusTarget:
        """The place that a launcher says first, if it says one."""
        place = json.loads(str(hello.get("place") or "{}"))
        run, metrics = place.get("run"), place.get("metrics", {})
        return cls(None if run is None else Path(run), MetricsOptions(**metrics))


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process as its file shows it.

    Attributes:
        now, then: readings, see :meth:`girih.telemetry.status_writer.StatusWriter.read`; ``then`` is the older one, or the same.
        endpoint: where it serves metrics; "" where it does not.
    """

    role: str
    index: int
    incarnation: int
    pid: int
    start: str
    host: str
    begun_s: float
    endpoint: str
    now: Mapping[str, Any]
    then: Mapping[str, Any]

    @property
    def title(self) -> str:
        """As ``embedding-server 1``."""
        return f"{self.role} {self.index}"

    def live(self, name: str, default: Any = None) -> Any:
        """A number that the process says, as it is now."""
        return self.now["stats"]["live"].get(name, default)

    def counter(self, name: str) -> int:
        """A counter."""
        return int(self.now["stats"]["counters"].get(name, 0))

    def per_second(self, name: str) -> float | None:
        """Rate of a number that the process says; None where it is unknown."""
        return self._rate(*(reading["stats"]["live"].get(name) for reading in (self.now, self.then)))

    @property
    def cpu_cores(self) -> float | None:
        """Cores in use."""
        return self._rate(self.now["cpu_s"], self.then["cpu_s"])

    @property
    def busy(self) -> float | None:
        """Share of the time in which the process worked, and did not wait for others; see :mod:`girih.telemetry.busy`."""
        rate = self._rate(self.now["stats"].get("busy_s"), self.then["stats"].get("busy_s"))
        return None if rate is None else min(1.0, rate)  # the clock of days may have been set

    def _rate(self, now: float | None, then: float | None) -> float | None:
        seconds = self.now["at_s"] - self.then["at_s"]
        if seconds <= 0 or now is None or then is None or now < then:
            return None
        rate: float = (now - then) / seconds
        return rate


def read_all(run: Path) -> list[ProcessStatus]:
    """All processes that show themselves in a run directory, in the order of their names; a file that is damaged is left out."""
    statuses = []
    for file in sorted((run / LIVE).glob("*.json")):
        # it went meanwhile, or is of another version
        with contextlib.suppress(UserError), open_file(file) as opened, refusing(file, ""):
            shown: ProcessStatus = build(ProcessStatus, parse(opened.read()), "")
            for reading in (shown.now, shown.then):
                build(
                    tuple[Finite, Finite, int], [reading[each] for each in ("at_s", "cpu_s", "rss_bytes")], ""
                )
                for each in ("counters", "histograms", "live"):
                    build(Mapping[str, Any], reading["stats"][each], each)
            statuses.append(shown)
    return sorted(statuses, key=lambda each: (each.role, each.index))


BEGUN_S = time.time()
"""Time at which this process loaded girih, in seconds since 1970."""


def resident_bytes() -> int:
    """Resident memory of this process, in bytes; its peak where the system reports only that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def cpu_s() -> float:
    """Seconds of all cores that this process has used."""
    return time.process_time()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def state_of(pid: int, start: str) -> str:
    """ "running", "stopped" by a signal, or "gone"; of a process of this host that began then."""
    fields = stat_fields(pid)
    if not fields or (start and fields[19] != start) or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"
