"""Status files of the processes of a run: each process writes its file every second. ``girih status`` reads all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from girih.config import build
from girih.config.bounds import Finite
from girih.config.train import MetricsOptions
from girih.errors import ConfigError, UserError
from girih.files.sealed import open_file, parse, refusing
from girih.files.whole import write_whole
from girih.processes.segments import start_of, stat_fields
from girih.telemetry.stats import Stats

LIVE, LOGS, TARGETS = "live", "logs", "targets"
"""Directories of a run: status files of its processes, their logs, and the addresses at which they serve metrics."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of a run.

    Attributes:
        incarnation: the number of restarts of this role and index.
    """

    role: str
    index: int
    incarnation: int = 0

    @property
    def file_name(self) -> str:
        """The name of the process's files, without an ending."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class StatusTarget:
    """The run in which a process reports its status. The launcher sends it to the process.

    Attributes:
        run: the absolute path of the run directory. None writes no file.
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
        """Returns the target as JSON, which :meth:`from_hello` reads."""
        run = None if self.run is None else str(self.run)
        return json.dumps({"run": run, "metrics": asdict(self.metrics)})

    @classmethod
    def from_hello(cls, hello: Mapping[str, object]) -> StatusTarget:
        """Reads the target from the launcher's first message to a process.

        If the message has no target, the process writes no status file and serves no metrics.
        """
        place = json.loads(str(hello.get("place") or "{}"))
        run, metrics = place.get("run"), place.get("metrics", {})
        return cls(None if run is None else Path(run), MetricsOptions(**metrics))


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process as its status file describes it.

    Attributes:
        now, then: readings, see :meth:`girih.telemetry.status_file.StatusWriter.read`. ``then`` is older or the same.
        endpoint: the address at which the process serves metrics, or "" if it serves none.
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
        """The role and index, for example ``embedding-server 1``."""
        return f"{self.role} {self.index}"

    def live(self, name: str, default: Any = None) -> Any:
        """Returns the current value of a number that the process reports."""
        return self.now["stats"]["live"].get(name, default)

    def counter(self, name: str) -> int:
        """Returns the current value of a counter."""
        return int(self.now["stats"]["counters"].get(name, 0))

    def per_second(self, name: str) -> float | None:
        """Returns the rate of a number that the process reports, or None if it is unknown."""
        return self._rate(*(reading["stats"]["live"].get(name) for reading in (self.now, self.then)))

    @property
    def cpu_cores(self) -> float | None:
        """The number of cores in use."""
        return self._rate(self.now["cpu_s"], self.then["cpu_s"])

    @property
    def busy(self) -> float | None:
        """The busy share: the part of the time in which the process worked, see :mod:`girih.telemetry.busy`."""
        rate = self._rate(self.now["stats"].get("busy_s"), self.then["stats"].get("busy_s"))
        return None if rate is None else min(1.0, rate)  # the system clock may have been changed

    def _rate(self, now: float | None, then: float | None) -> float | None:
        seconds = self.now["at_s"] - self.then["at_s"]
        if seconds <= 0 or now is None or then is None or now < then:
            return None
        rate: float = (now - then) / seconds
        return rate


def read_all(run: Path) -> list[ProcessStatus]:
    """Reads all status files of a run directory, in the order of their names. Skips damaged files."""
    statuses = []
    for file in sorted((run / LIVE).glob("*.json")):
        # The file disappeared, or another version wrote it.
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
"""The time at which this process loaded girih, in seconds since 1970."""


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, or its peak if the system reports only the peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def cpu_s() -> float:
    """Returns the CPU time of this process in seconds, over all cores."""
    return time.process_time()


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def state_of(pid: int, start: str) -> str:
    """Returns "running", "stopped" (by a signal) or "gone" for a process of this host that began at ``start``."""
    fields = stat_fields(pid)
    if not fields or (start and fields[19] != start) or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


_LOG = logging.getLogger(__name__)
EVERY_S = 1.0
_KEPT = 6  # the number of kept readings; rates compare the newest reading with the oldest


class StatusWriter:
    """A context manager that writes this process's status file every second. Write errors do not end the run.

    Raises:
        ConfigError: metrics cannot be served.
    """

    def __init__(self, who: ProcessId, stats: Stats, place: StatusTarget) -> None:
        self._who, self._stats, self._place = who, stats, place
        self._readings: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._ended = threading.Event()
        self._endpoint: Any = None
        self._file: Path | None = None
        self._target: Path | None = None
        if place.metrics.port is not None:
            from girih.telemetry.prometheus import Endpoint

            self._endpoint = Endpoint(who, place, stats)
            try:
                self._target = self._write_target()
            except BaseException:
                self._endpoint.close()
                raise
        self._thread: threading.Thread | None = None
        if place.run is not None and place.run.is_dir():
            self._file = place.run / LIVE / f"{who.file_name}.json"
            self._thread = threading.Thread(target=self._show, name="girih-show", daemon=True)
            self._thread.start()

    def __enter__(self) -> StatusWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> dict[str, object]:
        """Returns the current numbers of this process: ``at_s``, ``cpu_s``, ``rss_bytes`` and ``stats``."""
        return {
            "at_s": time.time(),
            "cpu_s": cpu_s(),
            "rss_bytes": resident_bytes(),
            "stats": self._stats.reading(),
        }

    def close(self) -> None:
        """Removes the files, so that a process that ended normally does not count as missing."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._endpoint is not None:
            self._endpoint.close()
        for file in (self._file, self._target):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
                if file.parent.parent == self._place.run:
                    with contextlib.suppress(OSError):
                        file.parent.rmdir()  # succeeds for the last process

    def _show(self) -> None:
        facts = {
            **asdict(self._who),
            "pid": os.getpid(),
            "start": start_of(os.getpid()),
            "host": socket.gethostname(),
            "begun_s": BEGUN_S,
            "endpoint": "" if self._endpoint is None else self._endpoint.address,
        }
        while True:
            try:
                self._readings.append(self.read())
            except Exception:  # a source of another module failed; the process continues, and appears silent
                _LOG.exception("cannot read the statistics of this process")
                return
            if self._file is not None:
                shown = {**facts, "now": self._readings[-1], "then": self._readings[0]}
                # The disk may be full, or another process may have just removed the directory. Try again in the next
                # round.
                with contextlib.suppress(OSError):
                    self._file.parent.mkdir(exist_ok=True)
                    write_whole(self._file, json.dumps(shown))
            if self._ended.wait(EVERY_S):
                return

    def _write_target(self) -> Path | None:
        """Writes the address at which metrics are served, for Prometheus's ``file_sd_configs``."""
        directory, run = self._place.targets, self._place.run
        if directory is None:
            return None
        prefix = "" if run is not None and directory == run / TARGETS else f"{self._place.name}-"
        file = directory / f"{prefix}{self._who.file_name}.json"
        labels = {"run": self._place.name, **{name: str(value) for name, value in asdict(self._who).items()}}
        text = json.dumps([{"targets": [self._endpoint.address], "labels": labels}]) + "\n"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process may have removed the directory
                write_whole(file, text)
                return file
            directory.mkdir(exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise ConfigError(
                f"metrics: targets: {directory} cannot be written ({error.strerror}); set another directory"
            ) from None
        return file


def forget(run: Path) -> None:
    """Removes the files of killed processes from a run directory."""
    for name in (LIVE, TARGETS):
        shutil.rmtree(run / name, ignore_errors=True)
