"""Starts and watches local processes. No process outlives the launching process, whatever the reason for its end."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from girih.cluster.launchers.launcher import Handle, Launcher
from girih.cluster.roles import Hosts, RoleName, host_of
from girih.processes.pipe import CONTROL, Pipe, describe_end, module_command
from girih.telemetry.logs import is_line

LAST_LINES = 12
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", CONTROL)


class LocalProcess(Handle):
    """A process of this host."""

    def __init__(
        self,
        name: RoleName,
        index: int,
        incarnation: int,
        process: subprocess.Popen[bytes],
        errors: IO[bytes] | None,
        pipe: Pipe,
    ) -> None:
        super().__init__(name, index, incarnation, host=socket.gethostname(), pid=process.pid)
        self.pipe: Pipe = pipe
        self._process, self._errors = process, errors
        self._listening.start()

    def status(self) -> int | None:
        """See :class:`Handle`."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See :class:`Handle`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def last_words(self) -> str:
        """See :class:`Handle`."""
        if self.status() is not None:
            self._listening.join(1.0)
        if self._words or self._errors is None:
            return self._words
        try:
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace").strip().splitlines()
        except ValueError:  # closed meanwhile
            return ""
        lines = [line for line in printed if not is_line(line)]
        return "\n".join(lines[-LAST_LINES:])

    def end(self) -> None:
        """See :class:`Handle`. Not for trainers: a trainer would take this for the end of its launcher."""
        if self.name != RoleName.TRAINER:
            self.pipe.end()

    def kill(self) -> None:
        """See :class:`Handle`."""
        self._process.kill()

    def close(self) -> None:
        """See :class:`Handle`."""
        self.pipe.close()
        if self._errors is not None:
            self._errors.close()

    def _listen(self) -> None:
        """Receives the address or the error of a role until it ends."""
        with suppress(EOFError):
            while self.name != RoleName.TRAINER:
                message = self.pipe.receive()
                self._words = message.get("error", self._words)
                if "address" in message:
                    self._take_address(message["address"], message["found"])
        self._address_known.set()


@dataclass
class LocalLauncher(Launcher):
    """Starts processes on this host.

    Attributes:
        hosts: the network namespace of each process; by default this one.
        num_trainers: number of trainers.
        hello: the first message to every process, see :class:`girih.cluster.control.LauncherControl`. Roles read
            from it ``segments``, and ``place``, the target of their status.
    """

    hosts: Hosts = field(default_factory=dict)
    num_trainers: int = field(default=1, kw_only=True)
    hello: Mapping[str, object] = field(default_factory=lambda: {"segments": ""}, kw_only=True)

    def start(
        self,
        name: RoleName,
        index: int,
        incarnation: int,
        threads: int | None,
        *,
        terminal: Sequence[int] | None = None,
        held: int | None = None,
    ) -> LocalProcess:
        """Starts a process. Trainer 0 has the terminal, and all others are silent.

        Args:
            terminal: descriptors for trainer 0's output and errors, instead of the terminal.
            held: a descriptor that the process keeps open to its end, see :func:`girih.processes.segments.hold`.
        """
        host_spec = host_of(self.hosts, name, index)
        pipe, descriptors = Pipe.pair()
        environment = {key: value for key, value in os.environ.items() if key not in RENDEZVOUS}
        environment[CONTROL] = describe_end(*descriptors)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        is_trainer = name == RoleName.TRAINER
        command = module_command("girih.cluster.child", name)
        if is_trainer:
            rank, size = str(index), str(self.num_trainers)
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            command = list(self.command_of(incarnation))
        errors, silent = None, dict[str, Any]()
        if not is_trainer or index:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
            printed = subprocess.DEVNULL if is_trainer else errors
            silent = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
        elif terminal is not None:
            silent = {"stdin": subprocess.DEVNULL, "stdout": terminal[0], "stderr": terminal[1]}
        try:
            process = subprocess.Popen(
                [*host_spec.command, *command],
                env={**environment, **host_spec.environment},
                pass_fds=(*descriptors, *([] if held is None else [held])),
                start_new_session=errors is not None,  # only the owner of the terminal gets its signals
                **silent,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        bind = {"bind": host_spec.host} if self.hosts else {}
        pipe.send({**self.hello, **bind, "incarnation": incarnation})
        return LocalProcess(name, index, incarnation, process, errors, pipe)
