"""An embedding worker: keeps ids, makes bags of rows, and sends gradients to servers (Persia §4.1 steps 1, 4 and 7).

The worker keeps ids until a trainer asks for them, gets rows from the servers and pools them. It turns gradients of
bags into gradients of rows and sends these to the servers (§4.2.1).

A killed worker restarts empty. When a trainer finds ids missing, their loader resends them, and the trainer resends
gradients, under the same number. Servers skip gradients that they have already applied.

Shapes: B examples, G groups, U unique keys of a group, S servers, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.cluster.roles import RoleName
from girih.comm.registry import Registry
from girih.comm.registry.remote import CONNECTED_S, RETURN_S, calls_of, connect_all
from girih.comm.rpc import Frame, Reply, Request
from girih.comm.service import Service, answer
from girih.data.batch import Batch
from girih.errors import GirihError, Lost, WireError
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.group import FeatureCounts
from girih.sparse.groups.pack import Group, by_group, sequence_bounds
from girih.sparse.groups.shards import UniqueRows, as_rows
from girih.sparse.protocol import KEYS_MISSING, TOOK_NO_PART, BatchCodec, SparseVerb
from girih.sparse.routing.key_router import KeyRouter, RoutedKeys
from girih.sparse.spec import SparseSpec
from girih.store.spec import LAST_STEP

LIFE_BITS = 40
"""Sample numbers begin with the incarnation, so that samples of earlier incarnations are recognized."""


@dataclass
class _KeptIds:
    """The ids of one trainer's share, and their routed keys.

    Attributes:
        source: the loader's pass, the trainer, and the number of the share; None once they are pulled.
    """

    batch: Batch
    source: tuple[int, int, int] | None
    asked: list[RoutedKeys] = field(default_factory=list)

    def keys_of(self, server: int) -> list[NDArray[Any]]:
        """Returns the keys of one server: lengths and keys of each group."""
        return [part for asked in self.asked for part in asked.of_place(server)[:2]]


@dataclass(kw_only=True)
class EmbeddingWorker(Service):
    """One of several embedding workers.

    Attributes:
        servers: addresses of the embedding servers.
        shards_each: shards of one server.
        registry: lists the processes. The worker reads the address of a restarted server there.
        resends: if True, the worker survives restarts. It sends requests again that a server lost. After its own
            restart, it computes the lost keys again.
        prefetch: if True, the worker computes and routes the unique keys when ids arrive. Otherwise it does so when
            a trainer asks for them.
    """

    name = RoleName.EMBEDDING_WORKER
    verbs = SparseVerb
    spec: SparseSpec
    codec: BatchCodec
    servers: tuple[str, ...]
    shards_each: int
    registry: Registry | None = None
    prefetch: bool = False
    resends: bool = False

    def open(self, closing: ExitStack) -> None:
        """See :class:`Service`."""
        clients = connect_all(
            RoleName.EMBEDDING_SERVER,
            self.servers,
            secret=self.secret,
            registry=self.registry,
            timeout_s=RETURN_S if self.resends else CONNECTED_S,
        )
        self._clients = [closing.enter_context(client) for client in clients]
        self._groups = self.spec.groups()
        self._features = FeatureCounts(self._groups)
        self._routers = [
            KeyRouter(group, len(self._clients), self.shards_each, by_shard=True) for group in self._groups
        ]
        self._samples: dict[int, _KeptIds] = {}
        self._numbers = count((self.incarnation << LIFE_BITS) + 1)
        self.stats.watch(lambda: {"queues": {"samples": len(self._samples)}, **calls_of(self._clients)})
        super().open(closing)

    def on_store_ids(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        of_pass, trainer, share, _ = request.frame.fields
        number = next(self._numbers)
        self._samples[number] = sample = _KeptIds(self._batch(request), (of_pass, trainer, share))
        request.reply((number,))
        if self.prefetch:
            self.afterwards(lambda: self._find_keys(sample))

    def _batch(self, request: Request) -> Batch:
        with self.stats.spans("unpack"):
            return self.codec.unpack_ids(request.frame.arrays, request.frame.fields[-1])

    def on_drop_ids(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        of_pass, trainer, taken = request.frame.fields
        for number, sample in list(self._samples.items()):
            # the request to pull a taken sample may still be on its way
            if (
                sample.source is not None
                and sample.source[:2] == (of_pass, trainer)
                and sample.source[2] >= taken
            ):
                del self._samples[number]
        request.reply()

    def on_pull(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, _, batch, step, answered = request.frame.fields
        if batch < 0 or answered < 0 or not 1 <= step <= LAST_STEP:
            raise WireError(
                f"batch {batch}, step {step}, {answered} answered; expected 0 or more, 1 to {LAST_STEP}, 0 or more"
            )
        sample = self._kept(number)
        sample.source = None
        self._features.add_training(sample.batch)
        self._ask(request, sample, (*request.frame.fields, 1))

    def on_peek(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        self._ask(request, _KeptIds(self._batch(request), None), (0, 0, 0, 0, 0, 0))

    def _ask(self, request: Request, sample: _KeptIds, fields: tuple[int, ...]) -> None:
        """Asks all servers, and pools their rows when all have come."""
        self._find_keys(sample)
        parts = [
            [part for asked in sample.asked for part in asked.of_place(server)]
            for server in range(len(self._clients))
        ]
        self.stats.sent("ids", sum(part.nbytes for of_server in parts for part in of_server))
        self._call_all(SparseVerb.LOOKUP, fields, parts, request, partial(self._pool_rows, request, sample))

    def _find_keys(self, sample: _KeptIds) -> None:
        """Finds and routes the unique keys of a batch, once."""
        if not sample.asked:
            with self.stats.spans("dedup"):
                sample.asked = [router.ask(sample.batch) for router in self._routers]

    def _pool_rows(self, request: Request, sample: _KeptIds, frames: list[Frame]) -> None:
        outputs: list[NDArray[Any]] = []
        with self.stats.spans("pool"):
            for g, (router, asked) in enumerate(zip(self._routers, sample.asked, strict=True)):
                sizes, spec = np.diff(asked.bounds()).tolist(), router.group.spec
                rows = UniqueRows.received(
                    [frame.arrays[g] for frame in frames], sizes, spec.dim, f"rows of group {spec.name!r}"
                )
                take = None if self.codec.float16_embeddings else request.buffer
                outputs += router.bags.pool(rows, asked.keys, sample.batch, take)
                absent = [array for frame in frames for array in frame.arrays[len(self._groups) + g :][:1]]
                if absent:  # only in evaluations
                    inverse = asked.keys.inverse
                    self._features.add_evaluation(sample.batch, router.group, inverse, np.concatenate(absent))
            packed = self.codec.pack_embeddings(outputs)
        bounds = sequence_bounds(self._groups, sample.batch)
        self.stats.sent("embeddings", sum(array.nbytes for array in packed))
        request.reply((max(frame.fields[0] for frame in frames),), (*packed, *bounds))

    def on_push(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, _, _, _, _, _ = request.frame.fields
        sample = self._kept(number)
        self._find_keys(sample)  # an earlier incarnation may have read the rows
        parts: list[list[NDArray[Any]]] = [[] for _ in self._clients]
        with self.stats.spans("scatter"):
            gradients = by_group(self._groups, self.codec.unpack_gradients(request.frame.arrays))
            for router, asked, group_gradients in zip(self._routers, sample.asked, gradients, strict=True):
                totals = np.empty(TOOK_NO_PART, np.float32)
                if any(gradient is not None for gradient in group_gradients):
                    _check_gradients(group_gradients, router.group, sample.batch)
                    totals, _ = router.bags.scatter(group_gradients, asked.keys, sample.batch)
                for of_server, (first, behind) in zip(parts, pairwise(asked.bounds()), strict=True):
                    of_server.append(totals[first:behind])
        self.stats.sent("gradients", sum(part.nbytes for of_server in parts for part in of_server))
        self._call_all(
            SparseVerb.UPDATE,
            request.frame.fields,
            parts,
            request,
            partial(self._pushed, request),
            keys=sample.keys_of,
        )

    def _pushed(self, request: Request, frames: list[Frame]) -> None:
        self._samples.pop(request.frame.fields[0], None)
        request.reply()

    def on_drop(self, request: Request) -> None:
        """See :class:`SparseVerb`."""
        number, _, _, _ = fields = request.frame.fields
        if not self._was_lost(number):
            self._kept(number)
            del self._samples[number]
        no_arrays = [()] * len(self._clients)
        self._call_all(SparseVerb.DROP, fields, no_arrays, request, lambda _: request.reply())

    def _kept(self, number: int) -> _KeptIds:
        """Returns a sample that is kept.

        Raises:
            Lost: an earlier incarnation of this worker had it.
        """
        sample = self._samples.get(number)
        if sample is None and self._was_lost(number):
            raise Lost(f"sample {number} was kept by this worker before its restart")
        if sample is None:
            raise GirihError(
                f"sample {number} is not kept here; it was dropped, is pushed already, or belongs to another worker"
            )
        return sample

    def _was_lost(self, number: int) -> bool:
        """Returns whether an earlier incarnation of this worker gave the number."""
        return 0 < number < self.incarnation << LIFE_BITS

    def snapshot(self, *, spans: bool) -> object:
        """See :class:`Service`."""
        self.stats.gauges["kept_samples"] = len(self._samples)
        return {**self.stats.snapshot(spans=spans), "features": self._features.read()}

    def _call_all(
        self,
        verb: SparseVerb,
        fields: tuple[int, ...],
        arrays: Sequence[Sequence[NDArray[Any]]],
        request: Request,
        done: Callable[[list[Frame]], None],
        keys: Callable[[int], Sequence[NDArray[Any]]] | None = None,
    ) -> None:
        """Asks every server, each with separate arrays. ``done`` gets their answers, in this worker's thread.

        If a server restarted before it answered, it is asked again.

        Args:
            keys: returns the keys of a server, to resend after its restart together with the arrays.
        """
        replies: dict[int, Reply] = {}
        num_answers = count(1)  # next() is one operation, which no thread interrupts

        def ask(server: int, more: Sequence[NDArray[Any]] = ()) -> None:
            reply = self._clients[server].call(verb, fields, (*arrays[server], *more))
            reply.add_done_callback(lambda _: answered(server, reply))

        def answered(server: int, reply: Reply) -> None:
            if self.resends and _is_to_come_again(verb, reply):
                self.later(request, lambda: ask(server, () if keys is None else keys(server)))
                return
            replies[server] = reply
            if next(num_answers) == len(arrays):
                self.later(request, lambda: done([answer(replies[server]) for server in range(len(arrays))]))

        for server in range(len(arrays)):
            ask(server)


def _is_to_come_again(verb: SparseVerb, reply: Reply) -> bool:
    """Returns whether a request must be resent: a server's restart lost it, or lost the keys that it needs."""
    error = reply.exception()
    if error is not None:
        return isinstance(error, Lost)
    return verb == SparseVerb.UPDATE and reply.result().fields == (KEYS_MISSING,)


def _check_gradients(gradients: Gradients, group: Group, batch: Batch) -> None:
    """Refuses gradients that do not fit the outputs of a group."""
    for gradient, output in zip(gradients, group.outputs, strict=True):
        if gradient is not None:
            *shape, width = output.shape_in(batch)
            as_rows(gradient, prod(shape), width, f"gradients of group {group.spec.name!r}")
