"""A loader: reads batches, gives each trainer's ids to an embedding worker and the rest of them to the trainer
(Persia §4.1, steps 1 and 2).

Several loaders read the same batches; each serves its part of the trainers: those in step by one pass, those that go at
their own pace by a pass each, so that none waits for another; passes close to each other share what is decoded (decision 0021).

One that was killed comes back with nothing, and needs nothing: shares are a function of the position. Each trainer has it go on behind
its own last share. Where an embedding worker came back without the ids that it kept, it reads those batches again.

Shapes: B examples of a share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.peers import CONNECTED_S, RETURN_S, calls_of, connect_all
from girih.comm.registry import Registry
from girih.comm.rpc import Client, Request
from girih.comm.service import Service, answers, as_text, from_text
from girih.data import Dataset
from girih.data.batch import Batch, label_scale, share_of
from girih.data.epoch import SkippedRows
from girih.data.position import Position
from girih.data.shared_scans import ScanCursor, SharedScans
from girih.errors import Lost, WireError
from girih.sparse.protocol import BatchCodec, SparseVerb
from girih.telemetry.busy import holding, waiting
from girih.telemetry.stats import Stats


@dataclass
class _Open:
    """A reader, and the number of the share that comes next, of a pass."""

    reader: ScanCursor
    number: int
    share: int


class BatchReplay:
    """Readers that go on from share to share, one for each trainer: what one worker lost comes in turn, with others' in between.

    Methods are called by one thread.
    """

    def __init__(self, readings: SharedScans) -> None:
        self._readings = readings
        self._open: dict[int, _Open] = {}  # by trainer

    def batch(
        self,
        trainer: int,
        number: int,
        share: int,
        epoch: int,
        start: Position | None,
        *,
        most_skipped: int,
    ) -> Batch:
        """The whole batch of a share of a pass.

        Args:
            epoch, start: where the batch begins.
            most_skipped: a reader that is so many batches before it goes on to it; else another one begins there.

        Raises:
            WireError: no batch begins there.
        """
        held = self._open.get(trainer)
        if held is None or held.number != number or not 0 <= share - held.share < most_skipped:
            self.end(trainer)
            held = self._open[trainer] = _Open(self._readings.reader(epoch, start), number, share)
        try:
            while True:
                batch, _ = next(held.reader)
                held.share += 1
                if held.share > share:
                    return batch
        except StopIteration:
            self.end(trainer)
            raise WireError(f"share {share} of pass {number}: no batch begins there") from None
        except BaseException:
            self.end(trainer)
            raise

    def pass_by(self, trainer: int, share: int) -> None:
        """Lets a trainer's reader go where all that it reads comes before a share."""
        if trainer in self._open and self._open[trainer].share < share:
            self.end(trainer)

    def end(self, trainer: int) -> None:
        """Lets a trainer's reader go."""
        held = self._open.pop(trainer, None)
        if held is not None:
            held.reader.close()

    def close(self) -> None:
        """Lets all readers go."""
        for trainer in list(self._open):
            self.end(trainer)


LOOK_BACK = 4
"""Trainers at their own pace share a reading while they are apart by a fourth of ``data.shuffle_rows`` at most."""
FAR = 4
"""Trainers in step are apart, and what is read again for one is behind what it asks for, by less than so many times ``read_ahead``, as a rule."""
Answer = Callable[[Request], None]
OVER: Answer = partial(Request.fail, error=ValueError("this pass is over"))


@dataclass
class Loader:
    """One loader of several.

    Attributes:
        trainers: those it serves, of ``num_trainers``.
        workers: where the embedding workers listen; registry: where one that came back is found.
        address: where to listen; see :func:`girih.comm.service.listen`.
        in_step: whether all trainers do a step together.
        workers_return: whether workers that are killed come back.
    """

    data: Dataset
    codec: BatchCodec
    index: int
    trainers: tuple[int, ...]
    num_trainers: int
    workers: tuple[str, ...]
    address: str
    secret: bytes
    registry: Registry | None = None
    in_step: bool = True
    workers_return: bool = False
    incarnation: int = 0
    name: str = RoleName.LOADER
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        clients = connect_all(
            RoleName.EMBEDDING_WORKER,
            self.workers,
            secret=self.secret,
            registry=self.registry,
            timeout_s=RETURN_S if self.workers_return else CONNECTED_S,
        )
        work = _LoaderWork(self, clients)
        try:
            work.serve(self, ready, stop)
        finally:
            work.end()
            for client in clients:
                client.close()


