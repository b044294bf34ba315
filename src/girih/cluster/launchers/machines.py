"""A run to launch, and interface of the machines that it is launched on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from girih.cluster.launchers.launcher import Launcher
from girih.cluster.options import ClusterOptions
from girih.runs.live.place import StatusTarget


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

    def launcher(self, hello: Mapping[str, Any]) -> Launcher:
        """Starts processes there, which are told ``hello`` first."""
        ...

    def close(self) -> None:
        """Gives back what was taken."""
        ...
