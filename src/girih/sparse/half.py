"""The interface of the sparse half, which owns the rows.

    batch ──► SPARSE HALF ──── embeddings ────► DENSE HALF ──► loss
                 ▲            (the cut)            │
                 └──────── their gradients ◄───────┘

A half keeps no state about a batch. The handle that :meth:`SparseHalf.pull` returns holds everything that belongs to
the batch, so several batches may be in flight.
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
    """An update in progress."""

    def done(self) -> bool:
        """Returns whether the update is applied or has failed."""
        ...

    def wait(self) -> None:
        """Blocks until the update is applied."""
        ...


class Pulled(Protocol):
    """The handle of one batch: brings its embeddings, and takes their gradients back.

    Attributes:
        staleness: earlier batches of this trainer whose gradients were not applied when these rows were read. Known
            after :meth:`wait`.
    """

    staleness: int

    def wait(self, examples: slice | None = None) -> Embeddings:
        """Blocks until the embeddings have arrived. The packed tensors are leaves that collect gradients.

        Args:
            examples: the examples of a micro-batch; None is all examples.
        """
        ...

    def push(self, step: int, lr_scale: float, vote: Vote) -> Pending:
        """Casts the vote on a step. Then starts to apply the collected gradients, unless the step is refused.

        Call it once for all micro-batches together. A gradient that is NaN or infinite refuses the step.

        Args:
            step: number of this update, from 1 on.
            lr_scale: multiplies the sparse learning rates.
            vote: the vote of the dense half. The call adds why the rows refuse the step, and their counters.
        """
        ...

    def discard(self) -> Pending:
        """Releases a batch that was pulled ahead and will not be trained on."""
        ...


@dataclass(frozen=True)
class SparseStats:
    """Statistics of a sparse half, summed over all processes that hold rows.

    Attributes:
        store: counters such as rows, hits, new, refused, evicted, dropped gradients: see ``Store.counters``.
        rows: number of rows of each table.
        processes: title of a process that serves this half → its ``Stats.snapshot``.
        balance: ``asked_keys`` and ``paced_keys`` of all trainers together, see :mod:`girih.telemetry.stats`; empty if
            nothing counts them.
        features: counts of the ids of each feature, see :class:`girih.sparse.groups.group.FeatureCounts`; empty if
            nothing counts them.
    """

    store: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, StatsSnapshot] = field(default_factory=dict)
    balance: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, int]:
        """Counters for a log of steps: ``store`` and ``balance``."""
        return {**self.store, **self.balance}


class SparseHalf(SavedRows, PublishedRows, Protocol):
    """The half that owns the rows. All trainers call its methods except ``pull`` and ``peek``, in the same order."""

    def prepare(self, batch: Batch) -> object:
        """Starts the work that depends on a batch's ids alone. The work runs in parallel with the next calls.

        Returns:
            The argument ``prepared`` of :meth:`pull`. Drop it to release the work. No row is created or marked as used.
        """
        ...

    def pull(self, batch: Batch, prepared: object = None) -> Pulled:
        """Starts to read a batch's rows for training. New keys get rows, and used rows are marked as used.

        Args:
            prepared: the result of :meth:`prepare` for this batch. The rows are the same without it.
        """
        ...

    def peek(self, batch: Batch) -> Pulled:
        """Starts to read a batch's rows for evaluation. No row is created or marked as used."""
        ...

    def sync(self) -> None:
        """Returns when all updates that this trainer sent are applied."""
        ...

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns the statistics so far, with the spans of the processes that serve this half if ``spans`` is set."""
        ...

    def live(self) -> Mapping[str, LiveNumber]:
        """Returns numbers of this process for :meth:`girih.telemetry.stats.Stats.watch`. Asks no other process."""
        ...

    def close(self) -> None:
        """Releases everything that the half holds."""
        ...
