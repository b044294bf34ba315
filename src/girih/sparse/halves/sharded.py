"""The base class of sparse halves with shards in this process.

A half that works ahead has a thread, which runs all requests in order. The thread finds the keys of the next batch
while the trainer computes the current batch. It fills in the rows of later micro-batches while the trainer computes
earlier ones. So shards and scratch memory have one user at a time. If all trainers make the same requests in the same
order, their messages have the same order too. Without the thread, each call does its work before it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch, slices_of
from girih.models.embeddings import Embeddings
from girih.publishing.shards import SegmentRows
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.group import FeatureCounts
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.pack import Group, by_group, sequence_bounds
from girih.sparse.half import SparseStats
from girih.store import Store
from girih.telemetry.busy import Busy, awaited
from girih.telemetry.stats import LiveNumber

T = TypeVar("T")
Request = TypeVar("Request")
"""Facts about a batch that depend on its ids alone."""
Read = TypeVar("Read")
"""Facts about one group's rows that a half needs to update them."""
Arrival = tuple[list[Read], Sequence[NDArray[np.float32] | Tensor]]
"""The facts about each group that :meth:`ShardedHalf.update` needs, and the outputs of all groups."""


class Done:
    """An update that is already applied, or that changes nothing."""

    def done(self) -> bool:
        """Always returns True."""
        return True

    def wait(self) -> None:
        """Returns immediately."""


class PulledHere(Generic[Request, Read]):
    """The handle of a batch with rows in this process: brings its embeddings, and takes their gradients back.

    Args:
        parts: the micro-batches in which the rows come, and their arrivals.
    """

    def __init__(
        self,
        half: ShardedHalf[Request, Read],
        batch: Batch,
        parts: Sequence[tuple[slice, Future[Arrival[Read]]]],
        *,
        train: bool,
    ) -> None:
        self.staleness = 0
        self._half, self._batch, self._parts, self._train = half, batch, parts, train
        self._leaves: Leaves | None = None

    def wait(self, examples: slice | None = None) -> Embeddings:
        """Blocks until the embeddings have arrived."""
        for part, arrival in self._parts:
            if examples is None or part.start < examples.stop:
                awaited(arrival, self._half.busy)
        return self._arrived().embeddings(examples)

    def push(self, step: int, lr_scale: float, vote: Vote) -> Done:
        """Makes one optimizer step with the gradients, unless the step is refused."""
        reads, _ = awaited(self._parts[-1][1], self._half.busy)
        self._half.move(self._batch, reads, self._arrived().gradients(), step, lr_scale, vote)
        return Done()

    def discard(self) -> Done:
        """No-op, because no other process keeps anything for the batch."""
        return Done()

    def _arrived(self) -> Leaves:
        """Returns leaves over all outputs, which may not be filled in yet."""
        if self._leaves is None:
            _, outputs = awaited(self._parts[0][1], self._half.busy)
            groups = self._half.groups_of_tables
            self._leaves = Leaves(groups, outputs, sequence_bounds(groups, self._batch), train=self._train)
        return self._leaves


