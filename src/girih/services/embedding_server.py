"""An embedding server: shards whose rows workers read and update (Persia §4.1 step 7, §4.2.2).

One thread takes the requests one after the other. It checks a request and puts it into the queues of all shards
(:mod:`girih.sparse.routing.shard_queues`), so that reads and updates of different shards run in parallel. Each shard
works in the order of the requests. So all counts of updates are made when an update is put into the queues: for every
later read it is applied. Other requests wait until the queues are empty.

The server remembers the keys that a request read until their gradients come, so that messages with gradients need no
keys.

A killed server restarts with its shards, in shared memory, but without the remembered keys. Workers repeat unanswered
reads, and resend gradients together with their keys. In each shard a push has a lane and a number, so it is applied
once (Persia §4.2.4; :mod:`girih.store.memory.pushes`). Reads are remembered by trainer and batch, not by client,
because a restarted worker is another client.

For trainers in step, the server collects the gradients of one step from all trainers and applies their sum once, as in
one process. Rows that are read ahead are older, but every step updates each row once.

Shapes: G groups, K keys, S shards, T tables, W columns of a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import Parts
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.cluster.roles import RoleName
from girih.comm.rpc import Request
from girih.comm.service import Meeting, Service, as_float, as_text, attempt, from_text
from girih.errors import Lost, WireError
from girih.processes.segments import remove_segments
from girih.publishing.shards import SegmentRows
from girih.services.queued_lookup import QueuedLookup
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.shards import FEW_IDS, as_rows, run_parts
from girih.sparse.protocol import (
    KEYS_MISSING,
    NO_TURN,
    NO_VERSION,
    TOOK_NO_PART,
    DoneBatches,
    SparseVerb,
    push_of,
)
from girih.sparse.routing.shard_queues import ShardQueues
from girih.sparse.routing.sorted_keys import GradientSums, PartUpdate, SortedKeys
from girih.sparse.spec import SparseSpec
from girih.store import Push
from girih.store.spec import LAST_STEP
from girih.telemetry.stats import UPDATES_SINCE_READ

_Reads = tuple[list[SortedKeys], int | None]
"""The keys that a request read per group, and the number of updates before it.

The number is None if an earlier incarnation read the rows.
"""
_Part = tuple[Request, _Reads]
"""A trainer's request with the gradients of a step, or to drop the step; and the rows that it read before."""


QUEUED = (SparseVerb.LOOKUP, SparseVerb.UPDATE, SparseVerb.DROP)
"""The requests that do not wait until the queues are empty."""


