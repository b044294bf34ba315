"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Rows that travel as float16 are rounded, and what every rank sees of a row in one step is the same: the owner takes a
row that others ask for as they get it. A row that its owner alone asks for, and its own gradients, stay as they are.

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that are asked of
this rank, W columns of a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.between_hosts import BetweenHosts
from girih.comm.group.exchange import Counts, Direct, Exchange, Route
from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.kernels.buffers import Buffers
from girih.runs.stats import ASKED_KEYS, EXCHANGE_NS, PACED_KEYS, SERVED_ROWS, Stats
from girih.sparse.groups.bags import Gradients, Pooling
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import GroupKeys, Rows, addresses_in, as_rows
from girih.sparse.half import SparseStats
from girih.sparse.halves.here import Arrival, ShardedHalf
from girih.sparse.routing.key_router import KeyRequest, KeyRouter, RoutedKeys
from girih.sparse.routing.row_codec import RowCodec
from girih.sparse.routing.shard_reader import Request, ShardReader, spread
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True)
class _Traffic:
    """One group in one step: what this rank asks for, what it is asked for, and the ways there and back.

    Attributes:
        group: its number.
        requests: all keys that are asked of this rank, those of rank 0 first.
        columns: where the route counts its keys, by the first micro-batch that needs them.
    """

    group: int
    own: RoutedKeys
    requests: Request
    served: GroupKeys
    route: Route
    columns: slice

    @property
    def asks(self) -> Counts:
        """Number of keys that this rank asks of each, by micro-batch, int64[R, M]."""
        return self.route.told[:, self.columns]

    @property
    def asked(self) -> Counts:
        """Number of keys that each rank asks of this one, by micro-batch, int64[R, M]."""
        return self.route.asked[:, self.columns]


@dataclass(frozen=True)
class _Coming:
    """Rows of one group on their way into its outputs.

    Attributes:
        served: rows of the keys that this rank is asked for.
        own: addresses of those that it asks for, as far as they have come, and the memory that they lie in.
    """

    served: Rows
    own: Rows
    memory: list[NDArray[np.float32]]
    pooling: Pooling


