"""Base of the sparse halves whose shards are in this process.

A half that works ahead has a thread, which does all that is asked of it in the order in which it is asked: it finds
the keys of the next batch while the trainer computes this one, and fills in the rows of later micro-batches while it
computes earlier ones. So shards and scratch memory have one user at a time, and trainers that ask the same in the same order talk to
each other in one order too. Without one, everything is done during the call.
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
"""Facts about one group's rows that a half needs to move them."""
Arrival = tuple[list[Read], Sequence[NDArray[np.float32] | Tensor]]
"""The facts about each group that :meth:`ShardedHalf.update` needs, and the outputs of all groups."""


class Done:
    """An update that was applied when it was made, or that moves nothing."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class PulledHere(Generic[Request, Read]):
    """The embeddings of a batch, which are here or on their way, and the way back.

    Args:
        parts: the micro-batches in which they come, and their arrivals.
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
        """Blocks until they are here."""
        for part, arrival in self._parts:
            if examples is None or part.start < examples.stop:
                awaited(arrival, self._half.busy)
        return self._arrived().embeddings(examples)

    def push(self, step: int, lr_scale: float, vote: Vote) -> Done:
        """Applies the gradients, or nothing: one optimizer step."""
        reads, _ = awaited(self._parts[-1][1], self._half.busy)
        self._half.move(self._batch, reads, self._arrived().gradients(), step, lr_scale, vote)
        return Done()

    def discard(self) -> Done:
        """No-op: nothing is kept for a batch elsewhere."""
        return Done()

    def _arrived(self) -> Leaves:
        """Leaves over all outputs, filled in or not."""
        if self._leaves is None:
            _, outputs = awaited(self._parts[0][1], self._half.busy)
            groups = self._half.groups_of_tables
            self._leaves = Leaves(groups, outputs, sequence_bounds(groups, self._batch), train=self._train)
        return self._leaves


class ShardedHalf(ABC, Generic[Request, Read]):
    """A sparse half with shards in this process.

    Args:
        micro_batches: parts of a batch whose rows come one after the other, each while the one before is computed.
        ahead: whether there is to be a thread that :meth:`prepare` needs to be of use; micro-batches have one anyway.

    Attributes:
        last_step: number of the last update.
        busy: the thread, for which a wait is work while it works, and none while it waits for others.
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
        """Does what depends on a batch's ids alone; rows are to come in these micro-batches."""

    @abstractmethod
    def fetch(self, request: Request) -> None:
        """Begins to read the rows of the next read from tiers below memory; changes no result."""

    @abstractmethod
    def read(
        self, batch: Batch, step: int, parts: Sequence[slice], request: Request | None = None, *, train: bool
    ) -> Generator[Arrival[Read], None, None]:
        """Reads a batch's rows; yields the same once for each micro-batch, when its rows are filled in.

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
        """Casts the vote, and moves rows by the gradients of each group's outputs unless the step is refused."""

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
        """Reads for evaluation; keys without a row give their initial value."""
        return self._pulled(batch, [slice(0, batch.num_examples)], train=False)

    def move(
        self, batch: Batch, reads: list[Read], gradients: Gradients, step: int, lr_scale: float, vote: Vote
    ) -> None:
        """Moves rows by the gradients of all outputs, after all earlier work; see :meth:`update`."""
        grouped = by_group(self.groups_of_tables, gradients)
        self._done(partial(self.update, batch, reads, grouped, step, lr_scale, vote))
        if not vote.known_refused:
            before, self.last_step = self.last_step, step
            vote.rollback = partial(setattr, self, "last_step", before)

    def sync(self) -> None:
        """No-op: no update is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards."""
        return SparseStats(self._shards.counters(), self._shards.rows(), features=self.features.read())

    def live(self) -> Mapping[str, LiveNumber]:
        """See :meth:`girih.sparse.groups.local_shards.LocalShards.live`; asks no other process."""
        return self._shards.live()

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a live snapshot of every shard here, to be written as parts of a checkpoint."""
        return self._shards.begin_save(writer)

    def knows_changes(self, since: int) -> bool:
        """See :class:`girih.publishing.segment.PublishedRows`."""
        return self._shards.knows_changes(since)

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> SegmentRows:
        """See :class:`girih.publishing.segment.PublishedRows`."""
        return self._shards.begin_segment(writer, number, since)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows by those of any number of shards that belong here."""
        self._shards.load(reader)
        self.last_step = step

    def peek_rows(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See :meth:`girih.sparse.groups.local_shards.LocalShards.peek`."""
        return self._done(partial(self._shards.peek, table, ids))

    def stores(self) -> Iterator[tuple[str, Store]]:
        """Every shard here, and the place of its file in a checkpoint."""
        return self._shards.files()

    def close(self) -> None:
        """Gives the memory back, once all that was asked is done; the half cannot be used after it."""
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
                rows.close()  # by who does the work, not by whoever lets go of it last
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
        request = prepared.result()  # asked earlier, so it is there
        yield from self.read(batch, step, parts, request, train=train)

    def _done(self, work: Callable[[], T]) -> T:
        """Has the thread do it after earlier work, and waits for it. Without a thread, it is done at once."""
        return work() if self._thread is None else awaited(self._submit(work), self.busy)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Has the thread do it after earlier work. Without a thread, it is done at once."""
        if self._thread is not None:
            return self._thread.submit(self._done_by_thread, work)
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def _done_by_thread(self, work: Callable[[], T]) -> T:
        with self.busy.working():
            return work()
