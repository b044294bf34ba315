"""The sparse half: it owns the rows.

    batch ──► SPARSE HALF ──── embeddings ────► DENSE HALF ──► loss
                 ▲            (the cut)            │
                 └──────── their gradients ◄───────┘

A half keeps no state about a batch: what belongs to a batch lives on the handle that :meth:`SparseHalf.pull` returned,
so several batches may be in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from girih.checkpoint.save import SavedRows
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch
from girih.models.embeddings import Embeddings
from girih.publishing.segment import PublishedRows
from girih.telemetry.stats import LiveNumber, StatsSnapshot


class Pending(Protocol):
    """An update on its way."""

    def done(self) -> bool:
        """Whether it is applied, or failed."""
        ...

    def wait(self) -> None:
        """Blocks until it is applied."""
        ...


class Pulled(Protocol):
    """The embeddings of one batch, on their way, and the way back of their gradients.

    Attributes:
        staleness: earlier batches of this trainer whose gradients were not applied when these rows were read;
            known once they are here.
    """

    staleness: int

    def wait(self, examples: slice | None = None) -> Embeddings:
        """Blocks until they are here; the packed tensors are leaves that collect gradients.

        Args:
            examples: only those of a micro-batch; all where None.
        """
        ...

    def push(self, step: int, lr_scale: float, vote: Vote) -> Pending:
        """Casts the vote on a step, and starts to apply the gradients that were collected, or none if the step is refused.

        Called once, for all micro-batches together. A gradient that is NaN or infinite refuses the step.

        Args:
            step: number of this update, from 1 on.
            lr_scale: multiplies the sparse learning rates.
            vote: of the dense half; it learns what the rows refuse and count.
        """
        ...

    def discard(self) -> Pending:
        """Lets go of a batch that was pulled ahead and will not be trained on."""
        ...


@dataclass(frozen=True)
class SparseStats:
    """Statistics of a sparse half, summed over all processes that hold rows.

    Attributes:
        store: rows, hits, new, refused, evicted, dropped gradients and the like: see ``Store.counters``.
        rows: rows of each table.
        processes: title of a process behind this half → its ``Stats.snapshot``.
        balance: ``asked_keys`` and ``paced_keys`` of all trainers together, see :mod:`girih.telemetry.stats`; empty where nobody
            counts them.
        features: ids of each feature, see :class:`girih.sparse.groups.group.FeatureCounts`; empty if nobody counts them.
    """

    store: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, StatsSnapshot] = field(default_factory=dict)
    balance: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, int]:
        """Counters of a log of steps: ``store`` and ``balance``."""
        return {**self.store, **self.balance}


class SparseHalf(SavedRows, PublishedRows, Protocol):
    """Owns the rows. All methods but ``pull`` and ``peek`` are called by all trainers, in the same order."""

    def prepare(self, batch: Batch) -> object:
        """Starts what depends on a batch's ids alone: it is done beside whatever comes next.

        Returns:
            What :meth:`pull` takes; to let go of it, drop it. No row is made or marked by it.
        """
        ...

    def pull(self, batch: Batch, prepared: object = None) -> Pulled:
        """Starts to read a batch's rows for training: new keys get rows, used rows are marked used.

        Args:
            prepared: what :meth:`prepare` returned for this batch; the rows are the same without it.
        """
        ...

    def peek(self, batch: Batch) -> Pulled:
        """Reads for evaluation: no new rows, no mark of use."""
        ...

    def sync(self) -> None:
        """Returns when everything that this trainer sent is applied."""
        ...

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Statistics so far; with the spans of the processes behind this half, where they are asked for."""
        ...

    def live(self) -> Mapping[str, LiveNumber]:
        """Numbers of this process for :meth:`girih.telemetry.stats.Stats.watch`; asks no other process."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...
