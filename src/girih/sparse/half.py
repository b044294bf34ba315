"""The protocol of the sparse half, which owns the rows.

    batch ──► SPARSE HALF ──── embeddings ────► DENSE HALF ──► loss
                 ▲            (the cut)            │
                 └──────── their gradients ◄───────┘

A half keeps no state of a batch. The handle that :meth:`SparseHalf.pull` returns holds this state, so several batches
may be in flight.
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
    """An update that may not be applied yet."""

    def done(self) -> bool:
        """Returns whether the update is applied or has failed."""
        ...

    def wait(self) -> None:
        """Blocks until the update is applied."""
        ...


class Pulled(Protocol):
    """The handle of one batch: receives its embeddings, and sends their gradients.

    Attributes:
        staleness: the number of earlier batches of this trainer whose gradients were not applied when these rows were
            read. Known after :meth:`wait`.
    """

    staleness: int

    def wait(self, examples: slice | None = None) -> Embeddings:
        """Blocks until the embeddings have arrived, and returns them. Their tensors are leaves that collect gradients.

        Args:
            examples: the examples of a micro-batch. None takes all examples.
        """
        ...

    def push(self, step: int, lr_scale: float, vote: Vote) -> Pending:
        """Votes on a step, and starts to apply the collected gradients unless the step is refused.

        Called once for all micro-batches. The half refuses the step if a gradient is NaN or infinite.

        Args:
            step: number of this update, from 1 on.
            lr_scale: multiplies the sparse learning rates.
            vote: the vote of the dense half. The sparse half adds its own result and its counts.
        """
        ...

    def discard(self) -> Pending:
        """Drops a batch that was pulled ahead and will not be trained on."""
        ...


@dataclass(frozen=True)
class SparseStats:
    """Statistics of a sparse half, summed over all processes that hold rows.

    Attributes:
        store: counts of rows, hits, new, refused and evicted rows, dropped gradients and more: see ``Store.counters``.
        rows: the number of rows of each table.
        processes: title of a process that serves this half → its ``Stats.snapshot``.
        balance: the sums of ``asked_keys`` and ``paced_keys`` over all trainers, see :mod:`girih.telemetry.stats`.
            Empty if the half does not count them.
        features: the ids of each feature, see :class:`girih.sparse.groups.group.FeatureCounts`. Empty if the half does
            not count them.
    """

    store: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, StatsSnapshot] = field(default_factory=dict)
    balance: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the log of steps: ``store`` and ``balance``."""
        return {**self.store, **self.balance}


class SparseHalf(SavedRows, PublishedRows, Protocol):
    """Owns the rows. All trainers call all methods except ``pull`` and ``peek``, in the same order."""

    def prepare(self, batch: Batch) -> object:
        """Starts the work that depends only on a batch's ids. It runs in parallel with later calls.

        Creates and marks no rows.

        Returns:
            The argument ``prepared`` of :meth:`pull`. You may also drop it.
        """
        ...

    def pull(self, batch: Batch, prepared: object = None) -> Pulled:
        """Starts to read a batch's rows for training. New keys get rows, and rows are marked as used.

        Args:
            prepared: the result of :meth:`prepare` for this batch. It does not change the rows.
        """
        ...

    def peek(self, batch: Batch) -> Pulled:
        """Starts to read a batch's rows for evaluation. Creates no rows and marks none as used."""
        ...

    def sync(self) -> None:
        """Returns when all updates of this trainer are applied."""
        ...

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns the statistics so far. With ``spans``, also the spans of the processes that serve this half."""
        ...

    def live(self) -> Mapping[str, LiveNumber]:
        """Returns numbers of this process for :meth:`girih.telemetry.stats.Stats.watch`. Asks no other process."""
        ...

    def close(self) -> None:
        """Releases memory, threads and connections."""
        ...
