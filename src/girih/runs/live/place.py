"""The place where a process shows itself, and its name there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from girih.config.metrics import MetricsOptions

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
    def from_hello(cls, hello: Mapping[str, Any]) -> StatusTarget:
        """The place that a launcher says first, if it says one."""
        told = json.loads(hello.get("place") or "{}")
        run, metrics = told.get("run"), told.get("metrics", {})
        return cls(None if run is None else Path(run), MetricsOptions(**metrics))
