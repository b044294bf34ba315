"""Context from which a strategy builds a session: this trainer, its specs, and the processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from girih.comm.group import TrainerGroup
from girih.comm.registry import Registry
from girih.dense.spec import DenseSpec
from girih.runs.stats import Stats
from girih.sparse.spec import SparseSpec


class Processes(Protocol):
    """The processes beside the trainers, as a trainer sees them. Methods are called by all trainers together."""

    @property
    def secret(self) -> bytes:
        """Proves that a peer belongs to the run."""
        ...

    @property
    def registry(self) -> Registry:
        """The registry in which a process that came back is found."""
        ...

    @property
    def segment(self) -> str:
        """Begins the names of shared memory; it is removed with the run."""
        ...

    def host(self, name: str, index: int) -> str:
        """The host address at which a process of a role listens."""
        ...

    def start(self, name: str, roles: Callable[[], Sequence[Any]]) -> tuple[str, ...]:
        """Has rank 0 start the processes of a role; returns where they listen."""
        ...

    def end(self, name: str) -> None:
        """Ends the processes of a role; the run goes on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Live objects of one trainer that are there before its halves.

    Attributes:
        ranks: this trainer among all.
        sparse, dense: what the halves are made of.
        processes: the processes beside the trainers.
        stats: statistics of this process.
    """

    ranks: TrainerGroup
    sparse: SparseSpec
    dense: DenseSpec
    processes: Processes
    stats: Stats
