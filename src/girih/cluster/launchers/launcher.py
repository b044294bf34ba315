"""Interface of launchers: each starts the process of a role somewhere, and gives a handle on it."""

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
        """Sends a message; silently where nobody reads any more."""
        ...

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            EOFError: the other side is gone.
        """
        ...


class Handle(ABC):
    """One process that was started. Methods may be called from any thread.

    Attributes:
        key: role and index. title: as ``embedding-server 1``.
        incarnation: how often this role and index has been restarted; 0 for its first process.
        pid, host: its number, and the machine it runs on.
        pipe: to the process. A trainer's messages are for others; the handle hears those of a role.
        address: where it listens; "" until it does.
        recovery_note: a line on the state in which a restarted process found its data; "" if all was whole.
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
        """Tells the process what it is: a pickled :class:`girih.comm.service.Service`; returns at once."""
        self.pipe.send({"role": as_text(spec)})

    def wait_for_address(self, timeout_s: float | None) -> str:
        """Waits for the address at which the process listens; "" where it ended before, or took too long."""
        self._address_known.wait(timeout_s)
        return self.address

    def _take_address(self, address: str, recovery_note: str) -> None:
        self.recovery_note, self.address = recovery_note, address
        self._address_known.set()

    @abstractmethod
    def _listen(self) -> None:
        """Hears of the process until it ends."""

    @abstractmethod
    def status(self) -> int | None:
        """With which status it ended, a signal's number below 0; None while it runs."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """The same, once it ended or the time is over."""

    @abstractmethod
    def last_words(self) -> str:
        """Its last words: the error that it sent, or the end of what it printed."""

    @abstractmethod
    def end(self) -> None:
        """Asks it to end; returns at once. A trainer ends by itself."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it now."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the handle of an ended process holds."""


@dataclass(kw_only=True)
class Launcher(ABC):
    """Starts processes of roles. Those must not outlive the process that has the launcher, however that ends.

    Attributes:
        trainer: the command of a trainer.
        again: that of one that comes back, which goes on from the last checkpoint.
    """

    trainer: Sequence[str] = ()
    again: Sequence[str] = ()

    @abstractmethod
    def start(self, name: RoleName, index: int, incarnation: int, threads: int | None) -> Handle:
        """Starts a process, which imports what its role needs and waits for :meth:`Handle.begin`.

        Args:
            threads: of OpenMP; None leaves it to the process.
        """

    def command_of(self, incarnation: int) -> Sequence[str]:
        """The command of a trainer in one of its lives."""
        return self.again if incarnation else self.trainer

    def again_with(self, words: Sequence[str]) -> None:
        """Adds words to the command of trainers that come back."""
        self.again = [*self.again, *words]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run to launch.

    Attributes:
        command: the words of ``girih`` that make a trainer. again: those of one that goes on from the last checkpoint.
        counts: role → processes, ``trainer`` among them.
        outliving: roles that trainers find as they were when they begin anew from a checkpoint.
        newest: the name of the last checkpoint; None while there is none.
        run: its directory. place: where its processes show themselves.
        checkpoints_elsewhere: whether checkpoints are not written into it.
        on_gpus: whether trainers compute there.
        one_host: the option that keeps all processes on one host, as it would be named to the user; "" where none does.
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
"""The host at which the launcher listens, and the beginning of the names of shared memory → what processes are told first."""
