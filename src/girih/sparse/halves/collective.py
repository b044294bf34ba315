"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Rows that travel as float16 are rounded, and what every rank sees of a row in one step is the same: the owner takes a
row that others ask for as they get it. A row that its owner alone asks for, and its own gradients, stay as they are.

Shapes: R ranks, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank, W columns
of a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from girih.comm.group import TrainerGroup
from girih.comm.group.between_hosts import BetweenHosts
from girih.comm.group.exchange import Counts, Direct, Exchange, Route
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.runs.stats import ASKED_KEYS, EXCHANGE_NS, PACED_KEYS, SERVED_ROWS, Stats
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import GroupKeys, Rows
from girih.sparse.half import SparseStats
from girih.sparse.halves.here import ShardedHalf
from girih.sparse.routing.key_router import KeyRequest, KeyRouter, RoutedKeys
from girih.sparse.routing.row_codec import RowCodec
from girih.sparse.routing.shard_reader import ShardReader
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True)
class _Traffic:
    """One group in one step: what this rank asks for, what it is asked for, and the ways there and back.

    Attributes:
        group: its number, by which the route counts its keys.
    """

    own: RoutedKeys
    served: GroupKeys
    route: Route
    group: int

    @property
    def asks(self) -> list[int]:
        """Number of keys that this rank asks of each."""
        return [int(count) for count in self.route.told[:, self.group]]

    @property
    def asked(self) -> list[int]:
        """Number of keys that each rank asks of this one."""
        return [int(count) for count in self.route.asked[:, self.group]]


