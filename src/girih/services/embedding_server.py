"""An embedding server: shards whose rows workers read and update (Persia §4.1 step 7, §4.2.2).

The server handles requests one after the other, each with the threads of all shards. It remembers the keys that a
request read until their gradients come, so that messages with gradients need no keys.

A killed server restarts with its shards, in shared memory, but without the remembered keys. Workers repeat unanswered
reads, and resend gradients together with their keys. In each shard a push has a lane and a number, so it is applied
once (Persia §4.2.4; :mod:`girih.store.memory.pushes`). Reads are remembered by trainer and batch, not by client,
because a restarted worker is another client.

For trainers in step, the server collects the gradients of one step from all trainers and applies their sum once, as in
one process. Rows that are read ahead are older, but every step updates each row once.

Shapes: G groups, K keys, T tables, W columns of a row.
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
from girih.errors import Lost, NonFiniteError, WireError
from girih.processes.segments import remove_segments
from girih.publishing.shards import SegmentRows
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.shards import GroupKeys, as_rows
from girih.sparse.protocol import (
    KEYS_MISSING,
    NO_TURN,
    NO_VERSION,
    TOOK_NO_PART,
    DoneBatches,
    SparseVerb,
    push_of,
)
from girih.sparse.routing.shard_reader import MergedRequest as KeysOfAll
from girih.sparse.routing.shard_reader import ShardReader
from girih.sparse.spec import SparseSpec
from girih.store import Push
from girih.store.spec import LAST_STEP
from girih.telemetry.stats import UPDATES_SINCE_READ


@dataclass(frozen=True)
class _OpenRead:
    """Keys and rows that a request read from one group, kept until its gradients come."""

    keys: NDArray[np.int64]
    lengths: NDArray[np.int64]
    group_keys: GroupKeys | None


_Reads = tuple[list[_OpenRead], int | None]
"""The rows that a request read per group, and the number of updates before it.