@dataclass
class _TrainerQueues:
    """Queues of one trainer: shares that are ready, and requests that wait for one, by its number.

    Attributes:
        next_number: of the first share that is ready, or will be; requests may come in another order.
        last: what all requests get that come after the shares, once there are no more.
        dispatching: held while the ids of one of its shares go to a worker.
    """

    ready: deque[Answer] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    next_number: int = 0
    last: Answer | None = None
    dispatching: threading.Lock = field(default_factory=threading.Lock)

    def match(self) -> None:
        """Answers all requests that can be answered."""
        while self.ready and self.next_number in self.waiting:
            self.ready.popleft()(self.waiting.pop(self.next_number))
            self.next_number += 1
        while self.last is not None and not self.ready and self.waiting:
            self.last(self.waiting.popitem()[1])


class _Pass:
    """One pass over an epoch, or the rest of it, for some trainers.

    Args:
        first: the number of the share at ``start``.
    """

    def __init__(
        self,
        work: _LoaderWork,
        number: int,
        trainers: tuple[int, ...],
        epoch: int,
        start: Position | None,
        first: int = 0,
    ) -> None:
        self._number, self._epoch, self._start, self._first = number, epoch, start, first
        self._work = work
        self._lanes = {trainer: _TrainerQueues(next_number=first) for trainer in trainers}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="girih-read", daemon=True)
        self._thread.start()

    def next(self, trainer: int, number: int, request: Request) -> None:
        """Answers with one of the trainer's shares, once it is there."""
        with self._changing(trainer) as lane:
            lane.waiting[number] = request

    def end(self, trainer: int) -> None:
        """A trainer wants no more; returns when nothing more will be kept for it."""
        with self._changing(trainer) as lane:
            lane.ready.clear()
            lane.last = OVER
        with lane.dispatching:  # ids on their way would come after the word to forget them
            pass
        if self._is_over():
            self._thread.join()

    @contextmanager
    def _changing(self, trainer: int) -> Iterator[_TrainerQueues]:
        """One trainer's queues; once they are changed, whoever can be answered is."""
        with self._changed:
            lane = self._lanes[trainer]
            yield lane
            lane.match()
            self._changed.notify_all()

    def num_ready(self) -> int:
        """Shares that wait for their trainer."""
        return sum(len(lane.ready) for lane in self._lanes.values())

    def _is_over(self) -> bool:
        return all(lane.last is not None for lane in self._lanes.values())

    def _read(self) -> None:
        role = self._work.role
        with role.stats.busy.working(len(self._lanes) / len(role.trainers)):
            last = self._serve(role)
        for trainer in self._lanes:
            with self._changing(trainer) as lane:
                lane.last = lane.last or last

    def _serve(self, role: Loader) -> Answer:
        """Gives out all shares; returns what answers requests for more."""
        try:
            with closing(self._work.readings.reader(self._epoch, self._start)) as reader:
                for number, (batch, after) in enumerate(reader, self._first):
                    for trainer, lane in self._lanes.items():
                        with lane.dispatching:
                            if not self._has_room(trainer):
                                continue
                            share = share_of(batch, trainer, role.num_trainers)
                            answer = self._work.dispatch(share, after, number, self._number, trainer)
                        with self._changing(trainer):
                            if lane.last is None:
                                lane.ready.append(answer)
                    if self._is_over():
                        return OVER
            skipped = as_text(asdict(reader.skipped or SkippedRows()))
            return partial(Request.reply, fields=(0,), arrays=(skipped,))
        except Exception as error:
            return partial(Request.fail, error=error)

    def _has_room(self, trainer: int) -> bool:
        """Waits until a trainer has taken enough; False where it wants no more."""
        lane, most = self._lanes[trainer], self._work.role.data.read_ahead
        with self._changed:
            with waiting():
                self._changed.wait_for(lambda: len(lane.ready) < most or lane.last is not None)
            return lane.last is None


