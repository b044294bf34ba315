"""The lease of a run directory: which process a run belongs to, and whether that one lives."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

from girih.config import build
from girih.config.bounds import Bounds
from girih.errors import ConfigError, UserError
from girih.files.sealed import open_file, parse
from girih.processes.pipe import CONTROL
from girih.processes.segments import owned_by, owner_prefix, start_of

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Lease:
    """The process that has a run: its launcher, or the trainer where there is none.

    Attributes:
        host, boot: the machine, and which of its starts.
        pid, start: the process, and when it began, in ticks since the machine did; "" where the system does not tell.
        segments: begins the names of the run's shared memory.
    """

    host: str
    boot: str
    pid: Annotated[int, Bounds(1, (1 << 31) - 1)]
    start: str
    segments: str

    @classmethod
    def of_this_run(cls) -> Lease:
        """The lease of the run that this process trains."""
        pid = os.getppid() if CONTROL in os.environ else os.getpid()
        return cls(socket.gethostname(), _boot(), pid, start_of(pid), owned_by(pid))

    @classmethod
    def read(cls, file: IO[str]) -> Lease | None:
        """The lease in a file; None where there is none, as after a run that ended by itself."""
        file.seek(0)
        try:
            return cls.of(parse(file.read(_MOST_BYTES)))
        except (OSError, ValueError):
            return None

    @classmethod
    def of(cls, tree: object) -> Lease | None:
        """The lease that plain values describe; None if they describe none that a process of girih writes.

        The shared memory of a dead run is removed by ``segments``, so that only the name that its process gives is believed.
        """
        try:
            lease: Lease = build(cls, tree, "lease")
        except ConfigError:
            return None
        expected = re.escape(owner_prefix(lease.pid, lease.start))
        if lease.start and not lease.is_of_this_machine:
            expected = (
                re.escape(f"girih-{lease.pid}.{lease.start}.") + "[0-9]*-"
            )  # it has namespaces of its own
        is_own = re.fullmatch(expected, lease.segments) and re.fullmatch("[0-9]*", lease.start)
        return lease if is_own else None

    @classmethod
    def of_run(cls, lock: Path) -> Lease | None:
        """The lease in the lock of a run's directory; None where there is none."""
        try:
            with open_file(lock) as file:
                return cls.of(parse(file.read(_MOST_BYTES)))
        except (UserError, ValueError):
            return None

    def write(self, file: IO[str]) -> None:
        """Replaces what is in a file."""
        file.truncate(0)
        file.write(json.dumps(asdict(self)) + "\n")
        file.flush()

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the process lived here since the machine was started."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    @property
    def lives(self) -> bool:
        """Whether the process is known to live; nothing is known of other machines."""
        return self.is_of_this_machine and self.start != "" and start_of(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
