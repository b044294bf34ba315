"""What the processes of a run hold while it is on: memory, descriptors and threads, its shared memory, and what it leaves (soak.py)."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.processes.segments import SHARED_MEMORY, owned_by

LAUNCHER, OTHER = "launcher", "other"
CHILD = "girih.cluster.child"
KEY = "GIRIH_CENSUS"


@dataclass(frozen=True, slots=True)
class Held:
    """What one process held at a moment.

    Attributes:
        at_s, age_s: seconds since the census began, and since this process was seen first.
        role: "launcher", a role, or "other".
    """

    at_s: float
    age_s: float
    role: str
    pid: int
    rss_bytes: int
    pss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Files of a run in shared memory at a moment."""

    at_s: float
    num: int
    bytes: int


class Census:
    """Looks at all processes that were started with :attr:`environment`, and by these, whenever it is asked to.

    Attributes:
        environment: to start a run with; a mark in it says whose its processes are.
        held, segments: what was seen.
    """

    def __init__(self) -> None:
        mark = uuid.uuid4().hex
        self.environment = {**os.environ, KEY: mark}
        self.held: list[Held] = []
        self.segments: list[Segments] = []
        self._mark = f"{KEY}={mark}".encode()
        self._begun_s = time.monotonic()
        self._first_s: dict[tuple[int, str], float] = {}  # by pid, and when it began
        self._owner, self._launcher = "", 0
        self._sockets: set[str] = set()

    def now_s(self) -> float:
        """Seconds since the census began."""
        return time.monotonic() - self._begun_s

    def begin(self, launcher: int) -> None:
        """Notes the pid of a run that was started; its shared memory is named after it."""
        self._launcher, self._owner = launcher, owned_by(launcher)

    def is_of_run(self, pid: int | str) -> bool:
        """Whether a process belongs to the run: the number of one that ended may be another one's by now."""
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def take(self) -> None:
        """Looks at all processes, and at shared memory."""
        at_s, inodes = self.now_s(), set[str]()
        for pid in self._pids():
            with suppress(OSError):  # it has ended
                self.held.append(self._look(pid, at_s, inodes))
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and words[6] in inodes:
                self._sockets.add(words[7])
        sizes = []
        for name in self._names_in(SHARED_MEMORY):
            with suppress(OSError):
                sizes.append(512 * os.stat(os.path.join(SHARED_MEMORY, name)).st_blocks)
        self.segments.append(Segments(at_s, len(sizes), sum(sizes)))

    def left(self, within_s: float = 10.0) -> list[str]:
        """Processes, sockets, shared memory and temporary directories that are still there so long after the run ended."""
        until_s = time.monotonic() + within_s
        while (found := self._left()) and time.monotonic() < until_s:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        bound = {
            words[7]
            for line in Path("/proc/net/unix").read_text().splitlines()
            if len(words := line.split()) > 7
        }
        return [
            *(f"process {pid}" for pid in self._pids()),
            *(f"socket {name}" for name in sorted(self._sockets & bound) if "girih" in name),
            *self._names_in(SHARED_MEMORY),
            *self._names_in(tempfile.gettempdir()),
        ]  # fmt: skip

    def _pids(self) -> list[int]:
        return [int(each) for each in os.listdir("/proc") if each.isdigit() and self.is_of_run(each)]

    def _names_in(self, folder: str) -> list[str]:
        return sorted(each for each in os.listdir(folder) if self._owner and each.startswith(self._owner))

    def _look(self, pid: int, at_s: float, inodes: set[str]) -> Held:
        process = Path("/proc", str(pid))
        start = (process / "stat").read_text().rpartition(")")[2].split()[19]
        memory = _fields(process / "smaps_rollup")
        descriptors = os.listdir(process / "fd")
        for number in descriptors:
            with suppress(OSError):
                target = os.readlink(process / "fd" / number)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        return Held(
            at_s,
            at_s - self._first_s.setdefault((pid, start), at_s),
            self._role_of(pid, process),
            pid,
            1024 * int(memory["Rss"].split()[0]),
            1024 * int(memory["Pss"].split()[0]),
            len(descriptors),
            int(_fields(process / "status")["Threads"]),
        )

    def _role_of(self, pid: int, process: Path) -> str:
        if pid == self._launcher:
            return LAUNCHER
        words = (process / "cmdline").read_bytes().decode().split("\0")
        if CHILD in words:
            return words[words.index(CHILD) + 1]
        named = [
            each for each in (process / "environ").read_bytes().split(b"\0") if each.startswith(b"RANK=")
        ]
        return "trainer" if named and "girih" in words else OTHER  # fmt: skip


def _fields(file: Path) -> Mapping[str, Any]:
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs}
