"""Facts about a process that the system knows: memory, CPU time, since when it runs, and whether it does."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

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


def start_of(pid: int) -> str:
    """Returns when a process of this host began, as the system says it: its number may be another one's by now; "" where there is none."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def state_of(pid: int, start: str) -> str:
    """ "running", "stopped" by a signal, or "gone"; of a process of this host that began then."""
    fields = _stat(pid)
    if not fields or (start and fields[19] != start) or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on; of systems without it, whether there is such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return []
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return []
    except OSError:
        pass
    return ["R", *[""] * 20]