class CollectiveSparse(ShardedHalf[list[_Traffic], _Traffic]):
    """Tables whose shards are spread evenly over the trainers.

    Rows of several groups, and their gradients, travel in one message. Where groups are in several interleaving groups these
    follow each other (PICASSO §III-C, K-interleaving), and so do micro-batches (D-interleaving): while the rows of one
    are on the way, a thread looks up those of the next and pools those of the one before. A key that several
    micro-batches need travels with the first of them.

    Args:
        hosts: the host of each trainer, by rank; where several share one of several, messages between hosts are grouped.
        float16_embeddings, float16_gradients: rows and their gradients travel as float16 with a scale each.
        micro_batches, ahead: see :class:`ShardedHalf`.
        interleaving: names of the groups of each interleaving group, in their order; all in one where there are none.
        excluded: names of groups that go before all interleaving groups.

    Raises:
        ConfigError: interleaving and excluded groups together are not all groups, once each.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None = None,
        *,
        hosts: Sequence[str] = (),
        float16_embeddings: bool = False,
        float16_gradients: bool = False,
        micro_batches: int = 1,
        ahead: bool = False,
        interleaving: Sequence[Sequence[str]] = (),
        excluded: Sequence[str] = (),
    ) -> None:
        groups = spec.groups()
        self._convoys = _in_convoys([group.spec.name for group in groups], interleaving, excluded)
        shards = LocalShards(groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size)
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        self.ranks = ranks
        several = micro_batches > 1 or len(self._convoys) > 1
        self._wire = ThreadPoolExecutor(1, "girih-exchange") if several and ranks.size > 1 else None
        # gloo is not for two threads: what is exchanged beside a backward pass has connections of its own
        apart = ranks.size > 1 and (several or ahead)
        self._part = ranks.split(range(ranks.size)) if apart else None
        between = self._part or ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange: Exchange = BetweenHosts(between, hosts) if grouped else Direct(between)
        self._rows, self._gradients = RowCodec(float16_embeddings), RowCodec(float16_gradients)
        self._stats = stats or Stats()
        self._buffers = Buffers()
        self._routers = [KeyRouter(group, ranks.size, shards.shards_each) for group in groups]
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._tables = [table.name for group in groups for table in group.spec.tables]
        self._num_tables = [len(group.spec.tables) for group in groups]

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[_Traffic]:
        """Finds the keys of a batch, and sends them to their owners, which find those that several ask for."""
        if not self._routers:  # a model of numbers alone
            return []
        asked = [router.ask(batch, parts) for router in self._routers]
        route, received = self._send_keys(asked, len(parts), train=train)
        found = []
        for group, (reader, own, requests) in enumerate(zip(self._readers, asked, received, strict=True)):
            lengths, keys, counts = zip(*requests, strict=True)
            of_ranks = np.concatenate([each.reshape(len(parts), -1) for each in lengths])
            request = Request.of(np.concatenate(keys), np.concatenate(counts), of_ranks)
            columns = slice(group * len(parts), (group + 1) * len(parts))
            found.append(_Traffic(group, own, request, reader.find_keys(request), route, columns))
        return found

    def fetch(self, found: list[_Traffic]) -> None:
        """See :class:`ShardedHalf`."""
        for each in found:
            self._readers[each.group].fetch(each.served)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        found: list[_Traffic] | None = None,
        *,
        train: bool,
    ) -> Iterator[Arrival[_Traffic]]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        traffic = self.find(batch, parts, train=train) if found is None else found
        if not traffic:
            yield from (([], []) for _ in parts)
        coming: dict[int, _Coming] = {}

        def send(part: int, convoy: list[int]) -> Future[Tensor]:
            if part == 0:
                coming.update((g, self._look_up(traffic[g], batch, step, train=train)) for g in convoy)
            sent = self._packed_rows([traffic[g] for g in convoy], coming, part)
            return self._send(
                "embeddings", [traffic[g] for g in convoy], sent, slice(part, part + 1), train=train
            )

        steps = list(product(range(len(parts)), self._convoys))
        for (part, convoy), came in zip(steps, self._one_ahead(send, steps), strict=True):
            self._take_rows([traffic[g] for g in convoy], coming, part, came.numpy())
            for g in convoy:
                coming[g].pooling.fill(parts[part])
            if convoy is self._convoys[-1]:
                outputs = [output for g in range(len(traffic)) for output in coming[g].pooling.outputs]
                yield traffic, outputs

    def update(
        self, batch: Batch, reads: list[_Traffic], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers.

        Raises:
            NonFiniteError: a gradient of any trainer is NaN or infinite; no row was moved anywhere.
        """
        own: dict[int, NDArray[np.float32]] = {}

        def send(convoy: list[int]) -> Future[Tensor]:
            for g in convoy:
                own[g], _ = self._routers[g].bags.scatter(gradients[g], reads[g].own.keys, batch)
            members = [reads[g] for g in convoy]
            return self._send(
                "gradients", members, self._packed_gradients(members, own), slice(None), train=True
            )

        sums, bad = {}, 0
        ways = [(convoy,) for convoy in self._convoys]
        for convoy, came in zip(self._convoys, self._one_ahead(send, ways), strict=True):
            received = self._received_gradients([reads[g] for g in convoy], came.numpy(), own)
            for g, of_ranks in zip(convoy, received, strict=True):
                sums[g], nonfinite = self._readers[g].sum_gradients(reads[g].served, of_ranks)
                bad = max(bad, 0 if nonfinite is None else 1 + self._tables.index(nonfinite))
        took_part = [float(any(gradient is not None for gradient in given)) for given in gradients]
        num_asked = int(reads[0].route.asked.sum()) if reads else 0
        with self._waiting("vote", train=True):
            *all_took_part, worst, most = self.ranks.largest([*took_part, float(bad), float(num_asked)])
        self._stats.counters[ASKED_KEYS] += num_asked
        self._stats.counters[SERVED_ROWS] += sum(
            len(shard.keys) for each in reads for shard in each.served.shards
        )
        self._stats.counters[PACED_KEYS] += self.ranks.size * int(most)
        if worst:
            raise NonFiniteError(f"a gradient of table {self._tables[int(worst) - 1]!r} is NaN or infinite")
        for each, apply in zip(reads, all_took_part, strict=True):
            if apply:
                self._readers[each.group].apply(each.served, sums[each.group], step, lr_scale)

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        here, counters = super().stats(), self._stats.counters
        balance = self.ranks.sum_by_name({ASKED_KEYS: counters[ASKED_KEYS]})
        return SparseStats(
            self.ranks.sum_by_name(here.store),
            self.ranks.sum_by_name(here.rows),
            balance={**balance, PACED_KEYS: counters[PACED_KEYS]},
        )

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        if self._wire is not None:
            self._wire.shutdown()
        if self._part is not None:
            self._part.close()

    def _look_up(self, each: _Traffic, batch: Batch, step: int, *, train: bool) -> _Coming:
        """Reads the rows that this rank is asked for."""
        reader = self._readers[each.group]
        _, served = reader.look_up(each.requests, step, train=train, found=each.served)
        memory: list[NDArray[np.float32]] = []
        own = Rows(np.empty(each.own.keys.end, np.int64), memory)
        pooling = self._routers[each.group].bags.pooling(own, each.own.keys, batch)
        return _Coming(served, own, memory, pooling)

    def _packed_rows(self, convoy: Sequence[_Traffic], coming: Mapping[int, _Coming], part: int) -> Tensor:
        """Rows of some groups that others first need in a micro-batch: those for rank 0 first, group by group."""
        codec = self._rows
        widths = [codec.width(self._readers[each.group].dim) for each in convoy]
        counts = [each.asked[:, part] for each in convoy]
        flat = self._buffers.take(
            codec.dtype, sum(w * int(n.sum()) for w, n in zip(widths, counts, strict=True))
        )
        at = 0
        for rank in range(self.ranks.size):
            for each, width, count in zip(convoy, widths, counts, strict=True):
                size = int(count[rank])
                out = flat[at : at + size * width].reshape(size, width)
                start = int(each.asked[:rank].sum() + each.asked[rank, :part].sum())
                if codec.float16:
                    rows = np.empty((size, self._readers[each.group].dim), np.float32)
                    spread(coming[each.group].served, each.served, start, rows)
                    out[:] = codec.pack(rows)
                else:
                    spread(coming[each.group].served, each.served, start, out)
                at += size * width
        return torch.from_numpy(flat)

    def _take_rows(
        self, convoy: Sequence[_Traffic], coming: Mapping[int, _Coming], part: int, came: NDArray[Any]
    ) -> None:
        """Notes where the rows lie that came; what :meth:`_packed_rows` of all ranks packed for this one."""
        at, codec = 0, self._rows
        for rank in range(self.ranks.size):
            for each in convoy:
                dim, size = self._readers[each.group].dim, int(each.asks[rank, part])
                width = codec.width(dim)
                packed = came[at : at + size * width].reshape(size, width)
                rows = as_rows(codec.unpack(packed), size, dim, f"rows from trainer {rank}")
                if codec.float16 and rank == self.ranks.rank:
                    self._restore_own(each, coming[each.group], part, rows)
                to = coming[each.group]
                first = int(each.asks[:rank].sum() + each.asks[rank, :part].sum())
                to.own.addresses[first : first + size] = addresses_in(rows)
                to.memory.append(rows)
                at += size * width

    def _restore_own(self, each: _Traffic, coming: _Coming, part: int, rows: NDArray[np.float32]) -> None:
        """Rows of this rank that no other one asks for are not rounded."""
        rank = self.ranks.rank
        mine = _stretch(each.asked.sum(axis=1), rank)
        start = mine.start + int(each.asked[rank, :part].sum())
        exact = np.empty_like(rows)
        spread(coming.served, each.served, start, exact)
        alone = ~_asked_by_others(each.served, mine)[start - mine.start : start - mine.start + len(rows)]
        rows[alone] = exact[alone]

    def _packed_gradients(self, convoy: Sequence[_Traffic], own: Mapping[int, NDArray[np.float32]]) -> Tensor:
        """Gradients of some groups: those for rank 0 first, group by group."""
        packed = [self._gradients.pack(own[each.group]) for each in convoy]
        if len(packed) == 1:
            return torch.from_numpy(packed[0].reshape(-1))
        counts = [each.asks.sum(axis=1) for each in convoy]
        return torch.from_numpy(
            np.concatenate(
                [
                    rows[_stretch(count, rank)].reshape(-1)
                    for rank in range(self.ranks.size)
                    for rows, count in zip(packed, counts, strict=True)
                ]
            )
        )

    def _received_gradients(
        self, convoy: Sequence[_Traffic], came: NDArray[Any], own: Mapping[int, NDArray[np.float32]]
    ) -> list[list[NDArray[np.float32]]]:
        """For each of some groups, what each rank has: what :meth:`_packed_gradients` of all ranks packed for this one."""
        at, codec = 0, self._gradients
        found: list[list[NDArray[np.float32]]] = [[] for _ in convoy]
        for rank in range(self.ranks.size):
            for each, of_ranks in zip(convoy, found, strict=True):
                width, size = codec.width(self._readers[each.group].dim), int(each.asked[rank].sum())
                if codec.float16 and rank == self.ranks.rank:  # what does not travel is not rounded
                    of_ranks.append(own[each.group][_stretch(each.asks.sum(axis=1), rank)])
                else:
                    of_ranks.append(codec.unpack(came[at : at + size * width].reshape(size, width)))
                at += size * width
        return found

    def _send(
        self, kind: str, convoy: Sequence[_Traffic], sent: Tensor, parts: slice, *, train: bool
    ) -> Future[Tensor]:
        """One message to each rank: rows of some groups back to who asked for them, or gradients there to their owners.

        Args:
            parts: the micro-batches whose keys they are.
        """
        route, rank = convoy[0].route, self.ranks.rank
        if kind == "embeddings":
            codec, move, counts = self._rows, route.back, route.asked
        else:
            codec, move, counts = self._gradients, route.there, route.told
        widths = [codec.width(self._readers[each.group].dim) for each in convoy]

        def sizes(counts: Counts) -> Counts:
            of_groups = [counts[..., each.columns][..., parts].sum(axis=-1) for each in convoy]
            total: Counts = sum(np.multiply(w, n) for w, n in zip(widths, of_groups, strict=True))
            return total

        to_each = sizes(counts)
        self._stats.sent(kind, sent.element_size() * int(to_each.sum() - to_each[rank]))

        def exchange() -> Tensor:
            with self._waiting(kind, train=train):
                return move(sent, sizes)

        if self._wire is not None:
            return self._wire.submit(exchange)
        done: Future[Tensor] = Future()
        done.set_result(exchange())
        return done

    def _one_ahead(
        self, send: Callable[..., Future[Tensor]], steps: Sequence[tuple[Any, ...]]
    ) -> Iterator[Tensor]:
        """Sends messages and yields what comes of each, in their order; with a thread that exchanges them, one more is under way."""
        under_way: deque[Future[Tensor]] = deque()
        for step in steps:
            under_way.append(send(*step))
            if self._wire is None or len(under_way) > 1:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _send_keys(
        self, asked: list[RoutedKeys], num_parts: int, *, train: bool
    ) -> tuple[Route, list[tuple[KeyRequest, ...]]]:
        """Keys to the ranks that own them; returns, of each group, what each rank asks of this one."""
        parts = [_packed(asked, rank) for rank in range(self.ranks.size)]
        lengths = [num_parts * count for count in self._num_tables]

        def sizes(counts: Counts) -> Counts:
            """Numbers of packed requests, by how many keys of each group and micro-batch they ask for; see :func:`_packed`."""
            of_groups = counts.reshape(*counts.shape[:-1], len(asked), num_parts).sum(axis=-1)
            numbers: Counts = sum(lengths) + (of_groups + (of_groups + 1) // 2).sum(axis=-1)
            return numbers

        with self._waiting("ids", train=train):
            route = self.exchange.tell(np.concatenate([each.sizes() for each in asked], axis=1))
            flat = route.there(torch.from_numpy(np.concatenate(parts)), sizes).numpy()
        self._stats.sent("ids", 8 * sum(len(part) for r, part in enumerate(parts) if r != self.ranks.rank))
        ends = np.cumsum(sizes(route.asked))
        received = [_unpacked(part, lengths) for part in np.split(flat, ends[:-1])]
        return route, list(zip(*received, strict=True))

    @contextmanager
    def _waiting(self, kind: str, *, train: bool) -> Iterator[None]:
        """Times an exchange: until the others have come to it, and all bytes are here."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._stats.spans.add(f"exchange {kind}", start, seconds)
        if train:
            self._stats.counters[EXCHANGE_NS] += round(1e9 * seconds)


def _asked_by_others(served: GroupKeys, own: slice) -> NDArray[np.bool_]:
    """Whether another rank asks for the same key, for each key of a part of all that are asked for."""
    by_others = np.zeros(served.end, np.bool_)
    by_others[served.inverse[: own.start]] = True
    by_others[served.inverse[own.stop :]] = True
    return by_others[served.inverse[own]]


def _packed(asked: list[RoutedKeys], rank: int) -> NDArray[np.int64]:
    """The packed request to one rank: the lengths of all groups, then the keys and counts of each."""
    requests = [each.of_place(rank) for each in asked]
    parts = [lengths for lengths, _, _ in requests]
    for _, keys, counts in requests:
        parts += [keys, np.append(counts, np.zeros(len(counts) % 2, np.int32)).view(np.int64)]
    return np.concatenate(parts)


def _unpacked(flat: NDArray[np.int64], num_lengths: list[int]) -> list[KeyRequest]:
    requests, at = [], sum(num_lengths)
    for lengths in np.split(flat[:at], np.cumsum(num_lengths)[:-1]):
        size = int(lengths.sum())
        end = at + size + -(-size // 2)
        requests.append((lengths, flat[at : at + size], flat[at + size : end].view(np.int32)[:size]))
        at = end
    return requests


def _stretch(counts: Counts, rank: int) -> slice:
    """A rank's part, of so many rows of each rank."""
    first = int(counts[:rank].sum())
    return slice(first, first + int(counts[rank]))


def _in_convoys(
    names: Sequence[str], interleaving: Sequence[Sequence[str]], excluded: Sequence[str]
) -> list[list[int]]:
    """Numbers of the groups whose rows travel together, in the order in which they do."""
    wanted = [
        each for each in (excluded, *(interleaving or [[n for n in names if n not in excluded]])) if each
    ]
    if sorted(name for each in wanted for name in each) != sorted(names):
        raise ConfigError(
            f"schedule: interleaving groups {[list(each) for each in interleaving]}, excluded {list(excluded)}; expected"
            f" each of the groups {', '.join(names)} once; plan again with girih plan"
        )
    return [[names.index(name) for name in each] for each in wanted]