The number is None if an earlier incarnation read the rows.
"""
_Part = tuple[Request, _Reads]
"""A trainer's request with the gradients of a step, or to drop the step; and the rows that it read before."""


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
        self._readers = [ShardReader(stores, self._shards.pool) for stores in self._shards.stores]
        self._reads: dict[tuple[int, int], _Reads] = {}  # by trainer and number
        self._num_updates = 0  # of all trainers
        self._done: defaultdict[int, DoneBatches] = defaultdict(DoneBatches)  # of each trainer
        # by turn
        self._turns: defaultdict[int, Meeting[_Part]] = defaultdict(lambda: Meeting(self.num_contributors))
        self._num_lost, self._last_step = 0, 0
        self._saves: dict[str, ShardsSave | SegmentRows] = {}  # begun and not ended
        self._writing = closing.enter_context(ThreadPoolExecutor(1, "girih-write"))
        self._sending = closing.enter_context(ThreadPoolExecutor(2, "girih-send"))
        self.stats.watch(self._shards.live)
        super().open(closing)

    def handle(self, request: Request) -> None:
        """Accepts a request."""
        if request.frame.kind == SparseVerb.WRITE:
            self._writing.submit(attempt, request, partial(self._finish, "save", request))
        elif request.frame.kind == SparseVerb.SEND:
            name = _segment_name(is_whole=bool(request.frame.fields[0]))
            self._sending.submit(attempt, request, partial(self._finish, name, request))
        else:
            super().handle(request)

    def on_lookup(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        _, trainer, number, step, answered, train = request.frame.fields
        self._check_keys(request, number)
        reads, values, absent, staleness = [], [], [], 0
        with self.stats.spans("lookup"):
            for g, reader in enumerate(self._readers):
                lengths, keys, counts = request.frame.arrays[3 * g : 3 * g + 3]
                group_keys, rows = reader.read(
                    keys, counts, lengths[None, :], step, train=bool(train), take=request.buffer
                )
                reads.append(_OpenRead(np.array(keys), np.array(lengths), group_keys))
                values.append(rows)
                if not train:
                    absent.append(group_keys.absent()[group_keys.inverse].view(np.uint8))
                self.stats.counters["served_keys"] += len(keys)
        self.stats.sent("embeddings", sum(rows.nbytes for rows in values) + sum(map(len, absent)))
        if train:
            self._done[trainer].reach(answered)
            staleness = number - self._done[trainer].count
            self._last_step = max(self._last_step, step)
            self._reads[trainer, number] = reads, self._num_updates
        request.reply((staleness,), (*values, *absent))

    def _check_keys(self, request: Request, number: int) -> None:
        """Checks that all groups have valid keys, before any rows are created."""
        arrays = request.frame.arrays
        if len(arrays) != 3 * len(self._readers) or number < 0:
            raise WireError(
                f"{len(arrays)} arrays, number {number}; expected {3 * len(self._readers)}, and 0 or more"
            )
        for reader, lengths, keys, counts in zip(
            self._readers, arrays[::3], arrays[1::3], arrays[2::3], strict=True
        ):
            if lengths.shape != (len(reader.stores[0].spec.tables),) or keys.ndim != 1 or counts.ndim != 1:
                raise WireError(f"keys of {list(lengths.shape)} tables; expected all of the group's")
            KeysOfAll.of(keys, counts, lengths[None, :])

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
                if len(request.frame.arrays) == len(self._readers):
                    request.reply((KEYS_MISSING,))
                    return
                reads = self._reads_sent_with(request)
            self._check(request, reads)
        self._reads.pop(key, None)
        self._turns[turn].waiting[trainer] = request, reads
        if self._turns[turn].is_complete:
            self._apply_turn(self._turns.pop(turn).end())

    on_drop = on_update

    def _reads_sent_with(self, request: Request) -> _Reads:
        """Returns the keys that came with gradients, after an earlier incarnation read the rows."""
        reads, arrays = [], request.frame.arrays[len(self._readers) :]
        for g, reader in enumerate(self._readers):
            lengths, keys = arrays[2 * g : 2 * g + 2]
            num_tables = len(reader.stores[0].spec.tables)
            fits = lengths.shape == (num_tables,) and lengths.dtype == keys.dtype == np.dtype(np.int64)
            if not fits or (lengths < 0).any() or keys.shape != (lengths.sum(),):
                raise WireError(
                    f"keys {keys.dtype}{list(keys.shape)} of {lengths.dtype}{list(lengths.shape)}; expected int64 keys of"
                    f" {num_tables} tables"
                )
            reads.append(_OpenRead(keys, lengths, None))
        return reads, None

    def _push_of(self, trainer: int, turn: int) -> Push | None:
        return None if self.num_senders is None else push_of(self.num_senders, trainer, turn)

    def _was_applied(self, trainer: int, turn: int) -> bool:
        """Returns whether a turn ended before this part of it was resent."""
        push = self._push_of(trainer, turn)
        return push is not None and self._shards.have_applied(push)

    def _check(self, request: Request, reads: _Reads) -> None:
        """Refuses gradients that do not fit the rows that were read, before anybody waits for them."""
        *_, step, lr_scale = request.frame.fields
        scale = as_float(lr_scale)
        if len(request.frame.fields) != 6 or not 1 <= step <= LAST_STEP or not 0.0 <= scale < math.inf:
            raise WireError(
                f"step {step}, lr_scale {scale}; expected 1 to {LAST_STEP}, and a number from 0 on"
            )
        for reader, read, gradient in zip(
            self._readers, reads[0], request.frame.arrays[: len(self._readers)], strict=True
        ):
            if gradient.shape != TOOK_NO_PART:
                as_rows(
                    gradient, len(read.keys), reader.dim, f"gradients of group {reader.stores[0].spec.name!r}"
                )

    def _apply_turn(self, parts: Sequence[_Part]) -> None:
        """Applies the parts of a turn, in the order of trainers."""
        _, trainer, _, turn = parts[0][0].frame.fields[:4]
        updates = [part for part in parts if part[0].frame.kind == SparseVerb.UPDATE]
        try:
            with self.stats.spans("update"):
                self._apply(updates, self._push_of(trainer, turn))
        except Exception as error:
            for request, _ in parts:
                request.fail(error)
            return
        for _, (_, num_before) in updates:
            if num_before is not None:
                self.stats.histograms[UPDATES_SINCE_READ][self._num_updates - num_before] += 1
        self._num_updates += bool(updates)
        for request, _ in parts:
            _, trainer, number = request.frame.fields[:3]
            self._done[trainer].add(number)
            request.reply()

    def _apply(self, parts: Sequence[_Part], push: Push | None) -> None:
        """Applies the sum of all parts, in the order of trainers."""
        sums = []
        for g, reader in enumerate(self._readers):
            answers = [(reads[g], request.frame.arrays[g]) for request, (reads, _) in parts]
            if all(gradient.shape == TOOK_NO_PART for _, gradient in answers):
                continue
            label = f"gradients of group {reader.stores[0].spec.name!r}"
            gradients = [
                as_rows(gradient, len(read.keys), reader.dim, label)
                if gradient.shape != TOOK_NO_PART
                else np.zeros((len(read.keys), reader.dim), np.float32)
                for read, gradient in answers
            ]
            group_keys = answers[0][0].group_keys if len(answers) == 1 else None
            if group_keys is None:
                group_keys = reader.join(
                    np.concatenate([read.keys for read, _ in answers]),
                    np.stack([read.lengths for read, _ in answers]),
                )
            totals, table = reader.sum_gradients(group_keys, gradients)
            if table is not None:
                raise NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")
            sums.append((reader, group_keys, totals))
        for reader, group_keys, totals in sums:
            *_, step, lr_scale = parts[0][0].frame.fields
            reader.apply(group_keys, totals, step, as_float(lr_scale), push=push)
        if push is not None and len(sums) < len(self._readers):
            self._shards.note_push(push)

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
