"""The sparse half of a trainer with tables in other processes: it asks embedding workers, and they ask servers.

The ids of a dispatched batch are at a worker, under a sample number (Persia §4.1 steps 3, 5 and 6).

Shapes: B examples, G groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from girih.checkpoint.manifest import PartFacts
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.cluster.roles import RoleName
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.comm.registry import Registry
from girih.comm.registry.remote import CONNECTED_S, calls_of, connect_all
from girih.comm.rpc import Client, Frame
from girih.comm.service import answer, answers, as_integer, as_text, from_text, writable
from girih.data.batch import Batch
from girih.errors import ConfigError, GirihError, RemoteError, named
from girih.models.embeddings import Embeddings
from girih.sparse.groups.leaves import Leaves
from girih.sparse.half import SparseStats
from girih.sparse.halves.row_updates import nonfinite_gradient
from girih.sparse.halves.staging import Received, Staging
from girih.sparse.halves.worker_requests import RetryingRequests
from girih.sparse.protocol import NO_TURN, NO_VERSION, BatchCodec, DoneBatches, SparseVerb
from girih.sparse.spec import SparseSpec
from girih.telemetry.busy import awaited, waiting
from girih.telemetry.stats import LiveNumber, Stats


class RemotePulled:
    """The handle of a batch at a worker: brings its embeddings, and takes their gradients back.

    Args:
        worker: sends requests to the worker that has the batch's ids.
        reply: the reply to the request for embeddings.
        called: the trainer and the number by which the worker and the servers know the batch; empty in evaluations.
    """

    def __init__(
        self,
        half: RemoteSparse,
        worker: RetryingRequests,
        reply: Future[Frame],
        called: tuple[int, ...],
        *,
        train: bool,
    ) -> None:
        self.staleness = 0
        self.called = called
        self._half, self._worker, self._train = half, worker, train
        receive = partial(_receive, half, reply)  # a method would keep the batch after its step
        self._rows = receive if half.staging is None else half.staging.bring(receive)
        self._leaves: Leaves | None = None

    def wait(self, examples: slice | None = None) -> Embeddings:
        """Blocks until the embeddings have arrived."""
        return self._arrived().embeddings(examples)

    def push(self, step: int, lr_scale: float, vote: Vote) -> RemotePending:
        """Sends the collected gradients to the worker of the embeddings, or a notice that the step is refused.

        Gradients from a GPU are sent once they have arrived on the host.
        """
        half, leaves = self._half, self._arrived()
        half.settle()
        gradients = leaves.gradients()
        vote.reported = leaves.largest(gradients).double()
        vote.cast(~torch.isfinite(vote.reported).all())
        vote.error_from = lambda numbers: nonfinite_gradient(leaves.nonfinite_feature(gradients, numbers))
        turn, before = next(half.turns), half.last_step
        if vote.known_refused:
            return self._dropped(turn)
        half.last_step = step
        vote.rollback = partial(setattr, half, "last_step", before)

        def call(arrays: Sequence[NDArray[Any] | None]) -> Future[Frame]:
            *to_push, flag = arrays
            is_refused = flag is not None and flag[0]
            return self._drop(turn) if is_refused else self._push(turn, step, lr_scale, to_push)

        refused = vote.refused.float().reshape(1)
        if half.staging is None:
            return half.sent(call([*gradients, refused.numpy()]), self.called[1])
        return half.sent(half.staging.send([*gradients, refused], call), self.called[1])

    def discard(self) -> RemotePending:
        """Tells the worker and the servers that this batch will not be trained on."""
        return self._dropped(NO_TURN)

    def _dropped(self, turn: int) -> RemotePending:
        half, call = self._half, partial(self._drop, turn)
        return half.sent(call() if half.staging is None else half.staging.drop(call), self.called[1])

    def _push(
        self, turn: int, step: int, lr_scale: float, arrays: Sequence[NDArray[Any] | None]
    ) -> Future[Frame]:
        packed = self._half.codec.pack_gradients(arrays)
        self._half.count_sent("gradients", packed)
        return self._worker.ask(SparseVerb.PUSH, (*self.called, turn, step, as_integer(lr_scale)), packed)

    def _drop(self, turn: int) -> Future[Frame]:
        return self._worker.ask(SparseVerb.DROP, (*self.called, turn), ids=False)

    def _arrived(self) -> Leaves:
        if self._leaves is None:
            self.staleness, outputs, bounds = self._rows()
            self._leaves = Leaves(self._half.groups, outputs, bounds, train=self._train)
        return self._leaves


def _receive(half: RemoteSparse, reply: Future[Frame]) -> Received:
    """Blocks until the embeddings have arrived. Returns them in arrays."""
    frame = awaited(reply)
    num_whole = sum(output.whole for group in half.groups for output in group.outputs)
    end = len(frame.arrays) - num_whole
    outputs = [writable(array) for array in half.codec.unpack_embeddings(frame.arrays[:end])]
    return Received(frame.fields[0], outputs, [np.array(array) for array in frame.arrays[end:]])


class RemotePending:
    """An update, or a drop, in progress.

    Args:
        asked: the reply, or a future that returns the reply once the update was sent.
        number: number of the trainer's batch.
    """

    def __init__(self, asked: Future[Frame] | Future[Future[Frame]], number: int) -> None:
        self._asked, self.number = asked, number

    def done(self) -> bool:
        """Returns whether a reply has arrived, or none will come."""
        asked = self._asked
        if not asked.done() or asked.exception() is not None:
            return asked.done()
        answered = asked.result()
        return not isinstance(answered, Future) or answered.done()

    def wait(self) -> None:
        """Blocks until the update is applied."""
        asked: Future[Any] = self._asked
        answered = awaited(asked)
        if isinstance(answered, Future):
            awaited(answered)


class RemoteSave:
    """Rows that servers keep as they were, for a checkpoint or a segment. Each server writes its parts when asked.

    Args:
        verb, fields: the request to the servers; a last integer says whether they write.
    """

    def __init__(self, servers: Sequence[Client], verb: SparseVerb, *fields: int) -> None:
        self._servers, self._verb, self._fields = servers, verb, fields

    def write(self) -> dict[str, PartFacts]:
        """Makes all servers write, in parallel.

        Raises:
            Lost: a server restarted after the save or the segment began, so its rows of that moment are gone.
        """
        return self._finish(write=True)

    def wait_copied(self) -> None:
        """No-op, because a server waits before it begins a checkpoint."""

    def close(self) -> None:
        """Drops everything that was not written."""
        self._finish(write=False)

    def _finish(self, *, write: bool) -> dict[str, PartFacts]:
        servers, self._servers = self._servers, ()
        parts: dict[str, PartFacts] = {}
        replies = [server.call(self._verb, (*self._fields, int(write))) for server in servers]
        with waiting():
            wait(replies)  # before one raises, because the next save must find no server writing
        for reply in replies:
            parts |= from_text(answer(reply).arrays[0])
        return parts


class RemoteSparse:
    """Tables in embedding servers, reached through embedding workers.

    Only rank 0 is connected to the servers, so on other ranks only ``pull``, ``peek`` and ``sync`` send requests or
    wait for replies.

    Args:
        workers, servers: their addresses. registry: has the new address of a restarted process.
        servers_return_s, workers_return_s: the time in which a server, or a worker, must come back after a failure.
        staging: brings rows to the GPU of the dense half, and is closed with this half. None if the dense half is on the
            CPU.

    Attributes:
        turns: numbers for the batches that were trained on or refused, the same on all trainers in step.
    """

    def __init__(
        self,
        spec: SparseSpec,
        codec: BatchCodec,
        ranks: TrainerGroup,
        *,
        workers: Sequence[str],
        servers: Sequence[str],
        secret: bytes,
        registry: Registry | None = None,
        stats: Stats | None = None,
        staging: Staging | None = None,
        servers_return_s: float = CONNECTED_S,
        workers_return_s: float = CONNECTED_S,
    ) -> None:
        self.groups = spec.groups()
        self.codec, self.staging = codec, staging
        self.last_step = 0
        self.turns = count()
        self._stats = stats or Stats()
        self._stats.counters["lost_updates"] += 0  # the counter exists from the start
        self._ranks = ranks
        self._numbers = count()
        self._pending: deque[RemotePending] = deque()
        self._done = DoneBatches()  # batches of this trainer that servers reported as done
        self._retired: dict[str, Any] = {}
        self._to = partial(connect_all, secret=secret, registry=registry)
        self._return_s = workers_return_s, servers_return_s
        self._again = ThreadPoolExecutor(1, "girih-again")
        self.connect(workers, servers)

    def connect(self, workers: Sequence[str], servers: Sequence[str]) -> None:
        """Connects to workers and servers. They may be new, or know this trainer from before."""
        workers_return_s, servers_return_s = self._return_s
        self._workers = self._to(RoleName.EMBEDDING_WORKER, workers, timeout_s=workers_return_s)
        servers = servers if self._ranks.first else ()
        self._servers = self._to(RoleName.EMBEDDING_SERVER, servers, timeout_s=servers_return_s)

    def retire(self, names: Collection[str]) -> None:
        """Disconnects from workers and servers, and keeps the statistics of processes that will end.

        Call it while nothing is in flight.

        Args:
            names: the roles of the processes that will end.
        """
        for title, snapshot in self.stats(spans=True).processes.items():
            if title.rpartition(" ")[0] in names:
                snapshot["counters"].pop(
                    "served_keys", None
                )  # loads are compared only among processes that serve together
                self._retired[f"{title}, until update {self.last_step}"] = snapshot
        self.disconnect()

    def disconnect(self) -> None:
        """Disconnects from workers and servers."""
        for client in (*self._workers, *self._servers):
            client.close()
        self._workers, self._servers = [], []

    def reset(self) -> None:
        """Makes servers drop and count the updates that earlier trainers began. All trainers call it."""
        lost_and_step = None
        if self._ranks.first:
            fields = [frame.fields for frame in answers(self._servers, SparseVerb.RESET, again=True)]
            lost_and_step = max(lost for lost, _ in fields), max(step for _, step in fields)
            self._stats.counters["lost_updates"] += lost_and_step[0]
        self.last_step = self._ranks.broadcast(lost_and_step)[1]

    def prepare(self, batch: Batch) -> None:
        """No-op, because the worker does this work when the ids come from the loader."""

    def pull(self, batch: Batch, prepared: object = None) -> RemotePulled:
        """Asks the worker that keeps the batch's ids for its embeddings.

        Raises:
            ConfigError: the batch was not dispatched.
        """
        if batch.share is None or batch.share.sample is None:
            raise ConfigError("this batch has its ids with it; expected a batch that a loader dispatched")
        called = (self._ranks.rank, next(self._numbers))
        worker = RetryingRequests(self._workers, batch.share.sample, batch.share.again, self._again)
        for pending in self._pending:
            if pending.done():
                self._done.add(pending.number)
        reply = worker.ask(SparseVerb.PULL, (*called, self.last_step + 1, self._done.all_before))
        return RemotePulled(self, worker, reply, called, train=True)

    def peek(self, batch: Batch) -> RemotePulled:
        """Reads for evaluation. Keys without a row give their initial value."""
        place = self._ranks.rank % len(self._workers)
        worker = RetryingRequests(self._workers, (place, batch.num_examples), None, self._again)
        arrays = self.codec.pack_ids(batch)
        self.count_sent("ids", arrays)
        reply = worker.ask(SparseVerb.PEEK, (), arrays)
        return RemotePulled(self, worker, reply, (), train=False)

    def sent(self, asked: Future[Frame] | Future[Future[Frame]], number: int) -> RemotePending:
        """Records an update of a batch that was sent or will be sent, or a notice that there is none."""
        pending = RemotePending(asked, number)
        self._pending.append(pending)
        return pending

    def settle(self) -> None:
        """Raises the errors of updates whose replies have arrived."""
        while self._pending and self._pending[0].done():
            self._settle_next()

    def _settle_next(self) -> None:
        pending = self._pending.popleft()
        pending.wait()
        self._done.add(pending.number)

    def count_sent(self, kind: str, arrays: Sequence[NDArray[Any]]) -> None:
        """Counts the bytes of arrays that are sent."""
        self._stats.sent(kind, sum(array.nbytes for array in arrays))

    def sync(self) -> None:
        """Returns when all updates that this trainer sent are applied."""
        while self._pending:
            self._settle_next()

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns sums over all servers, and the snapshots of servers and workers. They are empty except on rank 0."""
        if not self._ranks.first:
            return SparseStats()
        store: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        processes = dict(self._retired)
        for name, clients in (
            (RoleName.EMBEDDING_SERVER, self._servers),
            (RoleName.EMBEDDING_WORKER, self._workers),
        ):
            for number, frame in enumerate(answers(clients, SparseVerb.STATS, (int(spans),), again=True)):
                snapshot = from_text(frame.arrays[0])
                store.update(snapshot.pop("store", {}))
                rows.update(snapshot.pop("rows", {}))
                processes[f"{name} {number}"] = snapshot
        features: Counter[str] = Counter()
        for snapshot in processes.values():
            features.update(snapshot.get("features", {}))
        return SparseStats(dict(store), dict(rows), processes, features=dict(features))

    def live(self) -> dict[str, LiveNumber]:
        """Returns numbers of this process for :meth:`Stats.watch`. Asks no other process."""
        queues = {"updates": len(self._pending)}
        return {"queues": queues, **calls_of((*self._workers, *self._servers))}

    def begin_save(self, writer: Storage) -> RemoteSave:
        """Makes all servers take snapshots, after the updates of all trainers. Training continues during the writes."""
        self.sync()
        self._ranks.barrier()
        answers(self._servers, SparseVerb.SAVE, (), (as_text(writer.absolute().url),), again=True)
        self._ranks.barrier()
        return RemoteSave(self._servers, SparseVerb.WRITE)

    def knows_changes(self, since: int) -> bool:
        """Asks all servers. Ranks other than 0 return True, because they have no connection to a server."""
        return all(
            frame.fields[0] for frame in answers(self._servers, SparseVerb.HAS_CHANGES, (since,), again=True)
        )

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> RemoteSave:
        """Makes all servers take the changes, or all rows, while no trainer has anything in flight."""
        self.sync()
        self._ranks.barrier()
        fields = (number, NO_VERSION if since is None else since)
        segment = RemoteSave(self._servers, SparseVerb.SEND, int(since is None))
        try:
            answers(self._servers, SparseVerb.SEGMENT, fields, (as_text(writer.absolute().url),), again=True)
        except GirihError:
            with suppress(GirihError):  # the first error is reported
                segment.close()  # otherwise the other servers would wait for it before their next checkpoint
            raise
        finally:
            self._ranks.barrier()  # the trainer that asked for the segment reports its errors
        return segment

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows with the rows of any number of shards. An error is raised on all trainers."""
        failed: GirihError | None = None
        try:
            answers(self._servers, SparseVerb.LOAD, (), (as_text(reader.to_dict()),), again=True)
        except GirihError as error:  # all trainers must learn of it before another meeting
            failed = error
        failure = self._ranks.broadcast(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failure is not None:
            raise failed or named(failure) or RemoteError(failure)
        self.last_step = step

    def close(self) -> None:
        """Disconnects from workers and servers, and ends the threads."""
        self.disconnect()
        self._again.shutdown(wait=False)
        if self.staging is not None:
            self.staging.close()
