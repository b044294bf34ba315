"""Files in which the processes of a run show themselves: written by each about once a second, read by anybody.

``live/<role>-<index>.json`` holds who the process is, and two readings of its numbers: the latest, and one some seconds older,
so that whoever reads it knows rates at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.config import build
from girih.config.bounds import Finite
from girih.errors import UserError
from girih.runs.live.place import LIVE
from girih.runs.sealed import open_file, parse, refusing


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process as its file shows it.

    Attributes:
        now, then: readings, see :meth:`girih.runs.live.shower.Shower.read`; ``then`` is the older one, or the same.
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
        return self._rate(lambda reading: reading["stats"]["live"].get(name))

    @property
    def cpu_cores(self) -> float | None:
        """Cores in use."""
        return self._rate(lambda reading: reading["cpu_s"])

    @property
    def busy(self) -> float | None:
        """Share of the time in which the process worked, and did not wait for others; see :mod:`girih.runs.busy`."""
        rate = self._rate(lambda reading: reading["stats"].get("busy_s"))
        return None if rate is None else min(1.0, rate)  # the clock of days may have been set

    def _rate(self, value: Any) -> float | None:
        seconds = self.now["at_s"] - self.then["at_s"]
        now, then = value(self.now), value(self.then)
        if seconds <= 0 or now is None or then is None or now < then:
            return None
        rate: float = (now - then) / seconds
        return rate


def read_all(run: Path) -> list[ProcessStatus]:
    """All processes that show themselves in a run directory, in the order of their names; a file that is damaged is left out."""
    found = []
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
            found.append(shown)
    return sorted(found, key=lambda each: (each.role, each.index))
