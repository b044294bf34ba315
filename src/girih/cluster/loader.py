"""A loader: reads batches, gives each trainer's ids to an embedding worker and the rest of them to the trainer
(Persia §4.1, steps 1 and 2).

Several loaders read the same batches; each serves its part of the trainers.

Shapes: B examples of a share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.peers import connect_all
from girih.comm.registry import Registry
from girih.comm.rpc import Client, Request, listen
from girih.data import Batch, Dataset, Position, read_ahead
from girih.data.shares import share_of
from girih.runs.stats import Stats
from girih.sparse.service.codec import Codec
from girih.sparse.service.protocol import Verb, as_text, from_text

Answer = Callable[[Request], None]


@dataclass
class Loader:
    """One loader of several.

    Attributes:
        trainers: those it serves, of ``num_trainers``.
        workers: where the embedding workers listen; registry: where one that came back is found.
        address: where to listen; see :func:`girih.comm.rpc.listen`.
    """

    data: Dataset
    codec: Codec
    index: int
    trainers: tuple[int, ...]
    num_trainers: int
    workers: tuple[str, ...]
    address: str
    secret: bytes
    registry: Registry | None = None
    incarnation: int = 0
    name: str = RoleName.LOADER

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        clients = connect_all(
            RoleName.EMBEDDING_WORKER, self.workers, secret=self.secret, registry=self.registry
        )
        work = _Work(self, clients)
        try:
            with (
                ThreadPoolExecutor(1, "girih-loader") as pool,
                listen(
                    lambda request: work.handle(request, pool),
                    address=self.address,
                    secret=self.secret,
                    incarnation=self.incarnation,
                ) as server,
            ):
                ready(server.address)
                stop.wait()
        finally:
            work.end()
            for client in clients:
                client.close()


@dataclass
class _Lane:
    """Queues of one trainer: shares that are ready, and requests that wait for one, by its number.

    Attributes:
        next_number: of the first share that is ready, or will be; requests may come in another order.
        last: what all requests get that come after the shares.
    """

    ready: deque[Answer] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    next_number: int = 0
    last: Answer | None = None
    open: bool = True


class _Pass:
    """One reading of an epoch, or the rest of it."""

    def __init__(self, work: _Work, number: int, told: Mapping[str, Any]) -> None:
        self.number, self.told = number, told
        self._work = work
        self._lanes = {trainer: _Lane() for trainer in work.role.trainers}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="girih-read", daemon=True)
        self._thread.start()

    def next(self, trainer: int, number: int, request: Request) -> None:
        """Answers with one of the trainer's shares, once it is there."""
        with self._changed:
            self._lanes[trainer].waiting[number] = request
            self._match(trainer)

    def end(self, trainer: int | None = None) -> None:
        """One trainer, or none at all, wants any more; returns when nothing more will be kept for it."""
        with self._changed:
            for number, lane in self._lanes.items():
                if trainer in (None, number):
                    lane.open = False
                    lane.ready.clear()
                    lane.last = _over
                    self._match(number)
            self._changed.notify_all()
        if not any(lane.open for lane in self._lanes.values()):
            self._thread.join()

    def _read(self) -> None:
        work, role = self._work, self._work.role
        position = self.told["position"]
        try:
            batches = role.data.batches(
                self.told["epoch"], None if position is None else Position.from_dict(position)
            )
            with read_ahead(batches, role.data.read_ahead) as ahead:
                for number, (batch, after) in enumerate(ahead):
                    for trainer in role.trainers:
                        if not self._make_room(trainer):
                            continue
                        share = share_of(batch, trainer, role.num_trainers)
                        worker = (number + trainer) % len(role.workers)
                        self._put(trainer, work.dispatch(share, after, worker, self.number, trainer))
                    if not any(lane.open for lane in self._lanes.values()):
                        return
            skipped = as_text(asdict(role.data.skipped))
            self._put_last(lambda request: request.reply((0,), (skipped,)))
        except Exception as error:
            failure = error
            self._put_last(lambda request: request.fail(failure))

    def _make_room(self, trainer: int) -> bool:
        """Waits until a trainer has taken enough; False where it wants no more."""
        lane, most = self._lanes[trainer], self._work.role.data.read_ahead
        with self._changed:
            self._changed.wait_for(lambda: len(lane.ready) < most or not lane.open)
            return lane.open

    def _put(self, trainer: int, answer: Answer) -> None:
        with self._changed:
            if self._lanes[trainer].open:
                self._lanes[trainer].ready.append(answer)
                self._match(trainer)

    def _put_last(self, answer: Answer) -> None:
        """Sets the answer that every further request gets."""
        with self._changed:
            for trainer, lane in self._lanes.items():
                if lane.open:
                    lane.last = answer
                    self._match(trainer)

    def _match(self, trainer: int) -> None:
        lane = self._lanes[trainer]
        while lane.ready and lane.next_number in lane.waiting:
            lane.ready.popleft()(lane.waiting.pop(lane.next_number))
            lane.next_number += 1
            self._changed.notify_all()
        while lane.last is not None and not lane.ready and lane.waiting:
            lane.last(lane.waiting.popitem()[1])