class ShardedHalf(ABC, Generic[Request, Read]):
    """A sparse half with shards in this process.

    Args:
        micro_batches: parts of a batch whose rows come one after the other, each while the part before is computed.
        ahead: True starts the thread that makes :meth:`prepare` useful. Micro-batches start it in any case.

    Attributes:
        last_step: number of the last update.
        busy: the thread's work. A wait for the thread counts as work while the thread works, and not while it waits for
            other processes.
        groups_of_tables: the packed tables, in the order of outputs.
        features: counts of the ids of this process's batches.
    """

    def __init__(
        self, groups: Sequence[Group], shards: LocalShards, *, micro_batches: int = 1, ahead: bool = False
    ) -> None:
        self.last_step = 0
        self.groups_of_tables, self._shards = groups, shards
        self.features = FeatureCounts(groups)
        self._micro_batches = micro_batches
        self._thread = ThreadPoolExecutor(1, "girih-sparse") if ahead or micro_batches > 1 else None
        self.busy = Busy()

    @abstractmethod
    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> Request:
        """Does the work that depends on a batch's ids alone. Rows will come in the micro-batches ``parts``."""

    @abstractmethod
    def fetch(self, request: Request) -> None:
        """Begins to read the rows of the next :meth:`read` from tiers below memory. Changes no result."""

    @abstractmethod
    def read(
        self, batch: Batch, step: int, parts: Sequence[slice], request: Request | None = None, *, train: bool
    ) -> Generator[Arrival[Read], None, None]:
        """Reads a batch's rows. Yields the same arrival once for each micro-batch, when its rows are filled in.

        Args:
            request: the result of :meth:`find`; None calls it now.
        """

    @abstractmethod
    def update(
        self,
        batch: Batch,
        reads: list[Read],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """Casts the vote. Unless the step is refused, updates rows by the gradients of each group's outputs."""

    def prepare(self, batch: Batch) -> Future[Request]:
        """See :class:`girih.sparse.half.SparseHalf`."""

        def find() -> Request:
            request = self.find(batch, slices_of(batch, self._micro_batches), train=True)
            self.fetch(request)
            return request

        return self._submit(find)

    def pull(self, batch: Batch, prepared: object = None) -> PulledHere[Request, Read]:
        """Reads a batch's rows for training."""
        self.features.add_training(batch)
        return self._pulled(batch, slices_of(batch, self._micro_batches), prepared, train=True)

    def peek(self, batch: Batch) -> PulledHere[Request, Read]:
        """Reads for evaluation. Keys without a row give their initial value."""
        return self._pulled(batch, [slice(0, batch.num_examples)], train=False)

    def move(
        self, batch: Batch, reads: list[Read], gradients: Gradients, step: int, lr_scale: float, vote: Vote
    ) -> None:
        """Updates rows by the gradients of all outputs, after all earlier work; see :meth:`update`."""
        grouped = by_group(self.groups_of_tables, gradients)
        self._done(partial(self.update, batch, reads, grouped, step, lr_scale, vote))
        if not vote.known_refused:
            before, self.last_step = self.last_step, step
            vote.rollback = partial(setattr, self, "last_step", before)

    def sync(self) -> None:
        """No-op, because no update is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns sums over all shards."""
        return SparseStats(self._shards.counters(), self._shards.rows(), features=self.features.read())

    def live(self) -> Mapping[str, LiveNumber]:
        """See :meth:`girih.sparse.groups.local_shards.LocalShards.live`. Asks no other process."""
        return self._shards.live()

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a snapshot of every shard of this process. The returned object writes it, while training continues."""
        return self._shards.begin_save(writer)

    def knows_changes(self, since: int) -> bool:
        """See :class:`girih.publishing.segment.PublishedRows`."""
        return self._shards.knows_changes(since)

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> SegmentRows:
        """See :class:`girih.publishing.segment.PublishedRows`."""
        return self._shards.begin_segment(writer, number, since)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows with those rows of any number of shards that belong to this process."""
        self._shards.load(reader)
        self.last_step = step

    def peek_rows(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See :meth:`girih.sparse.groups.local_shards.LocalShards.peek`."""
        return self._done(partial(self._shards.peek, table, ids))

    def stores(self) -> Iterator[tuple[str, Store]]:
        """Yields the file name in a checkpoint of every shard of this process, and the shard."""
        return self._shards.files()

    def close(self) -> None:
        """Frees the memory after all requested work is done. The half cannot be used afterwards."""
        if self._thread is not None:
            self._thread.shutdown()
        self._shards.close()

    def _pulled(
        self, batch: Batch, parts: Sequence[slice], prepared: object = None, *, train: bool
    ) -> PulledHere[Request, Read]:
        step = self.last_step + 1
        if isinstance(prepared, Future):
            rows = self._arriving(batch, step, parts, prepared, train=train)
        else:
            rows = self.read(batch, step, parts, train=train)

        def arrive(*, last: bool) -> Arrival[Read]:
            arrived = next(rows)
            if last:
                rows.close()  # otherwise the thread that releases the last reference would close it
            return arrived

        arrivals = []
        for part in parts:
            arrivals.append((part, self._submit(partial(arrive, last=part is parts[-1]))))
        return PulledHere(self, batch, arrivals, train=train)

    def _arriving(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        prepared: Future[Request],
        *,
        train: bool,
    ) -> Generator[Arrival[Read], None, None]:
        request = prepared.result()  # submitted earlier to the same thread, so it is done
        yield from self.read(batch, step, parts, request, train=train)

    def _done(self, work: Callable[[], T]) -> T:
        """Runs work in the thread, after earlier work, and waits for it. Without a thread, runs it immediately."""
        return work() if self._thread is None else awaited(self._submit(work), self.busy)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs work in the thread, after earlier work. Without a thread, runs it immediately."""
        if self._thread is not None:
            return self._thread.submit(self._done_by_thread, work)
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def _done_by_thread(self, work: Callable[[], T]) -> T:
        with self.busy.working():
            return work()