class _LoaderWork(Service):
    """The work of a loader, request by request."""

    def __init__(self, role: Loader, workers: Sequence[Client]) -> None:
        super().__init__({
            SparseVerb.BEGIN: self._begin_pass, SparseVerb.RESUME: self._resume_pass, SparseVerb.NEXT: self._send_next_share, SparseVerb.END: self._end_pass,
            SparseVerb.STORE_AGAIN: self._store_again, SparseVerb.STATS: self._read_stats,
        }, role.stats)  # fmt: skip
        self.role = role
        size, rows = role.data.batch_size, role.data.shuffle_rows
        kept = max(1, rows // LOOK_BACK // size)
        if role.in_step:
            # one that came back reads for each trainer by itself, and none is far ahead of the others
            kept = 1 + bool(role.incarnation) * FAR * role.data.read_ahead
        self.readings = SharedScans(role.data, kept)
        self._rereading = BatchReplay(self.readings)
        self._workers = workers
        self._passes: dict[tuple[int, int], _Pass] = {}  # by number and trainer; one for all trainers in step
        self._stats = role.stats
        # one dispatch at a time, of whichever reading, so that spans do not overlap
        self._dispatching = threading.Lock()

    def end(self) -> None:
        """Stops reading."""
        for (_, trainer), begun in self._passes.items():
            begun.end(trainer)
        self._rereading.close()

    def dispatch(self, share: Batch, after: Position, batch: int, number: int, trainer: int) -> Answer:
        """Gives the ids to a worker; returns what answers a trainer with the rest (Persia §4.1, steps 1 and 2)."""
        worker, sample = self._store(share, batch, number, trainer)
        # the step's loss is the mean over the whole batch; of a trainer alone with its step, over its share
        weight = share.share.weight if share.share is not None and self.role.in_step else 1.0
        whole = share.num_examples if share.share is None else share.share.num_examples
        arrays = [share.numeric, share.labels, np.array([weight]), as_text(after.to_dict())]
        if share.example_weights is not None:
            arrays.append(share.example_weights)
        if share.label_weights is not None:
            # of a trainer alone with its step, the scale too is that of its share
            scale = label_scale(share if self.role.in_step else replace(share, share=None))
            arrays += [share.label_weights, np.array(scale, np.float64)]
        arrays = [np.ascontiguousarray(array) for array in arrays]
        self._stats.sent("dense", sum(array.nbytes for array in arrays))
        return partial(Request.reply, fields=(1, worker, sample, whole), arrays=arrays)

    def _store(self, share: Batch, batch: int, number: int, trainer: int) -> tuple[int, int]:
        """Gives the ids to a worker; returns which, and the number under which it keeps them."""
        worker = (batch + trainer) % len(self._workers)
        with holding(self._dispatching), self._stats.spans("dispatch"):
            ids = self.role.codec.pack_ids(share)
            source = (number, trainer, batch, share.num_examples)
            (kept,) = answers([self._workers[worker]], SparseVerb.STORE_IDS, source, ids, again=True)
        self._stats.sent("ids", sum(array.nbytes for array in ids))
        return worker, kept.fields[0]

    def _begin_pass(self, request: Request) -> None:
        number, trainer = request.frame.fields
        self._check(trainer)
        if (number, trainer) not in self._passes:
            trainers = self.role.trainers if self.role.in_step and not self.role.incarnation else (trainer,)
            begun = _Pass(self, number, trainers, *_where(from_text(request.frame.arrays[0])))
            self._passes |= {(number, member): begun for member in trainers}
        request.reply()

    def _resume_pass(self, request: Request) -> None:
        number, trainer, share = request.frame.fields
        self._check(trainer, share)
        where = _where(from_text(request.frame.arrays[0]))
        self._leave(number, trainer, share)
        self._passes[number, trainer] = _Pass(self, number, (trainer,), *where, share)
        request.reply()

    def _send_next_share(self, request: Request) -> None:
        number, trainer, share = request.frame.fields
        if (number, trainer) not in self._passes:
            error = Lost if self.role.incarnation else ValueError  # the life before may have known it
            raise error(f"pass {number} is over")
        self._rereading.pass_by(trainer, share - FAR * self.role.data.read_ahead)
        self._passes[number, trainer].next(trainer, share, request)

    def _end_pass(self, request: Request) -> None:
        self._leave(*request.frame.fields)
        request.reply()

    def _leave(self, number: int, trainer: int, taken: int) -> None:
        """Ends a trainer's part of a pass, if it was begun here; ids of shares from ``taken`` on are forgotten."""
        self._rereading.end(trainer)
        ended = self._passes.pop((number, trainer), None)
        if ended is not None:
            ended.end(trainer)
        answers(self._workers, SparseVerb.DROP_IDS, (number, trainer, taken), again=True)

    def _store_again(self, request: Request) -> None:
        number, trainer, share = request.frame.fields
        self._check(trainer, share)
        where = _where(from_text(request.frame.arrays[0]))
        batch = self._rereading.batch(trainer, number, share, *where, most_skipped=len(self._workers))
        trainer_share = share_of(batch, trainer, self.role.num_trainers)
        request.reply(self._store(trainer_share, share, number, trainer))

    def _check(self, trainer: int, share: int = 0) -> None:
        if trainer not in self.role.trainers or share < 0:
            raise WireError(
                f"share {share} of trainer {trainer}; expected 0 or more, and one of"
                f" {', '.join(map(str, self.role.trainers))}"
            )

    def _live(self) -> dict[str, Any]:
        ready = sum(open_pass.num_ready() for open_pass in set(self._passes.copy().values()))
        return {"queues": super()._live()["queues"] | {"shares": ready}, **calls_of(self._workers)}

    def _read_stats(self, request: Request) -> None:
        request.reply((), (as_text(self._stats.snapshot()),))


def _where(begin: object) -> tuple[int, Position | None]:
    """The epoch that a message asks for, and where in it; checked before anything is read."""
    match begin:
        case {"epoch": int(epoch), "position": position} if epoch >= 0 and not isinstance(epoch, bool):
            return epoch, None if position is None else Position.from_dict(position)
    raise WireError(f"{begin!r:.100}; expected an epoch from 0 on, and a position or null")
