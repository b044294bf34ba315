"""Stops the processes of a stage of ``make gpu``, with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a stage that is stopped."""


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, its group, and descendants in groups of their own: SIGTERM first, SIGKILL after GRACE_S."""
    processes = {process.pid, *descendants(process.pid)}
    running = process.poll() is None
    for number in (signal.SIGTERM, signal.SIGKILL) if running else (signal.SIGKILL,):
        for target in [-process.pid, *(pid for pid in processes if running or pid != process.pid)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target, number)
        if number == signal.SIGTERM:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    process.wait()


def descendants(root: int) -> set[int]:
    """Process ids of children, their children, and so on; Linux only, empty elsewhere."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found: set[int] = set()
    pending = [root]
    while pending:
        pending += children.get(pending.pop(), [])
        found |= set(pending)
    return found