@dataclass(kw_only=True)
class EmbeddingServer(Service):
    """One of several embedding servers, each with the same number of shards of every table.

    It writes files while it answers requests.

    Attributes:
        num_senders: the number of senders that number their pushes, so that a resent push is applied once. None if
            pushes are never resent.
        recovery_note: see :class:`Service`.
        num_contributors: trainers whose gradients of a step are applied as one; 1 applies each trainer's gradients
            immediately.
        segment: prefix of the names of shared memory, which holds the shards unless ``[store]`` says otherwise. None
            keeps the shards private to the process.
    """

    name = RoleName.EMBEDDING_SERVER
    verbs = SparseVerb
    spec: SparseSpec
    num_servers: int
    num_contributors: int
    segment: str | None = None
    num_senders: int | None = None
    recovery_note: str = ""

    def open(self, closing: ExitStack) -> None:
        """See :class:`Service`."""
        segment = None if self.segment is None else f"{self.segment}-{self.index}"
        if segment is not None and not self.incarnation:  # left by a process killed at its start
            remove_segments(f"{segment}-")
        self._shards = LocalShards(
            self.spec.groups(),
            self.spec.store,
            place=self.index,
            num_places=self.num_servers,
            segment=segment,
            attach=self.incarnation > 0,
        )
        closing.callback(remove_segments, "" if segment is None else f"{segment}-")
        closing.callback(self._shards.close)
        closing.callback(self.stats.unwatch)
        self.recovery_note = self._shards.repair_summary()
        self._queues = ShardQueues(self._shards.shards_each, self._shards.num_threads, self.stats)
        closing.callback(self._queues.close)
        self._sums = [GradientSums() for _ in self._queues.parts]
        self._reads: dict[tuple[int, int], _Reads] = {}  # by trainer and number
        self._num_updates = 0  # of all trainers
        self._done: defaultdict[int, DoneBatches] = defaultdict(DoneBatches)  # of each trainer
        # by turn
        self._turns: defaultdict[int, Meeting[_Part]] = defaultdict(lambda: Meeting(self.num_contributors))
        self._running: set[Push] = set()  # pushes in the queues
        self._num_lost, self._last_step = 0, 0
        self._saves: dict[str, ShardsSave | SegmentRows] = {}  # begun and not ended
        self._writing = closing.enter_context(ThreadPoolExecutor(1, "girih-write"))
        self._sending = closing.enter_context(ThreadPoolExecutor(2, "girih-send"))
        self.stats.watch(self._shards.live)
        self.stats.watch(lambda: {"queues": {"requests": self._queues.num_waiting}})
        super().open(closing)

    def handle(self, request: Request) -> None:
        """Accepts a request."""
        if request.frame.kind == SparseVerb.WRITE:
            self._writing.submit(attempt, request, partial(self._finish, "save", request))
        elif request.frame.kind == SparseVerb.SEND:
            name = _segment_name(is_whole=bool(request.frame.fields[0]))
            self._sending.submit(attempt, request, partial(self._finish, name, request))
        else:
            self.answer(request, partial(self._answer, request))

    def _answer(self, request: Request) -> None:
        """Handles a request, in the thread that takes requests."""
        if request.frame.kind not in QUEUED:
            self._queues.drain()
        self._methods[request.frame.kind](request)

    def on_lookup(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        _, trainer, number, step, answered, train = request.frame.fields
        asked = self._asked(request)
        staleness = 0
        if train:
            self._done[trainer].reach(answered)
            staleness = number - self._done[trainer].count
            self._last_step = max(self._last_step, step)
            self._reads[trainer, number] = asked, self._num_updates
        lookup = QueuedLookup(request, self._shards.stores, asked, step, staleness, bool(train), self.stats)
        self.stats.counters["served_keys"] += lookup.num_keys
        awaited = [p for p, shards in enumerate(self._queues.parts) if lookup.concerns(shards)]
        self._queues.put("lookup", lookup.read, lookup.answer, awaited, at_once=lookup.num_keys < FEW_IDS)

    def _asked(self, request: Request) -> list[SortedKeys]:
        """Returns the keys of all groups after checking the request, before any rows are created."""
        arrays, (_, _, number, step, _, train) = request.frame.arrays, request.frame.fields
        num_arrays = 3 * len(self._shards.stores)
        if len(arrays) != num_arrays or number < 0 or (train and not 1 <= step <= LAST_STEP):
            raise WireError(
                f"{len(arrays)} arrays, number {number}, step {step}; expected {num_arrays}, 0 or more, 1 to {LAST_STEP}"
            )
        requests = zip(self._shards.stores, arrays[::3], arrays[1::3], arrays[2::3], strict=True)
        return [SortedKeys.received(*each) for each in requests]

    def on_update(self, request: Request) -> None:
        """Takes one trainer's gradients of a step, or its drop. Applies the turn when all parts came."""
        sample, trainer, number, turn = request.frame.fields[:4]
        key = trainer, number
        no_reads: _Reads = ([], None)  # a dropped batch has read nothing
        reads = self._reads.get(key, no_reads)
        if turn == NO_TURN or self._was_applied(trainer, turn):
            self._reads.pop(key, None)
            self._done[trainer].add(number)
            request.reply()
            return
        if request.frame.kind == SparseVerb.UPDATE:
            if reads is no_reads:
                if self.num_senders is None:
                    raise WireError(
                        f"gradients of sample {sample}: this server has not read its rows for the sender"
                    )
                num_groups, arrays = len(self._shards.stores), request.frame.arrays
                if len(arrays) == num_groups:
                    request.reply((KEYS_MISSING,))
                    return
                keys_sent = zip(arrays[num_groups::2], arrays[num_groups + 1 :: 2], strict=True)
                by_group = zip(self._shards.stores, keys_sent, strict=True)
                reads = [SortedKeys.received(stores, *keys) for stores, keys in by_group], None
            self._check(request, reads)
        self._reads.pop(key, None)
        self._turns[turn].waiting[trainer] = request, reads
        if self._turns[turn].is_complete:
            self._apply_turn(self._turns.pop(turn).end())

    on_drop = on_update

    def _push_of(self, trainer: int, turn: int) -> Push | None:
        return None if self.num_senders is None else push_of(self.num_senders, trainer, turn)

    def _was_applied(self, trainer: int, turn: int) -> bool:
        """Returns whether a turn ended before this part of it was resent."""
        push = self._push_of(trainer, turn)
        if push in self._running:
            self._queues.drain()
        return push is not None and self._shards.have_applied(push)

    def _check(self, request: Request, reads: _Reads) -> None:
        """Refuses gradients that do not fit the rows that were read, before anybody waits for them."""
        *_, step, lr_scale = request.frame.fields
        scale = as_float(lr_scale)
        if len(request.frame.fields) != 6 or not 1 <= step <= LAST_STEP or not 0.0 <= scale < math.inf:
            raise WireError(
                f"step {step}, lr_scale {scale}; expected 1 to {LAST_STEP}, and a number from 0 on"
            )
        gradients = request.frame.arrays[: len(self._shards.stores)]
        for stores, keys, gradient in zip(self._shards.stores, reads[0], gradients, strict=True):
            if gradient.shape != TOOK_NO_PART:
                spec = stores[0].spec
                as_rows(gradient, len(keys.keys), spec.dim, f"gradients of group {spec.name!r}")

    def _apply_turn(self, parts: Sequence[_Part]) -> None:
        """Sums the parts of a turn, in the order of trainers, and puts the update into the queues."""
        requests = [request for request, _ in parts]
        updates = [part for part in parts if part[0].frame.kind == SparseVerb.UPDATE]
        try:
            with self.stats.spans("sum"):
                sums = self._sum(updates)
        except Exception as error:
            _answer_all(requests, error)
            return
        for _, (_, num_before) in updates:
            if num_before is not None:
                self.stats.histograms[UPDATES_SINCE_READ][self._num_updates - num_before] += 1
        self._num_updates += bool(updates)
        _, trainer, _, turn = requests[0].frame.fields[:4]
        push = self._push_of(trainer, turn)
        if push is not None:
            self._running.add(push)
        for request in requests:
            _, trainer, number = request.frame.fields[:3]
            self._done[trainer].add(number)

        def apply(shards: range) -> None:
            part = self._queues.parts.index(shards)
            for stores, update in zip(self._shards.stores, sums[part], strict=True):
                if update is not None:
                    *_, step, lr_scale = updates[0][0].frame.fields
                    update.apply(stores, shards, step, as_float(lr_scale), push)
                elif push is not None:
                    for s in shards:
                        stores[s].note_push(push)

        def done(error: Exception | None) -> None:
            if push is not None:
                self._running.discard(push)
            _answer_all(requests, error)

        num_keys = sum(len(keys.keys) for _, (reads, _) in updates for keys in reads)
        self._queues.put("update", apply, done, range(len(sums)), at_once=num_keys < FEW_IDS)

    def _sum(self, parts: Sequence[_Part]) -> list[list[PartUpdate | None]]:
        """Returns the sum of the gradients of all trainers, by part of the shards and by group.

        None stands for a group that took no part in the loss.
        """
        by_group: list[list[tuple[SortedKeys, NDArray[np.float32]]]] = []
        for g, stores in enumerate(self._shards.stores):
            answers = [(reads[g], request.frame.arrays[g]) for request, (reads, _) in parts]
            if all(gradient.shape == TOOK_NO_PART for _, gradient in answers):
                answers = []
            dim = stores[0].spec.dim
            by_group.append([(keys, _or_zeros(gradient, keys, dim)) for keys, gradient in answers])

        def sum_part(p: int) -> list[PartUpdate | None]:
            sums, shards = self._sums[p], self._queues.parts[p]
            groups = zip(self._shards.stores, by_group, strict=True)
            return [sums.sum(stores, shards, answers) if answers else None for stores, answers in groups]

        num_keys = sum(len(keys.keys) for answers in by_group for keys, _ in answers)
        return run_parts(self._shards.pool, len(self._sums), sum_part, num_keys)

    def on_reset(self, request: Request) -> None:
        """Drops the reads of trainers that have ended, and the incomplete turns."""
        self._num_lost += len(self._reads) + sum(len(turn.waiting) for turn in self._turns.values())
        self._reads.clear()
        self._turns.clear()
        self._done.clear()
        self._shards.forget_pushes()
        self._writing.submit(int).result()  # waits for the write in progress, which nobody will complete
        for name in list(self._saves):
            self._end_save(name)
        request.reply((self._num_lost, self._last_step))

    def snapshot(self, *, spans: bool) -> object:
        """See :class:`Service`."""
        store = {"store": self._shards.counters(), "rows": self._shards.rows()}
        return {**self.stats.snapshot(spans=spans), **store}

    def on_save(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        self._end_save("save")  # left by a client that got no reply to its request to save
        whole = self._saves.get(_segment_name(is_whole=True))
        if whole is not None and not isinstance(whole, ShardsSave):
            whole.wait_copied()
        self._saves["save"] = self._shards.begin_save(Storage(from_text(request.frame.arrays[0])))
        request.reply()

    def on_has_changes(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        (since,) = request.frame.fields
        request.reply((int(self._shards.knows_changes(since)),))

    def on_segment(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, since = request.frame.fields
        name = _segment_name(is_whole=since == NO_VERSION)
        self._end_save(name)
        writer = Storage(from_text(request.frame.arrays[0]))
        self._saves[name] = self._shards.begin_segment(writer, number, None if since == NO_VERSION else since)
        request.reply()

    def _finish(self, name: str, request: Request) -> None:
        """Writes a save that was begun, or drops it."""
        save, must_write = self._saves.get(name), request.frame.fields[-1]
        if save is None and must_write:
            raise Lost(f"the rows of the moment when this {name} began are gone: their server restarted")
        try:
            parts: Parts = save.write() if save is not None and must_write else {}
        finally:
            if self._saves.get(name) is save:
                self._end_save(name)
        request.reply((), (as_text(parts),))

    def _end_save(self, name: str) -> None:
        if (save := self._saves.pop(name, None)) is not None:
            save.close()

    def on_load(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        self._shards.load(PartReader.from_dict(from_text(request.frame.arrays[0])))
        request.reply()


def _segment_name(*, is_whole: bool) -> str:
    return "snapshot" if is_whole else "segment"


def _answer_all(requests: Sequence[Request], error: Exception | None) -> None:
    for request in requests:
        if error is None:
            request.reply()
        else:
            request.fail(error)


def _or_zeros(gradient: NDArray[np.float32], keys: SortedKeys, dim: int) -> NDArray[np.float32]:
    """Returns the gradient, or zeros for a trainer whose examples took no part in the loss."""
    return np.zeros((len(keys.keys), dim), np.float32) if gradient.shape == TOOK_NO_PART else gradient
