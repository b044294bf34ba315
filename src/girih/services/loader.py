"""A loader: reads batches, sends ids to embedding workers and the rest to trainers (Persia §4.1, steps 1 and 2).

Several loaders read the same batches, and each serves some trainers. Trainers in step share one pass. Trainers at their
own pace have a pass each, so that none waits for another. Passes close to each other share the decoded data (decision
0021).

A killed loader restarts empty and needs no state: shares are a function of the position. Each trainer makes it continue
after the trainer's last share. If an embedding worker restarts without its ids, the loader reads their batches again.

Shapes: B examples of a share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.registry import Registry
from girih.comm.registry.remote import CONNECTED_S, RETURN_S, calls_of, connect_all
from girih.comm.rpc import Request
from girih.comm.service import Service, answers, as_text, from_text
from girih.data import Dataset
from girih.data.batch import Batch, label_scale, share_of
from girih.data.epoch import SkippedRows
from girih.data.position import Position
from girih.data.shared_scans import ScanCursor, SharedScans
from girih.errors import Lost, WireError
from girih.sparse.protocol import BatchCodec, SparseVerb
from girih.telemetry.busy import holding, waiting


@dataclass
class _Open:
    """A reader of a pass, and the number of its next share."""

    reader: ScanCursor
    number: int
    share: int


class BatchReplay:
    """Reads the shares that a worker lost again, with one reader for each trainer. Readers only move forward.

    A single thread calls the methods.
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
        """Returns the whole batch of a share of a pass.

        Args:
            epoch, start: the start of the batch.
            most_skipped: the reader moves forward if it must skip fewer batches than this. Otherwise a new reader
                begins at the batch.

        Raises:
            WireError: the pass has no batch with this number.
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
        """Closes a trainer's reader if it is before a share."""
        if trainer in self._open and self._open[trainer].share < share:
            self.end(trainer)

    def end(self, trainer: int) -> None:
        """Closes a trainer's reader."""
        held = self._open.pop(trainer, None)
        if held is not None:
            held.reader.close()

    def close(self) -> None:
        """Closes all readers."""
        for trainer in list(self._open):
            self.end(trainer)


LOOK_BACK = 4
"""Trainers at their own pace share a reading if they are apart by at most a fourth of ``data.shuffle_rows``."""
FAR = 4
"""Usual limit of the distance between trainers in step, and between repeated and newest reads, in ``read_ahead``."""
Answer = Callable[[Request], None]
OVER: Answer = partial(Request.fail, error=ValueError("this pass is over"))


@dataclass
class ShareQueues:
    """Shares of one trainer that are ready, and requests that wait for a share. Uses no thread and no socket.

    Attributes:
        ready: functions that answer requests. waiting: requests by the number of the share.
        next_number: the number of the first share that is ready, or will be. Requests may come in another order.
        last: answers all requests after the last share, once there are no more shares.
    """

    ready: deque[Answer] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    next_number: int = 0
    last: Answer | None = None

    def match(self) -> list[tuple[Answer, Request]]:
        """Takes out all requests that can be answered, each with its answer."""
        matches = []
        while self.ready and self.next_number in self.waiting:
            matches.append((self.ready.popleft(), self.waiting.pop(self.next_number)))
            self.next_number += 1
        if self.last is not None and not self.ready:
            matches += [(self.last, request) for request in self.waiting.values()]
            self.waiting.clear()
        return matches


