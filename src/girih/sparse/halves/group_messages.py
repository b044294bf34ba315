"""Messages between trainers: keys, rows and gradients of several groups, in one message each.

A message to a rank has what is its of the first group, then of the next. Rows that travel as float16 are rounded, and what every
rank sees of a row in one step is the same: the owner takes a row that others ask for as they get it. A row that its owner alone
asks for, and its own gradients, stay as they are.

Shapes: R ranks, M micro-batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import Counts, Exchange, Route
from girih.kernels.buffers import Buffers
from girih.sparse.groups.bags import Pooling
from girih.sparse.groups.shards import GroupKeys, UniqueRows, addresses_in, as_rows
from girih.sparse.routing.key_router import KeyRequest, RoutedKeys, RowCodec
from girih.sparse.routing.shard_reader import MergedRequest, spread
from girih.telemetry.busy import awaited
from girih.telemetry.stats import EXCHANGE_NS, Stats


@dataclass(frozen=True)
class GroupExchange:
    """One group in one step: what this rank asks for, what it is asked for, and the ways there and back.

    Attributes:
        group: its number.
        requests: all keys that are asked of this rank, those of rank 0 first.
        columns: where the route counts its keys, by the first micro-batch that needs them.
    """

    group: int
    routed: RoutedKeys
    requests: MergedRequest
    served: GroupKeys
    route: Route
    columns: slice

    @property
    def asks(self) -> Counts:
        """Number of keys that this rank asks of each, by micro-batch, int64[R, M]."""
        return self.route.sent_counts[:, self.columns]

    @property
    def asked(self) -> Counts:
        """Number of keys that each rank asks of this one, by micro-batch, int64[R, M]."""
        return self.route.received_counts[:, self.columns]


@dataclass(frozen=True)
class IncomingRows:
    """Rows of one group on their way into its outputs.

    Attributes:
        served: rows of the keys that this rank is asked for.
        asked_rows: addresses of those that it asks for, as far as they have come, and the memory that they lie in.
    """

    served: UniqueRows
    asked_rows: UniqueRows
    memory: list[NDArray[np.float32]]
    pooling: Pooling


class TimedMessages:
    """The ways of one trainer's messages.

    Args:
        stats: where bytes and seconds are counted.
    """

    def __init__(self, ranks: TrainerGroup, stats: Stats) -> None:
        self._ranks, self._stats = ranks, stats

    @contextmanager
    def waiting(self, kind: str, *, train: bool) -> Iterator[None]:
        """Times an exchange: until the others have come to it, and all bytes are here. A GPU hands messages over and goes on."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._stats.spans.add(f"exchange {kind}", seconds, start)
        if train:
            self._stats.counters[EXCHANGE_NS] += round(1e9 * seconds)


