"""Shows a process: has a thread write its file each second, and serves its metrics where that is asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from girih.errors import ConfigError
from girih.files.whole import write_whole
from girih.processes.segments import start_of
from girih.telemetry.stats import Stats
from girih.telemetry.status_file import (
    BEGUN_S,
    LIVE,
    TARGETS,
    ProcessId,
    StatusTarget,
    cpu_s,
    resident_bytes,
)

_LOG = logging.getLogger(__name__)
EVERY_S = 1.0
_KEPT = 6  # readings, from the latest to the one that rates are counted from


class StatusWriter:
    """A context manager; shows this process until it is left. What cannot be written is left out: no run ends for it.

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
        """The numbers of this process now: ``at_s``, ``cpu_s``, ``rss_bytes`` and ``stats``."""
        return {
            "at_s": time.time(),
            "cpu_s": cpu_s(),
            "rss_bytes": resident_bytes(),
            "stats": self._stats.reading(),
        }

    def close(self) -> None:
        """Takes the files away: a process that ended in good order is not missing."""
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
                        file.parent.rmdir()  # the last one does

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
            except Exception:  # a source of somebody's; the process goes on, and seems silent
                _LOG.exception("its numbers cannot be read")
                return
            if self._file is not None:
                shown = {**facts, "now": self._readings[-1], "then": self._readings[0]}
                # on a full disk, and where another process has just taken the directory away, it waits for the next
                with contextlib.suppress(OSError):
                    self._file.parent.mkdir(exist_ok=True)
                    write_whole(self._file, json.dumps(shown))
            if self._ended.wait(EVERY_S):
                return

    def _write_target(self) -> Path | None:
        """Says where metrics are served, for Prometheus's ``file_sd_configs``."""
        directory, run = self._place.targets, self._place.run
        if directory is None:
            return None
        prefix = "" if run is not None and directory == run / TARGETS else f"{self._place.name}-"
        file = directory / f"{prefix}{self._who.file_name}.json"
        labels = {"run": self._place.name, **{name: str(value) for name, value in asdict(self._who).items()}}
        text = json.dumps([{"targets": [self._endpoint.address], "labels": labels}]) + "\n"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has just taken the directory away
                write_whole(file, text)
                return file
            directory.mkdir(exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise ConfigError(
                f"metrics: targets: {directory} cannot be written ({error.strerror}); name another"
            ) from None
        return file


def forget(run: Path) -> None:
    """Takes away what processes that were all killed left in a run directory."""
    for name in (LIVE, TARGETS):
        shutil.rmtree(run / name, ignore_errors=True)