class _Pass:
    """One pass over an epoch, or the rest of it, for some trainers.

    Args:
        first: the number of the share at ``start``.
    """

    def __init__(
        self,
        loader: Loader,
        number: int,
        trainers: tuple[int, ...],
        epoch: int,
        start: Position | None,
        first: int = 0,
    ) -> None:
        self._number, self._epoch, self._start, self._first = number, epoch, start, first
        self._loader = loader
        self._lanes = {trainer: ShareQueues(next_number=first) for trainer in trainers}
        # per trainer, held while the ids of a share go to a worker
        self._dispatching = {trainer: threading.Lock() for trainer in trainers}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="girih-read", daemon=True)
        self._thread.start()

    def next(self, trainer: int, number: int, request: Request) -> None:
        """Answers with one of the trainer's shares, when it is ready."""
        with self._changing(trainer) as lane:
            lane.waiting[number] = request

    def end(self, trainer: int) -> None:
        """Ends the pass for a trainer. Returns when nothing more will be kept for it."""
        with self._changing(trainer) as lane:
            lane.ready.clear()
            lane.last = OVER
        with self._dispatching[trainer]:  # ids on their way would arrive after the request to forget them
            pass
        if self._is_over():
            self._thread.join()

    @contextmanager
    def _changing(self, trainer: int) -> Iterator[ShareQueues]:
        """Yields one trainer's queues. After the change it answers all requests that can be answered."""
        with self._changed:
            lane = self._lanes[trainer]
            yield lane
            for answer, request in lane.match():
                answer(request)
            self._changed.notify_all()

    def num_ready(self) -> int:
        """Returns the number of shares that wait for their trainer."""
        return sum(len(lane.ready) for lane in self._lanes.values())

    def _is_over(self) -> bool:
        return all(lane.last is not None for lane in self._lanes.values())

    def _read(self) -> None:
        role = self._loader
        with role.stats.busy.working(len(self._lanes) / len(role.trainers)):
            last = self._serve(role)
        for trainer in self._lanes:
            with self._changing(trainer) as lane:
                lane.last = lane.last or last

    def _serve(self, role: Loader) -> Answer:
        """Gives out all shares. Returns the function that answers later requests."""
        try:
            with closing(role.readings.reader(self._epoch, self._start)) as reader:
                for number, (batch, after) in enumerate(reader, self._first):
                    for trainer, lane in self._lanes.items():
                        with self._dispatching[trainer]:
                            if not self._has_room(trainer):
                                continue
                            share = share_of(batch, trainer, role.num_trainers)
                            answer = role.dispatch(share, after, number, self._number, trainer)
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
        """Waits until a trainer has taken enough shares. Returns False if the trainer wants no more."""
        lane, most = self._lanes[trainer], self._loader.data.read_ahead
        with self._changed:
            with waiting():
                self._changed.wait_for(lambda: len(lane.ready) < most or lane.last is not None)
            return lane.last is None


