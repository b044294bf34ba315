"""Interface of launchers: each starts the process of a role somewhere, and returns a handle for it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from girih.cluster.options import ClusterOptions
from girih.cluster.roles import RoleName, title
from girih.processes.pipe import as_text
from girih.telemetry.status_file import StatusTarget


class Messages(Protocol):
    """The launcher's end of a pipe to a process; see :class:`girih.processes.pipe.Pipe`."""

    def send(self, message: dict[str, object]) -> None:
        """Sends a message. Does nothing if nobody reads any more."""
        ...

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            EOFError: the other side is gone.
        """
        ...


class Handle(ABC):
    """One process that was started. Any thread may call the methods.

    Attributes:
        key: role and index. title: for example ``embedding-server 1``.
        incarnation: the number of restarts of this role and index; 0 for its first process.
        pid, host: its process id, and its machine.
        pipe: connects to the process. The handle reads a role's messages, but not a trainer's.
        address: the address at which it listens; "" before it listens.
        recovery_note: a line that describes the data that a restarted process found. "" if the data were complete.
    """

    pipe: Messages

    def __init__(self, name: RoleName, index: int, incarnation: int, *, host: str, pid: int = 0) -> None:
        self.name, self.index, self.incarnation = name, index, incarnation
        self.key, self.title = (name, index), title(name, index)
        self.pid, self.host = pid, host
        self.address = self.recovery_note = self._words = ""
        self._address_known = threading.Event()
        self._listening = threading.Thread(target=self._listen, name="girih-role", daemon=True)

    def begin(self, spec: bytes) -> None:
        """Sends the process its role, a pickled :class:`girih.comm.service.Service`; returns at once."""
        self.pipe.send({"role": as_text(spec)})

    def wait_for_address(self, timeout_s: float | None) -> str:
        """Waits for the process's address. Returns "" if the process ended before, or took too long."""
        self._address_known.wait(timeout_s)
        return self.address

    def _take_address(self, address: str, recovery_note: str) -> None:
        self.recovery_note, self.address = recovery_note, address
        self._address_known.set()

    @abstractmethod
    def _listen(self) -> None:
        """Receives messages of the process until it ends."""

    @abstractmethod
    def status(self) -> int | None:
        """Returns its exit status; -N if signal N ended it; None while it runs."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the process ends or the time is over, and returns its status."""

    @abstractmethod
    def last_words(self) -> str:
        """Returns its last words: the error that it sent, or the end of its output."""

    @abstractmethod
    def end(self) -> None:
        """Asks the process to end, and returns at once. A trainer ends by itself."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process immediately."""

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of an ended process's handle."""


@dataclass(kw_only=True)
class Launcher(ABC):
    """Starts processes of roles. They must not outlive the process with the launcher, however it ends.

    Attributes:
        trainer: the command of a trainer.
        again: the command of a restarted trainer, which continues from the last checkpoint.
    """

    trainer: Sequence[str] = ()
    again: Sequence[str] = ()

    @abstractmethod
    def start(self, name: RoleName, index: int, incarnation: int, threads: int | None) -> Handle:
        """Starts a process, which imports the modules of its role and waits for :meth:`Handle.begin`.

        Args:
            threads: OpenMP threads; None leaves it to the process.
        """

    def command_of(self, incarnation: int) -> Sequence[str]:
        """Returns the command of a trainer for an incarnation."""
        return self.again if incarnation else self.trainer

    def again_with(self, words: Sequence[str]) -> None:
        """Adds words to the command of restarted trainers."""
        self.again = [*self.again, *words]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run to launch.

    Attributes:
        command: the words of the ``girih`` command of a trainer.
        again: the words for a trainer that continues from the last checkpoint.
        counts: role → processes, including ``trainer``.
        outliving: roles that keep their state while trainers restart from a checkpoint.
        newest: returns the name of the last checkpoint; None if there is none.
        run: the run directory.
        place: the place to which its processes write their status.
        checkpoints_elsewhere: True if checkpoints are not in the run's directory.
        on_gpus: True if trainers compute on GPUs.
        one_host: the option that keeps all processes on one host, as the user writes it; "" if there is none.
        environment: variables that the run's config names.
    """

    command: Sequence[str]
    again: Sequence[str]
    counts: Mapping[str, int]
    options: ClusterOptions
    outliving: Collection[str] = ()
    newest: Callable[[], str | None] = lambda: None
    run: Path = Path()
    place: StatusTarget = field(default_factory=StatusTarget)
    checkpoints_elsewhere: bool = False
    on_gpus: bool = False
    one_host: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


HelloOf = Callable[[str, str], Mapping[str, object]]
"""Returns the first message to processes, for the launcher's host and the prefix of the names of shared memory."""