class CollectiveSparse(ShardedHalf[_Traffic]):
    """Tables whose shards are spread evenly over the trainers.

    Args:
        hosts: the host of each trainer, by rank; where several share one of several, messages between hosts are grouped.
        float16_embeddings, float16_gradients: rows and their gradients travel as float16 with a scale each.
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
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size)
        super().__init__(groups, shards)
        self.ranks = ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange: Exchange = BetweenHosts(ranks, hosts) if grouped else Direct(ranks)
        self._rows, self._gradients = RowCodec(float16_embeddings), RowCodec(float16_gradients)
        self._stats = stats or Stats()
        self._routers = [KeyRouter(group, ranks.size, shards.shards_each) for group in groups]
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._tables = [table.name for group in groups for table in group.spec.tables]
        self._num_tables = [len(group.spec.tables) for group in groups]

    def read(
        self, batch: Batch, step: int, *, train: bool
    ) -> tuple[list[_Traffic], list[NDArray[np.float32]]]:
        """Sends keys to their owners, and gets their rows; see :class:`ShardedHalf`."""
        traffic: list[_Traffic] = []
        outputs: list[NDArray[np.float32]] = []
        asked = [router.ask(batch) for router in self._routers]
        route, received = self._send_keys(asked, train=train)
        for router, reader, own, requests in zip(self._routers, self._readers, asked, received, strict=True):
            of_rank, keys, counts = zip(*requests, strict=True)
            served, rows = reader.read(
                np.concatenate(keys), np.concatenate(counts), np.stack(of_rank), step, train=train
            )
            each = _Traffic(own, served, route, len(traffic))
            values = self._send("embeddings", each, rows, train=train)
            if self._rows.float16:
                mine = self._part(each.asked)
                alone = ~_asked_by_others(served, mine)
                values[self._part(each.asks)][alone] = rows[mine][alone]
            rows_here = Rows.received([values], [own.keys.end], reader.dim)
            outputs += router.bags.pool(rows_here, own.keys, batch)
            traffic.append(each)
        return traffic, outputs

    def update(
        self, batch: Batch, reads: list[_Traffic], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers.

        Raises:
            NonFiniteError: a gradient of any trainer is NaN or infinite; no row was moved anywhere.
        """
        took_part, bad, sums = [], 0, []
        for router, reader, each, given in zip(self._routers, self._readers, reads, gradients, strict=True):
            own, _ = router.bags.scatter(given, each.own.keys, batch)
            received = self._send("gradients", each, own, train=True)
            if self._gradients.float16:
                received[self._part(each.asked)] = own[self._part(each.asks)]
            totals, nonfinite = reader.sum_gradients(each.served, received)
            took_part.append(float(any(gradient is not None for gradient in given)))
            bad = max(bad, 0 if nonfinite is None else 1 + self._tables.index(nonfinite))
            sums.append(totals)
        num_asked = sum(sum(each.asked) for each in reads)
        with self._waiting("vote", train=True):
            *all_took_part, worst, most = self.ranks.largest([*took_part, float(bad), float(num_asked)])
        self._stats.counters[ASKED_KEYS] += num_asked
        self._stats.counters[SERVED_ROWS] += sum(
            len(shard.keys) for each in reads for shard in each.served.shards
        )
        self._stats.counters[PACED_KEYS] += self.ranks.size * int(most)
        if worst:
            raise NonFiniteError(f"a gradient of table {self._tables[int(worst) - 1]!r} is NaN or infinite")
        for reader, each, totals, apply in zip(self._readers, reads, sums, all_took_part, strict=True):
            if apply:
                reader.apply(each.served, totals, step, lr_scale)

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        here, counters = super().stats(), self._stats.counters
        balance = self.ranks.sum_by_name({ASKED_KEYS: counters[ASKED_KEYS]})
        return SparseStats(
            self.ranks.sum_by_name(here.store),
            self.ranks.sum_by_name(here.rows),
            balance={**balance, PACED_KEYS: counters[PACED_KEYS]},
        )

    def _send(
        self, kind: str, each: _Traffic, rows: NDArray[np.float32], *, train: bool
    ) -> NDArray[np.float32]:
        """Rows back to who asked for them, or gradients there to their owners, float32[·, W]; returns those that came."""
        if kind == "embeddings":
            codec, move, sent = self._rows, each.route.back, each.asked
        else:
            codec, move, sent = self._gradients, each.route.there, each.asks
        packed = codec.pack(rows)
        width = packed.shape[1]
        self._stats.sent(kind, packed.itemsize * width * (sum(sent) - sent[self.ranks.rank]))

        def sizes(counts: Counts) -> Counts:
            of_group: Counts = width * counts[..., each.group]
            return of_group

        with self._waiting(kind, train=train):
            came = move(torch.from_numpy(packed.reshape(-1)), sizes)
        return codec.unpack(came.numpy().reshape(-1, width))

    def _send_keys(
        self, asked: list[RoutedKeys], *, train: bool
    ) -> tuple[Route, list[tuple[KeyRequest, ...]]]:
        """Keys to the ranks that own them; returns, of each group, what each rank asks of this one."""
        parts = [_packed(asked, rank) for rank in range(self.ranks.size)]
        with self._waiting("ids", train=train):
            route = self.exchange.tell(np.stack([np.diff(each.bounds()) for each in asked], axis=1))
            flat = route.there(torch.from_numpy(np.concatenate(parts)), self._request_sizes).numpy()
        self._stats.sent("ids", 8 * sum(len(part) for r, part in enumerate(parts) if r != self.ranks.rank))
        ends = np.cumsum(self._request_sizes(route.asked))
        received = [_unpacked(part, self._num_tables) for part in np.split(flat, ends[:-1])]
        return route, list(zip(*received, strict=True))

    def _request_sizes(self, counts: Counts) -> Counts:
        """Numbers of packed requests, by how many keys of each group they ask for; see :func:`_packed`."""
        sizes: Counts = sum(self._num_tables) + (counts + (counts + 1) // 2).sum(axis=-1)
        return sizes

    def _part(self, counts: list[int]) -> slice:
        """This rank's own part, of so many rows of each rank."""
        first = sum(counts[: self.ranks.rank])
        return slice(first, first + counts[self.ranks.rank])

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


def _unpacked(flat: NDArray[np.int64], num_tables: list[int]) -> list[KeyRequest]:
    requests, at = [], sum(num_tables)
    for lengths in np.split(flat[:at], np.cumsum(num_tables)[:-1]):
        size = int(lengths.sum())
        end = at + size + -(-size // 2)
        requests.append((lengths, flat[at : at + size], flat[at + size : end].view(np.int32)[:size]))
        at = end
    return requests