@dataclass(kw_only=True)
class Loader(Service):
    """One of several loaders.

    Attributes:
        trainers: the trainers that it serves, of ``num_trainers``.
        workers: addresses of the embedding workers; registry: has the new address of a restarted worker.
        in_step: True if all trainers do each step together.
        workers_return: True if killed workers restart.
    """

    name = RoleName.LOADER
    verbs = SparseVerb
    data: Dataset
    codec: BatchCodec
    trainers: tuple[int, ...]
    num_trainers: int
    workers: tuple[str, ...]
    registry: Registry | None = None
    in_step: bool = True
    workers_return: bool = False

    def open(self, closing: ExitStack) -> None:
        """See :class:`Service`."""
        clients = connect_all(
            RoleName.EMBEDDING_WORKER,
            self.workers,
            secret=self.secret,
            registry=self.registry,
            timeout_s=RETURN_S if self.workers_return else CONNECTED_S,
        )
        self._clients = [closing.enter_context(client) for client in clients]
        size, rows = self.data.batch_size, self.data.shuffle_rows
        kept = max(1, rows // LOOK_BACK // size)
        if self.in_step:
            # a restarted loader reads for each trainer separately, and no trainer is far ahead of another
            kept = 1 + bool(self.incarnation) * FAR * self.data.read_ahead
        self.readings = SharedScans(self.data, kept)
        self._rereading = BatchReplay(self.readings)
        self._passes: dict[tuple[int, int], _Pass] = {}  # by number and trainer; in step, one for all
        # one dispatch at a time, so that spans do not overlap
        self._dispatching = threading.Lock()
        closing.callback(self._end_passes)
        super().open(closing)
        self.stats.watch(lambda: {"queues": {"shares": self._num_ready()}, **calls_of(self._clients)})

    def _end_passes(self) -> None:
        for (_, trainer), begun in self._passes.items():
            begun.end(trainer)
        self._rereading.close()

    def dispatch(self, share: Batch, after: Position, batch: int, number: int, trainer: int) -> Answer:
        """Gives the ids to a worker. Returns the function that sends a trainer the rest (Persia §4.1, steps 1, 2)."""
        worker, sample = self._store(share, batch, number, trainer)
        # in step, the loss is the mean over the whole batch; otherwise over the trainer's share
        weight = share.share.weight if share.share is not None and self.in_step else 1.0
        whole = share.num_examples if share.share is None else share.share.num_examples
        arrays = [share.numeric, share.labels, np.array([weight]), as_text(after.to_dict())]
        if share.example_weights is not None:
            arrays.append(share.example_weights)
        if share.label_weights is not None:
            # if not in step, the scale too is computed from the share
            scale = label_scale(share if self.in_step else replace(share, share=None))
            arrays += [share.label_weights, np.array(scale, np.float64)]
        arrays = [np.ascontiguousarray(array) for array in arrays]
        self.stats.sent("dense", sum(array.nbytes for array in arrays))
        return partial(Request.reply, fields=(1, worker, sample, whole), arrays=arrays)

    def _store(self, share: Batch, batch: int, number: int, trainer: int) -> tuple[int, int]:
        """Gives the ids to a worker. Returns the worker, and its number for the ids."""
        worker = (batch + trainer) % len(self._clients)
        with holding(self._dispatching), self.stats.spans("dispatch"):
            ids = self.codec.pack_ids(share)
            source = (number, trainer, batch, share.num_examples)
            (kept,) = answers([self._clients[worker]], SparseVerb.STORE_IDS, source, ids, again=True)
        self.stats.sent("ids", sum(array.nbytes for array in ids))
        return worker, kept.fields[0]

    def on_begin(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, trainer = request.frame.fields
        self._check(trainer)
        if (number, trainer) not in self._passes:
            trainers = self.trainers if self.in_step and not self.incarnation else (trainer,)
            begun = _Pass(self, number, trainers, *_where(from_text(request.frame.arrays[0])))
            self._passes |= {(number, member): begun for member in trainers}
        request.reply()

    def on_resume(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, trainer, share = request.frame.fields
        self._check(trainer, share)
        where = _where(from_text(request.frame.arrays[0]))
        self._leave(number, trainer, share)
        self._passes[number, trainer] = _Pass(self, number, (trainer,), *where, share)
        request.reply()

    def on_next(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, trainer, share = request.frame.fields
        if (number, trainer) not in self._passes:
            error = Lost if self.incarnation else ValueError  # the earlier incarnation may have had this pass
            raise error(f"pass {number} is over")
        self._rereading.pass_by(trainer, share - FAR * self.data.read_ahead)
        self._passes[number, trainer].next(trainer, share, request)

    def on_end(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        self._leave(*request.frame.fields)
        request.reply()

    def _leave(self, number: int, trainer: int, taken: int) -> None:
        """Ends a trainer's part of a pass, if this loader began it. Drops ids of shares from ``taken`` on."""
        self._rereading.end(trainer)
        ended = self._passes.pop((number, trainer), None)
        if ended is not None:
            ended.end(trainer)
        answers(self._clients, SparseVerb.DROP_IDS, (number, trainer, taken), again=True)

    def on_store_again(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, trainer, share = request.frame.fields
        self._check(trainer, share)
        where = _where(from_text(request.frame.arrays[0]))
        batch = self._rereading.batch(trainer, number, share, *where, most_skipped=len(self._clients))
        trainer_share = share_of(batch, trainer, self.num_trainers)
        request.reply(self._store(trainer_share, share, number, trainer))

    def _check(self, trainer: int, share: int = 0) -> None:
        if trainer not in self.trainers or share < 0:
            raise WireError(
                f"share {share} of trainer {trainer}; expected 0 or more, and one of"
                f" {', '.join(map(str, self.trainers))}"
            )

    def _num_ready(self) -> int:
        return sum(open_pass.num_ready() for open_pass in set(self._passes.copy().values()))


def _where(begin: object) -> tuple[int, Position | None]:
    """Returns the requested epoch and position, after a check, before anything is read."""
    match begin:
        case {"epoch": int(epoch), "position": position} if epoch >= 0 and not isinstance(epoch, bool):
            return epoch, None if position is None else Position.from_dict(position)
    raise WireError(f"{begin!r:.100}; expected an epoch from 0 on, and a position or null")