class GroupMessages(TimedMessages):
    """Messages between trainers, each of several groups.

    Args:
        dims: the columns of each group's rows. num_tables: of each group.
        rows, gradients: how they travel.
        threaded: whether a thread of its own exchanges rows and gradients, so that one message is under way while others are made.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        exchange: Exchange,
        stats: Stats,
        *,
        dims: Sequence[int],
        num_tables: Sequence[int],
        rows: RowCodec,
        gradients: RowCodec,
        threaded: bool,
    ) -> None:
        super().__init__(ranks, stats)
        self._exchange = exchange
        self._dims, self._num_tables = dims, num_tables
        self._rows, self._gradients = rows, gradients
        self._wire = ThreadPoolExecutor(1, "girih-exchange") if threaded else None
        self._buffers = Buffers()

    def close(self) -> None:
        """Ends the thread."""
        if self._wire is not None:
            self._wire.shutdown()

    def packed_rows(
        self, exchanges: Sequence[GroupExchange], coming: Mapping[int, IncomingRows], part: int
    ) -> Tensor:
        """Rows of some groups that others first need in a micro-batch: those for rank 0 first, group by group."""
        codec = self._rows
        widths = [codec.width(self._dims[exchange.group]) for exchange in exchanges]
        counts = [exchange.asked[:, part] for exchange in exchanges]
        flat = self._buffers.take(
            codec.dtype, sum(w * int(n.sum()) for w, n in zip(widths, counts, strict=True))
        )
        at = 0
        for rank in range(self._ranks.size):
            for exchange, width, count in zip(exchanges, widths, counts, strict=True):
                size = int(count[rank])
                out = flat[at : at + size * width].reshape(size, width)
                start = int(exchange.asked[:rank].sum() + exchange.asked[rank, :part].sum())
                if codec.float16:
                    rows = np.empty((size, self._dims[exchange.group]), np.float32)
                    spread(coming[exchange.group].served, exchange.served, start, rows)
                    out[:] = codec.pack(rows)
                else:
                    spread(coming[exchange.group].served, exchange.served, start, out)
                at += size * width
        return torch.from_numpy(flat)

    def take_rows(
        self,
        exchanges: Sequence[GroupExchange],
        coming: Mapping[int, IncomingRows],
        part: int,
        came: NDArray[Any],
    ) -> None:
        """Notes where the rows lie that came; what :meth:`packed_rows` of all ranks packed for this one."""
        at, codec = 0, self._rows
        for rank in range(self._ranks.size):
            for exchange in exchanges:
                dim, size = self._dims[exchange.group], int(exchange.asks[rank, part])
                width = codec.width(dim)
                packed = came[at : at + size * width].reshape(size, width)
                rows = as_rows(codec.unpack(packed), size, dim, f"rows from trainer {rank}")
                if codec.float16 and rank == self._ranks.rank:
                    self._restore_exact(exchange, coming[exchange.group], part, rows)
                to = coming[exchange.group]
                first = int(exchange.asks[:rank].sum() + exchange.asks[rank, :part].sum())
                to.asked_rows.addresses[first : first + size] = addresses_in(rows)
                to.memory.append(rows)
                at += size * width

    def send_absent(self, exchange: GroupExchange) -> NDArray[Any]:
        """Sends a flag per key of a group that was asked of this rank in an evaluation: whether it has no row.

        Returns:
            uint8[U], the flags of the keys that this rank asked for.
        """
        absent = exchange.served.absent()[exchange.served.inverse].view(np.uint8)
        self._stats.sent("embeddings", len(absent) - int(exchange.asked[self._ranks.rank].sum()))
        flags = torch.from_numpy(absent)
        return exchange.route.back(flags, lambda counts: counts[..., exchange.columns].sum(axis=-1)).numpy()

    def _restore_exact(
        self, exchange: GroupExchange, coming: IncomingRows, part: int, rows: NDArray[np.float32]
    ) -> None:
        """Restores the exact rows of this rank that no other rank asks for."""
        rank = self._ranks.rank
        mine = _stretch(exchange.asked.sum(axis=1), rank)
        start = mine.start + int(exchange.asked[rank, :part].sum())
        exact = np.empty_like(rows)
        spread(coming.served, exchange.served, start, exact)
        alone = ~_asked_by_others(exchange.served, mine)[start - mine.start : start - mine.start + len(rows)]
        rows[alone] = exact[alone]

    def packed_gradients(
        self, exchanges: Sequence[GroupExchange], gradients: Mapping[int, NDArray[np.float32]]
    ) -> Tensor:
        """Gradients of some groups: those for rank 0 first, group by group."""
        packed = [self._gradients.pack(gradients[exchange.group]) for exchange in exchanges]
        if len(packed) == 1:
            return torch.from_numpy(packed[0].reshape(-1))
        counts = [exchange.asks.sum(axis=1) for exchange in exchanges]
        return torch.from_numpy(
            np.concatenate(
                [
                    rows[_stretch(count, rank)].reshape(-1)
                    for rank in range(self._ranks.size)
                    for rows, count in zip(packed, counts, strict=True)
                ]
            )
        )

    def received_gradients(
        self,
        exchanges: Sequence[GroupExchange],
        came: NDArray[Any],
        gradients: Mapping[int, NDArray[np.float32]],
    ) -> list[list[NDArray[np.float32]]]:
        """For each of some groups, what each rank has: what :meth:`packed_gradients` of all ranks packed for this one."""
        at, codec = 0, self._gradients
        received: list[list[NDArray[np.float32]]] = [[] for _ in exchanges]
        for rank in range(self._ranks.size):
            for exchange, of_ranks in zip(exchanges, received, strict=True):
                width, size = codec.width(self._dims[exchange.group]), int(exchange.asked[rank].sum())
                if codec.float16 and rank == self._ranks.rank:  # what does not travel is not rounded
                    of_ranks.append(gradients[exchange.group][_stretch(exchange.asks.sum(axis=1), rank)])
                else:
                    of_ranks.append(codec.unpack(came[at : at + size * width].reshape(size, width)))
                at += size * width
        return received

    def send(
        self, kind: str, exchanges: Sequence[GroupExchange], sent: Tensor, parts: slice, *, train: bool
    ) -> Future[Tensor]:
        """One message to each rank: rows of some groups back to who asked for them, or gradients there to their owners.

        Args:
            parts: the micro-batches whose keys they are.
        """
        route, rank = exchanges[0].route, self._ranks.rank
        if kind == "embeddings":
            codec, move, counts = self._rows, route.back, route.received_counts
        else:
            codec, move, counts = self._gradients, route.there, route.sent_counts
        widths = [codec.width(self._dims[exchange.group]) for exchange in exchanges]

        def sizes(counts: Counts) -> Counts:
            of_groups = [counts[..., exchange.columns][..., parts].sum(axis=-1) for exchange in exchanges]
            total: Counts = sum(np.multiply(w, n) for w, n in zip(widths, of_groups, strict=True))
            return total

        to_each = sizes(counts)
        self._stats.sent(kind, sent.element_size() * int(to_each.sum() - to_each[rank]))

        def transfer() -> Tensor:
            with self.waiting(kind, train=train):
                return move(sent, sizes)

        if self._wire is not None:
            return self._wire.submit(transfer)
        done: Future[Tensor] = Future()
        done.set_result(transfer())
        return done

    def one_ahead(
        self, send: Callable[..., Future[Tensor]], steps: Sequence[tuple[object, ...]]
    ) -> Iterator[Tensor]:
        """Sends messages and yields what comes of each, in their order; with a thread that exchanges them, one more is under way."""
        under_way: deque[Future[Tensor]] = deque()
        for step in steps:
            under_way.append(send(*step))
            if self._wire is None or len(under_way) > 1:
                yield awaited(under_way.popleft())
        while under_way:
            yield awaited(under_way.popleft())

    def send_keys(
        self, asked: list[RoutedKeys], num_parts: int, *, train: bool
    ) -> tuple[Route, list[tuple[KeyRequest, ...]]]:
        """Keys to the ranks that own them; returns, of each group, what each rank asks of this one."""
        parts = [_packed(asked, rank) for rank in range(self._ranks.size)]
        lengths = [num_parts * count for count in self._num_tables]

        def sizes(counts: Counts) -> Counts:
            """Numbers of packed requests, by how many keys of each group and micro-batch they ask for; see :func:`_packed`."""
            of_groups = counts.reshape(*counts.shape[:-1], len(asked), num_parts).sum(axis=-1)
            numbers: Counts = sum(lengths) + (of_groups + (of_groups + 1) // 2).sum(axis=-1)
            return numbers

        with self.waiting("ids", train=train):
            route = self._exchange.send_counts(
                np.concatenate([requested.sizes() for requested in asked], axis=1)
            )
            flat = route.there(torch.from_numpy(np.concatenate(parts)), sizes).numpy()
        self._stats.sent("ids", 8 * sum(len(part) for r, part in enumerate(parts) if r != self._ranks.rank))
        ends = np.cumsum(sizes(route.received_counts))
        received = [_unpacked(part, lengths) for part in np.split(flat, ends[:-1])]
        return route, list(zip(*received, strict=True))


def _asked_by_others(served: GroupKeys, part: slice) -> NDArray[np.bool_]:
    """Whether another rank asks for the same key, for each key of a part of the request."""
    by_others = np.zeros(served.end, np.bool_)
    by_others[served.inverse[: part.start]] = True
    by_others[served.inverse[part.stop :]] = True
    return by_others[served.inverse[part]]


def _packed(asked: list[RoutedKeys], rank: int) -> NDArray[np.int64]:
    """The packed request to one rank: the lengths of all groups, then the keys and counts of each."""
    requests = [routed.of_place(rank) for routed in asked]
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
    """One rank's part of rows that lie by rank."""
    first = int(counts[:rank].sum())
    return slice(first, first + int(counts[rank]))
