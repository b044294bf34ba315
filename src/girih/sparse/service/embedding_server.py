"""An embedding server: shards that workers ask for rows and give gradients (Persia §4.1 step 7, §4.2.2).

Requests are done one after the other, each by the threads of all shards. What was read is remembered until its
gradients come, so that they need no keys.

Of trainers in step, the gradients of one step are collected from all of them and their sum is applied once, as in one
process: what is read ahead is older, but every step moves each row once.

Shapes: G groups, K keys, T tables, W columns of a row.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import Parts
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.cluster.roles import RoleName
from girih.cluster.segments import remove_segments
from girih.comm.rpc import Request, listen
from girih.errors import NonFiniteError
from girih.runs.stats import Stats
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.routing.shard_reader import LookupResult, ShardReader
from girih.sparse.service.protocol import NO_TURN, Verb, as_float, as_text, from_text
from girih.sparse.spec import SparseSpec

NO_VALUES = np.empty((0, 0), np.float32)


@dataclass
class _Read:
    """The reads of one request from each group, kept until its gradients come."""

    keys: list[NDArray[np.int64]]
    lengths: list[NDArray[np.int64]]
    served: list[LookupResult]


@dataclass
class _Part:
    """One trainer's gradients of a step, or none (``gradients`` is None) where it refused the step."""

    read: _Read
    gradients: list[NDArray[np.float32]] | None
    step: int
    lr_scale: float
    request: Request


@dataclass
class EmbeddingServer:
    """One server of several, with as many shards of every table as each other.

    Attributes:
        num_contributors: how many trainers' gradients of a step are applied as one; 1 applies each as it comes.
        address: where to listen; see :func:`girih.comm.rpc.listen`.
        segment: begins the names of shared memory: shards lie there, unless ``[store]`` says otherwise. None keeps
            them private to the process.
    """

    spec: SparseSpec
    index: int
    num_servers: int
    num_contributors: int
    address: str
    secret: bytes
    segment: str | None = None
    incarnation: int = 0
    name: str = RoleName.EMBEDDING_SERVER

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        segment = None if self.segment is None else f"{self.segment}-{self.index}"
        shards = LocalShards(
            self.spec.groups(),
            self.spec.store,
            place=self.index,
            num_places=self.num_servers,
            segment=segment,
        )
        try:
            work = _Work(shards, self.num_contributors)
            with (
                ThreadPoolExecutor(1, "girih-serve") as pool,
                ThreadPoolExecutor(1, "girih-write") as writing,
                listen(
                    work.handler(pool, writing),
                    address=self.address,
                    secret=self.secret,
                    incarnation=self.incarnation,
                ) as server,
            ):
                ready(server.address)
                stop.wait()
        finally:
            shards.close()
            if segment is not None:
                remove_segments(f"{segment}-")


