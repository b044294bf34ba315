"""The lease of a run directory: which process owns the run, and if this process is alive."""

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
    """The process that owns a run: its launcher, or the trainer if there is no launcher.

    Attributes:
        host, boot: the machine, and the identity of its boot.
        pid, start: the process, and its start in ticks since the boot; "" if the system does not report it.
        segments: prefix of the names of the run's shared memory.
    """

    host: str
    boot: str
    pid: Annotated[int, Bounds(1, (1 << 31) - 1)]
    start: str
    segments: str

    @classmethod
    def of_this_run(cls) -> Lease:
        """Returns the lease of the run that this process trains."""
        pid = os.getppid() if CONTROL in os.environ else os.getpid()
        return cls(socket.gethostname(), _boot(), pid, start_of(pid), owned_by(pid))

    @classmethod
    def read(cls, file: IO[str]) -> Lease | None:
        """Returns the lease in a file; None if there is none, for example after a run that ended normally."""
        file.seek(0)
        try:
            return cls.of(parse(file.read(_MOST_BYTES)))
        except (OSError, ValueError):
            return None

    @classmethod
    def of(cls, tree: object) -> Lease | None:
        """Returns the lease that plain values describe; None if no process of girih writes such a lease.

        The shared memory of a dead run is removed by ``segments``. So only the name that its process gives is accepted.
        """
        try:
            lease: Lease = build(cls, tree, "lease")
        except ConfigError:
            return None
        expected = re.escape(owner_prefix(lease.pid, lease.start))
        if lease.start and not lease.is_of_this_machine:
            expected = (
                re.escape(f"girih-{lease.pid}.{lease.start}.") + "[0-9]*-"
            )  # another machine has other namespaces
        is_own = re.fullmatch(expected, lease.segments) and re.fullmatch("[0-9]*", lease.start)
        return lease if is_own else None

    @classmethod
    def of_run(cls, lock: Path) -> Lease | None:
        """Returns the lease in the lock of a run's directory; None if there is none."""
        try:
            with open_file(lock) as file:
                return cls.of(parse(file.read(_MOST_BYTES)))
        except (UserError, ValueError):
            return None

    def write(self, file: IO[str]) -> None:
        """Replaces the content of a file."""
        file.truncate(0)
        file.write(json.dumps(asdict(self)) + "\n")
        file.flush()

    @property
    def is_of_this_machine(self) -> bool:
        """True if the process ran on this machine since its last boot."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    @property
    def lives(self) -> bool:
        """True if the process is known to be alive. Nothing is known of other machines."""
        return self.is_of_this_machine and self.start != "" and start_of(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