def _over(request: Request) -> None:
    request.fail(ValueError("this pass is over"))


class _Work:
    """The work of a loader, request by request."""

    def __init__(self, role: Loader, workers: Sequence[Client]) -> None:
        self.role = role
        self._workers = workers
        self._pass: _Pass | None = None
        self._stats = Stats()

    def handle(self, request: Request, pool: ThreadPoolExecutor) -> None:
        """Takes a request in."""
        pool.submit(self._do, request)

    def end(self) -> None:
        """Stops reading."""
        if self._pass is not None:
            self._pass.end()
            self._pass = None

    def dispatch(self, share: Batch, after: Position, worker: int, number: int, trainer: int) -> Answer:
        """Gives the ids to a worker; returns what answers a trainer with the rest (Persia §4.1, steps 1 and 2)."""
        with self._stats.spans("dispatch"):
            ids = self.role.codec.pack_ids(share)
            kept = (
                self._workers[worker].call(Verb.STORE_IDS, (number, trainer, share.num_examples), ids).wait()
            )
        weight = 1.0 if share.share is None else share.share.weight
        whole = share.num_examples if share.share is None else share.share.num_examples
        arrays = [share.numeric, share.labels, np.array([weight]), as_text(after.to_dict())]
        if share.example_weights is not None:
            arrays.append(share.example_weights)
        arrays = [np.ascontiguousarray(array) for array in arrays]
        self._stats.sent("ids", sum(array.nbytes for array in ids))
        self._stats.sent("dense", sum(array.nbytes for array in arrays))
        fields = (1, worker, kept.fields[0], whole)
        return lambda request: request.reply(fields, arrays)

    def _do(self, request: Request) -> None:
        verbs = {Verb.BEGIN: self._begin, Verb.NEXT: self._next, Verb.END: self._end, Verb.STATS: self._count}
        try:
            verbs[Verb(request.frame.kind)](request)
        except Exception as error:
            request.fail(error)

    def _begin(self, request: Request) -> None:
        number = request.frame.fields[0]
        if self._pass is None or self._pass.number != number:
            self.end()
            self._pass = _Pass(self, number, from_text(request.frame.arrays[0]))
        request.reply()

    def _next(self, request: Request) -> None:
        number, trainer, share = request.frame.fields
        if self._pass is None or self._pass.number != number:
            raise ValueError(f"pass {number} is over")
        self._pass.next(trainer, share, request)

    def _end(self, request: Request) -> None:
        number, trainer = request.frame.fields
        if self._pass is not None and self._pass.number == number:
            self._pass.end(trainer)
            for worker in self._workers:
                worker.call(Verb.DROP_IDS, (number, trainer)).wait()
        request.reply()

    def _count(self, request: Request) -> None:
        request.reply((), (as_text(self._stats.snapshot()),))