class _Work:
    """The work of a server, request by request."""

    def __init__(self, shards: LocalShards, num_contributors: int) -> None:
        self._shards = shards
        self._num_contributors = num_contributors
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._reads: dict[tuple[int, int], _Read] = {}
        self._done: Counter[int] = Counter()  # of each trainer: batches applied or dropped
        self._parts: defaultdict[int, dict[int, _Part]] = defaultdict(dict)  # of each turn, by trainer
        self._stats = Stats()
        self._save: ShardsSave | None = None

    def handler(self, pool: ThreadPoolExecutor, writing: ThreadPoolExecutor) -> Callable[[Request], None]:
        """Takes requests in; those that write files are done beside the others."""
        verbs = {
            Verb.LOOKUP: self._lookup, Verb.UPDATE: self._update, Verb.DROP: self._drop, Verb.STATS: self._read_stats,
            Verb.SAVE: self._begin_save, Verb.LOAD: self._load, Verb.WRITE: self._write,
        }  # fmt: skip

        def do(request: Request) -> None:
            try:
                verbs[Verb(request.frame.kind)](request)
            except Exception as error:
                request.fail(error)

        def handle(request: Request) -> None:
            (writing if request.frame.kind == Verb.WRITE else pool).submit(do, request)

        return handle

    def _lookup(self, request: Request) -> None:
        ticket, trainer, number, step, train = request.frame.fields
        staleness = number - self._done[trainer] if train else 0
        read = _Read([], [], [])
        with self._stats.spans("lookup"):
            for g, reader in enumerate(self._readers):
                lengths, keys, counts = request.frame.arrays[3 * g : 3 * g + 3]
                served = reader.read(
                    keys, counts, lengths[None, :], step, train=bool(train), take=request.buffer
                )
                read.keys.append(np.array(keys))
                read.lengths.append(np.array(lengths))
                read.served.append(served)
                self._stats.counters["served_keys"] += len(keys)
        values = [served.values for served in read.served]
        self._stats.sent("embeddings", sum(each.nbytes for each in values))
        if train:
            for served in read.served:
                served.values = NO_VALUES  # they are sent, and not needed here again
            self._reads[request.client, ticket] = read
        request.reply((staleness,), values)

    def _update(self, request: Request) -> None:
        ticket, trainer, _, turn, step, lr_scale = request.frame.fields
        read = self._reads.pop((request.client, ticket))
        gradients = [np.asarray(array) for array in request.frame.arrays]
        part = _Part(read, gradients, step, as_float(lr_scale), request)
        self._take_part(trainer, turn, part)

    def _drop(self, request: Request) -> None:
        ticket, trainer, _, turn = request.frame.fields
        read = self._reads.pop((request.client, ticket))
        if turn == NO_TURN:
            self._done[trainer] += 1
            request.reply((0,))
        else:
            self._take_part(trainer, turn, _Part(read, None, 0, 1.0, request))

    def _take_part(self, trainer: int, turn: int, part: _Part) -> None:
        """Applies the gradients of a turn once all are here."""
        parts = self._parts[turn]
        parts[trainer] = part
        if len(parts) < self._num_contributors:
            return
        del self._parts[turn]
        in_order = [parts[rank] for rank in sorted(parts)]
        try:
            with self._stats.spans("update"):
                dropped = self._apply([each for each in in_order if each.gradients is not None])
        except Exception as error:
            for each in in_order:
                each.request.fail(error)
            return
        for rank in parts:
            self._done[rank] += 1
        for each in in_order:
            each.request.reply((dropped,))

    def _apply(self, parts: list[_Part]) -> int:
        """Applies the sum of all parts, in the order of trainers; returns how many gradients had no row."""
        dropped, sums = 0, []
        for g, reader in enumerate(self._readers):
            given = [(p.read, p.gradients[g]) for p in parts if p.gradients is not None]
            if not any(gradient.shape[1] for _, gradient in given):  # no width: it took no part in the loss
                continue
            gradients = [
                gradient if gradient.size else np.zeros((len(read.keys[g]), reader.dim), np.float32)
                for read, gradient in given
            ]
            served = given[0][0].served[g]
            if len(given) > 1:
                served = reader.join(
                    np.concatenate([read.keys[g] for read, _ in given]),
                    np.stack([read.lengths[g] for read, _ in given]),
                )
            joined = gradients[0] if len(gradients) == 1 else np.concatenate(gradients)
            totals, table = reader.sum_gradients(served, joined)
            if table is not None:
                raise NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")
            sums.append((reader, served, totals))
        for reader, served, totals in sums:
            dropped += reader.apply(served, totals, parts[0].step, parts[0].lr_scale)
        return dropped

    def _read_stats(self, request: Request) -> None:
        store = {"store": self._shards.counters(), "rows": self._shards.rows()}
        request.reply((), (as_text({**self._stats.snapshot(spans=bool(request.frame.fields[0])), **store}),))

    def _begin_save(self, request: Request) -> None:
        self._save = self._shards.begin_save(Storage(from_text(request.frame.arrays[0])))
        request.reply()

    def _write(self, request: Request) -> None:
        save, self._save = self._save, None
        parts: Parts = {}
        if save is not None:
            try:
                if not request.frame.fields or request.frame.fields[0]:
                    parts = save.write()
            finally:
                save.close()
        request.reply((), (as_text(parts),))

    def _load(self, request: Request) -> None:
        self._shards.load(PartReader.from_dict(from_text(request.frame.arrays[0])))
        request.reply()
