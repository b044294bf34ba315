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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import Parts
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.cluster.roles import RoleName
from girih.cluster.segments import remove_segments
from girih.comm.messages import as_float, as_text, from_text
from girih.comm.rpc import Request
from girih.comm.serving import Service, attempt
from girih.errors import NonFiniteError
from girih.runs.stats import UPDATES_SINCE_READ, Stats
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.shards import GroupKeys, as_rows
from girih.sparse.routing.shard_reader import ShardReader
from girih.sparse.service.protocol import NO_TURN, TOOK_NO_PART, Verb
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True)
class _Read:
    """Keys and rows that a request read from one group, kept until its gradients come."""

    keys: NDArray[np.int64]
    lengths: NDArray[np.int64]
    found: GroupKeys


_Reads = tuple[list[_Read], int]
"""The rows that a request read from each group, and how many updates were applied before."""
_Part = tuple[Request, _Reads]
"""A trainer's request with the gradients of a step, or to drop it; and what it read for them."""


@dataclass
class EmbeddingServer:
    """One server of several, with as many shards of every table as each other.

    Attributes:
        num_contributors: how many trainers' gradients of a step are applied as one; 1 applies each as it comes.
        address: where to listen; see :func:`girih.comm.endpoints.listen`.
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
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)

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
            with ThreadPoolExecutor(1, "girih-write") as writing:
                _Work(shards, self.num_contributors, writing, self.stats).serve(self, ready, stop)
        finally:
            self.stats.unwatch()
            shards.close()
            if segment is not None:
                remove_segments(f"{segment}-")


class _Work(Service):
    """The work of a server, request by request; files are written beside the others."""

    def __init__(
        self, shards: LocalShards, num_contributors: int, writing: ThreadPoolExecutor, stats: Stats
    ) -> None:
        super().__init__({
            Verb.LOOKUP: self._lookup, Verb.UPDATE: self._take_part, Verb.DROP: self._take_part,
            Verb.ANEW: self._begin_anew, Verb.STATS: self._read_stats, Verb.SAVE: self._begin_save, Verb.LOAD: self._load,
        }, stats)  # fmt: skip
        self._shards, self._writing = shards, writing
        self._num_contributors = num_contributors
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._reads: dict[tuple[int, int], _Reads] = {}  # by client and sample
        self._num_updates = 0  # of all trainers
        self._done: Counter[int] = Counter()  # of each trainer: batches applied or dropped
        self._parts: defaultdict[int, dict[int, _Part]] = defaultdict(dict)  # of each turn, by trainer
        self._num_lost, self._last_step = 0, 0
        self._stats = stats
        stats.watch(shards.live)
        self._save: ShardsSave | None = None

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        if request.frame.kind == Verb.WRITE:
            self._writing.submit(attempt, request, partial(self._write, request))
        else:
            super().handle(request)

    def forget(self, client: int) -> None:
        """Frees what an embedding worker that is gone has read."""
        self.afterwards(partial(self._drop_reads, client))

    def _drop_reads(self, client: int) -> None:
        for key in [key for key in self._reads if key[0] == client]:
            del self._reads[key]

    def _lookup(self, request: Request) -> None:
        sample, trainer, number, step, train = request.frame.fields
        staleness = number - self._done[trainer] if train else 0
        reads, values = [], []
        with self._stats.spans("lookup"):
            for g, reader in enumerate(self._readers):
                lengths, keys, counts = request.frame.arrays[3 * g : 3 * g + 3]
                found, rows = reader.read(
                    keys, counts, lengths[None, :], step, train=bool(train), take=request.buffer
                )
                reads.append(_Read(np.array(keys), np.array(lengths), found))
                values.append(rows)
                self._stats.counters["served_keys"] += len(keys)
        self._stats.sent("embeddings", sum(rows.nbytes for rows in values))
        if train:
            self._last_step = max(self._last_step, step)
            self._reads[request.client, sample] = reads, self._num_updates
        request.reply((staleness,), values)

    def _take_part(self, request: Request) -> None:
        """Takes one trainer's gradients of a step, or word that it drops it; applies a turn's once all are here."""
        sample, trainer, _, turn = request.frame.fields[:4]
        reads = self._reads.pop((request.client, sample))
        if turn == NO_TURN:
            self._done[trainer] += 1
            request.reply()
            return
        self._parts[turn][trainer] = request, reads
        if len(self._parts[turn]) == self._num_contributors:
            self._apply_turn(self._parts.pop(turn))

    def _apply_turn(self, parts: dict[int, _Part]) -> None:
        in_order = [parts[trainer] for trainer in sorted(parts)]
        updates = [part for part in in_order if part[0].frame.kind == Verb.UPDATE]
        try:
            with self._stats.spans("update"):
                self._apply(updates)
        except Exception as error:
            for request, _ in in_order:
                request.fail(error)
            return
        self._done.update(parts.keys())
        for _, (_, num_before) in updates:
            self._stats.histograms[UPDATES_SINCE_READ][self._num_updates - num_before] += 1
        self._num_updates += bool(updates)
        for request, _ in in_order:
            request.reply()

    def _apply(self, parts: Sequence[_Part]) -> None:
        """Applies the sum of all parts, in the order of trainers."""
        sums = []
        for g, reader in enumerate(self._readers):
            given = [(reads[g], request.frame.arrays[g]) for request, (reads, _) in parts]
            if all(gradient.shape == TOOK_NO_PART for _, gradient in given):
                continue
            whose = f"gradients of group {reader.stores[0].spec.name!r}"
            gradients = [
                as_rows(gradient, len(read.keys), reader.dim, whose)
                if gradient.shape != TOOK_NO_PART
                else np.zeros((len(read.keys), reader.dim), np.float32)
                for read, gradient in given
            ]
            if len(given) == 1:
                found = given[0][0].found
            else:
                found = reader.join(
                    np.concatenate([read.keys for read, _ in given]),
                    np.stack([read.lengths for read, _ in given]),
                )
            totals, table = reader.sum_gradients(found, gradients)
            if table is not None:
                raise NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")
            sums.append((reader, found, totals))
        for reader, found, totals in sums:
            *_, step, lr_scale = parts[0][0].frame.fields
            reader.apply(found, totals, step, as_float(lr_scale))

    def _begin_anew(self, request: Request) -> None:
        """Drops what trainers that are gone have read, and their part of steps that others never ended."""
        self._num_lost += len(self._reads) + sum(map(len, self._parts.values()))
        self._reads.clear()
        self._parts.clear()
        self._done.clear()
        save, self._save = self._save, None
        if save is not None:
            save.close()
        self._writing.submit(int).result()  # one that is being written, which nobody will complete
        request.reply((self._num_lost, self._last_step))

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
            with closing(save):
                parts = save.write() if request.frame.fields[0] else {}
        request.reply((), (as_text(parts),))

    def _load(self, request: Request) -> None:
        self._shards.load(PartReader.from_dict(from_text(request.frame.arrays[0])))
        request.reply()
