"""Local processes: started and watched. None outlives the one that started it, however that ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from girih.cluster.hosts import Hosts, host_of
from girih.cluster.launchers.launcher import Resources
from girih.cluster.pipe import CONTROL, Pipe
from girih.cluster.roles import RoleName, title

LAST_LINES = 12
SEGMENTS, INCARNATION = "GIRIH_SEGMENTS", "GIRIH_INCARNATION"
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", CONTROL)


class LocalProcess:
    """A process of this host; see :class:`girih.cluster.launchers.launcher.Handle`.

    Attributes:
        pipe: to a trainer; roles have their standard input.
    """

    def __init__(
        self,
        name: RoleName,
        index: int,
        incarnation: int,
        process: subprocess.Popen[bytes],
        errors: IO[bytes] | None,
        pipe: Pipe | None = None,
    ) -> None:
        self.name, self.index, self.incarnation = name, index, incarnation
        self.pid, self.host = process.pid, socket.gethostname()
        self.process, self.pipe = process, pipe
        self._errors = errors
        self._address, self._told = "", ""
        self._listening = threading.Thread(target=self._listen, name="girih-role", daemon=True)
        self._heard = threading.Event()
        self._listening.start()

    @property
    def address(self) -> str:
        """See :class:`Handle`."""
        return self._address

    def begin(self, spec: bytes) -> None:
        """See :class:`Handle`."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(len(spec).to_bytes(8, "little") + spec)
                self.process.stdin.flush()

    def wait_for_address(self, timeout_s: float) -> str:
        """See :class:`Handle`."""
        self._heard.wait(timeout_s)
        return self._address

    def status(self) -> int | None:
        """See :class:`Handle`."""
        return self.process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See :class:`Handle`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def last_words(self) -> str:
        """See :class:`Handle`."""
        if self.status() is not None:
            self._listening.join(1.0)
        if self._told or self._errors is None:
            return self._told
        try:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        except ValueError:  # closed meanwhile
            return ""
        return "\n".join(lines[-LAST_LINES:])

    def end(self) -> None:
        """See :class:`Handle`."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """See :class:`Handle`."""
        self.process.kill()

    def close(self) -> None:
        """See :class:`Handle`."""
        self.end()
        if self._errors is not None:
            self._errors.close()
        if self.pipe is not None:
            self.pipe.close()

    def _listen(self) -> None:
        """Hears what a role tells, a JSON object per line, until it ends."""
        if self.process.stdout is not None:
            with self.process.stdout as lines:
                for line in lines:
                    told: dict[str, Any] = json.loads(line)
                    self._told = told.get("error", self._told)
                    self._address = told.get("address", self._address)
                    if self._address:
                        self._heard.set()
        self._heard.set()


class LocalLauncher:
    """Starts processes on this host; see :class:`girih.cluster.launchers.launcher.Launcher`.

    Args:
        hosts: where each process is to run, as network namespaces: by default here.
        segments: begins the names of the run's shared memory.
        trainer: the command of a trainer.
        num_trainers: how many there will be.
        hello: what every trainer learns first, see :class:`girih.cluster.control.LauncherControl`.
    """

    def __init__(
        self,
        hosts: Hosts | None = None,
        *,
        segments: str = "",
        trainer: Sequence[str] = (),
        num_trainers: int = 1,
        hello: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts, self._segments = hosts or {}, segments
        self._trainer, self._num_trainers, self._hello = trainer, num_trainers, dict(hello or {})

    def start(self, name: RoleName, index: int, incarnation: int, resources: Resources) -> LocalProcess:
        """Starts a process; trainer 0 has the terminal, all others are silent."""
        environment = {
            variable: value for variable, value in os.environ.items() if variable not in RENDEZVOUS
        }
        environment |= {SEGMENTS: self._segments, INCARNATION: str(incarnation)}
        if resources.threads is not None:
            environment["OMP_NUM_THREADS"] = str(resources.threads)
        if name == RoleName.TRAINER:
            return self._start_trainer(index, incarnation, environment)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        command = [sys.executable, "-m", "girih.cluster.child", name]
        process = self._spawn(
            name, index, command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        return LocalProcess(name, index, incarnation, process, errors)

    def _start_trainer(self, index: int, incarnation: int, environment: dict[str, str]) -> LocalProcess:
        rank = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(self._num_trainers)}
        pipe, descriptors = Pipe.pair()
        silent: dict[str, Any] = {}
        errors = None
        if index:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
            silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        try:
            environment |= {**rank, CONTROL: ",".join(map(str, descriptors))}
            process = self._spawn(
                RoleName.TRAINER, index, self._trainer, environment, pass_fds=descriptors, **silent
            )  # fmt: skip
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        bind = {"bind": host_of(self._hosts, RoleName.TRAINER, index).host} if self._hosts else {}
        pipe.send({**self._hello, **bind})
        return LocalProcess(RoleName.TRAINER, index, incarnation, process, errors, pipe)

    def _spawn(
        self,
        name: RoleName,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        host_spec = host_of(self._hosts, name, index)
        return subprocess.Popen(
            [*host_spec.command, *command],
            env={**environment, **host_spec.environment},
            start_new_session=title(name, index)
            != "trainer 0",  # the terminal's signals are for the one that has it
            **options,
        )
