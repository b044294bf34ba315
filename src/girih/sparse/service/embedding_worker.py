"""An embedding worker: keeps ids until a trainer asks for them, gets rows from the servers and makes bags of them;
turns gradients of bags into gradients of rows and puts them to the servers (Persia §4.1 steps 1, 4 and 7, §4.2.1).

Shapes: B examples, G groups, U unique keys of a group, S servers, W columns of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.cluster.roles import RoleName
from girih.comm.peers import connect_all
from girih.comm.registry import Registry
from girih.comm.rpc import Client, Frame, Request, listen
from girih.data.batch import Batch
from girih.errors import GirihError
from girih.runs.stats import Stats
from girih.sparse.groups.group import bounds_in
from girih.sparse.routing.key_router import KeyRouter, RoutedKeys, ShardTopology
from girih.sparse.service.codec import Codec
from girih.sparse.service.protocol import Verb, answer, as_text
from girih.sparse.spec import SparseSpec


@dataclass
class _Sample:
    """The ids of one trainer's share, and what became of them.

    Attributes:
        source: the pass of a loader that they are from, and the trainer they are for; None once they are pulled.
    """

    batch: Batch
    source: tuple[int, int] | None
    asked: list[RoutedKeys] = field(default_factory=list)
    ticket: int = 0


@dataclass
class EmbeddingWorker:
    """One worker of several.

    Attributes:
        servers: where the embedding servers listen.
        shards_each: shards of one server.
        registry: where a server that came back is found.
        address: where to listen; see :func:`girih.comm.rpc.listen`.
    """

    spec: SparseSpec
    codec: Codec
    index: int
    servers: tuple[str, ...]
    shards_each: int
    address: str
    secret: bytes
    registry: Registry | None = None
    incarnation: int = 0
    name: str = RoleName.EMBEDDING_WORKER

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        clients = connect_all(
            RoleName.EMBEDDING_SERVER, self.servers, secret=self.secret, registry=self.registry
        )
        try:
            topology = ShardTopology(len(self.servers), self.shards_each)
            with ThreadPoolExecutor(1, "girih-worker") as pool:
                work = _Work(self, topology, clients, pool)
                with listen(
                    work.handle, address=self.address, secret=self.secret, incarnation=self.incarnation
                ) as server:
                    ready(server.address)
                    stop.wait()
        finally:
            for client in clients:
                client.close()


class _Work:
    """The work of a worker, request by request, in one thread."""

    def __init__(
        self,
        role: EmbeddingWorker,
        topology: ShardTopology,
        clients: Sequence[Client],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._codec = role.codec
        self._groups = role.spec.groups()
        self._routers = [KeyRouter(group, topology) for group in self._groups]
        self._clients, self._pool = clients, pool
        self._samples: dict[int, _Sample] = {}
        self._next_sample, self._next_ticket = 1, 1
        self._stats = Stats()
        self._verbs: dict[int, Callable[[Request], None]] = {
            Verb.STORE_IDS: self._store_ids, Verb.DROP_IDS: self._drop_ids, Verb.PULL: self._pull, Verb.PEEK: self._peek,
            Verb.PUSH: self._push, Verb.DROP: self._drop, Verb.STATS: self._read_stats,
        }  # fmt: skip

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        self._pool.submit(self._do, request, partial(self._verbs[request.frame.kind], request))

    def _do(self, request: Request, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            request.fail(error)

    def _store_ids(self, request: Request) -> None:
        source = (request.frame.fields[0], request.frame.fields[1])
        sample, self._next_sample = self._next_sample, self._next_sample + 1
        self._samples[sample] = _Sample(self._batch(request), source)
        request.reply((sample,))

    def _batch(self, request: Request) -> Batch:
        with self._stats.spans("unpack"):
            return self._codec.unpack_ids(request.frame.arrays, request.frame.fields[-1])

    def _drop_ids(self, request: Request) -> None:
        source = (request.frame.fields[0], request.frame.fields[1])
        for number in [n for n, sample in self._samples.items() if sample.source == source]:
            del self._samples[number]
        request.reply()

    def _pull(self, request: Request) -> None:
        number = request.frame.fields[0]
        sample = self._samples.get(number)
        if sample is None:
            raise GirihError(f"sample {number} is not kept here; it was forgotten, or is another worker's")
        sample.source = None
        sample.ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._ask(request, sample, (sample.ticket, *request.frame.fields[1:], 1))

    def _peek(self, request: Request) -> None:
        self._ask(request, _Sample(self._batch(request), None), (0, 0, 0, 0, 0))

    def _ask(self, request: Request, sample: _Sample, fields: tuple[int, ...]) -> None:
        """Asks all servers; their rows are pooled once all have come."""
        with self._stats.spans("dedup"):
            sample.asked = [router.ask(sample.batch) for router in self._routers]
        bounds = [asked.bounds() for asked in sample.asked]

        def arrays(server: int) -> list[NDArray[Any]]:
            parts: list[NDArray[Any]] = []
            for asked, bound in zip(sample.asked, bounds, strict=True):
                mine = slice(bound[server], bound[server + 1])
                parts += [asked.lengths(server), asked.keys[mine], asked.counts[mine]]
            self._stats.sent("ids", sum(part.nbytes for part in parts))
            return parts

        self._call_all(Verb.LOOKUP, fields, arrays, request, partial(self._pool_rows, request, sample))

    def _pool_rows(self, request: Request, sample: _Sample, frames: list[Frame]) -> None:
        outputs: list[NDArray[Any]] = []
        bounds: list[NDArray[Any]] = []
        with self._stats.spans("pool"):
            for g, router in enumerate(self._routers):
                parts = [frame.arrays[g] for frame in frames]
                values = parts[0] if len(parts) == 1 else np.concatenate(parts)
                take = None if self._codec.half_embeddings else request.buffer
                outputs += router.pool(sample.asked[g], values, sample.batch, take)
                of = bounds_in(sample.batch)
                bounds += [of(int(o.features[0])) for o in router.group.outputs if o.whole]
            packed = self._codec.pack_embeddings(outputs)
        self._stats.sent("embeddings", sum(each.nbytes for each in packed))
        request.reply((max(frame.fields[0] for frame in frames),), (*packed, *bounds))

    def _push(self, request: Request) -> None:
        number, *others = request.frame.fields
        sample = self._samples.pop(number)
        rows, first = [], 0
        with self._stats.spans("scatter"):
            gradients = self._codec.unpack_gradients(request.frame.arrays)
            for router, asked in zip(self._routers, sample.asked, strict=True):
                behind = first + len(router.group.outputs)
                given = gradients[first:behind]
                first, taking_part = behind, any(each is not None for each in given)
                totals = router.scatter(asked, given, sample.batch)[0] if taking_part else None
                rows.append((totals, asked.bounds()))

        def arrays(server: int) -> list[NDArray[Any]]:
            parts = [
                np.empty((0, 0), np.float32) if totals is None else totals[bound[server] : bound[server + 1]]
                for totals, bound in rows
            ]
            self._stats.sent("gradients", sum(part.nbytes for part in parts))
            return parts

        def done(frames: list[Frame]) -> None:
            request.reply((sum(frame.fields[0] for frame in frames),))

        self._call_all(Verb.UPDATE, (sample.ticket, *others), arrays, request, done)

    def _drop(self, request: Request) -> None:
        number, *others = request.frame.fields
        sample = self._samples.pop(number)
        fields = (sample.ticket, *others)
        self._call_all(Verb.DROP, fields, lambda _: [], request, lambda _: request.reply())

    def _read_stats(self, request: Request) -> None:
        self._stats.gauges["kept_samples"] = len(self._samples)
        request.reply((), (as_text(self._stats.snapshot(spans=bool(request.frame.fields[0]))),))

    def _call_all(
        self,
        verb: Verb,
        fields: tuple[int, ...],
        arrays: Callable[[int], list[NDArray[Any]]],
        request: Request,
        done: Callable[[list[Frame]], None],
    ) -> None:
        """Asks every server; ``done`` gets their answers, in this worker's thread."""
        replies = [client.call(verb, fields, arrays(s)) for s, client in enumerate(self._clients)]
        left, lock = [len(replies)], threading.Lock()

        def answered(_: object) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._pool.submit(self._do, request, finish)

        def finish() -> None:
            done([answer(reply) for reply in replies])

        for reply in replies:
            reply.add_done_callback(answered)
