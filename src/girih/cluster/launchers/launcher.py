"""Interface of launchers: each starts the process of a role somewhere, and gives a handle on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from girih.cluster.options import ClusterOptions
from girih.cluster.roles import RoleName
from girih.telemetry.status_file import StatusTarget


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that a process may use.

    Attributes:
        threads: of OpenMP; None leaves it to the process.
    """

    threads: int | None = 1


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


class Handle(Protocol):
    """One process that was started. Methods may be called from any thread.

    Attributes:
        incarnation: how often this role and index has been restarted; 0 for its first process.
        host: the machine it runs on.
    """

    name: RoleName
    index: int
    incarnation: int
    pid: int
    host: str

    @property
    def pipe(self) -> Messages:
        """To a trainer, whose messages others hear; what a role tells, the handle hears."""
        ...

    @property
    def address(self) -> str:
        """The address at which it listens; "" until it does."""
        ...

    @property
    def recovery_note(self) -> str:
        """A line on the state in which a restarted process found its data; "" if all was whole."""
        ...

    def begin(self, spec: bytes) -> None:
        """Tells the process what it is: a pickled :class:`girih.cluster.roles.Role`; returns at once."""
        ...

    def wait_for_address(self, timeout_s: float | None) -> str:
        """Waits for the address at which the process listens; "" where it ended before, or took too long."""
        ...

    def status(self) -> int | None:
        """With which status it ended, a signal's number below 0; None while it runs."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The same, once it ended or the time is over."""
        ...

    def last_words(self) -> str:
        """Its last words: the error that it sent, or the end of what it printed."""
        ...

    def end(self) -> None:
        """Asks it to end; returns at once."""
        ...

    def kill(self) -> None:
        """Ends it now."""
        ...

    def close(self) -> None:
        """Gives back what the handle of an ended process holds."""
        ...


class Launcher(Protocol):
    """Starts processes of roles. Those must not outlive the process that has the launcher, however that ends."""

    def start(self, name: RoleName, index: int, incarnation: int, resources: Resources) -> Handle:
        """Starts a process, which imports what its role needs and waits for :meth:`Handle.begin`."""
        ...

    def again_with(self, words: Sequence[str]) -> None:
        """Adds words to the command of trainers that come back."""
        ...


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


class Machines(Protocol):
    """The machines of a run, as the launcher has them; to be closed.

    Attributes:
        bind: where this process listens, so that all others reach it.
        segments: begins the names of the run's shared memory.
    """

    bind: str
    segments: str

    def launcher(self, hello: Mapping[str, object]) -> Launcher:
        """Starts processes there, which are told ``hello`` first."""
        ...

    def close(self) -> None:
        """Gives back what was taken."""
        ...
