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
from girih.runs.busy import awaited
from girih.runs.stats import EXCHANGE_NS, Stats
from girih.sparse.groups.bags import Pooling
from girih.sparse.groups.shards import GroupKeys, Rows, addresses_in, as_rows
from girih.sparse.routing.key_router import KeyRequest, RoutedKeys
from girih.sparse.routing.row_codec import RowCodec
from girih.sparse.routing.shard_reader import Request, spread


@dataclass(frozen=True)
class Traffic:
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
class Coming:
    """Rows of one group on their way into its outputs.

    Attributes:
        served: rows of the keys that this rank is asked for.
        own: addresses of those that it asks for, as far as they have come, and the memory that they lie in.
    """

    served: Rows
    own: Rows
    memory: list[NDArray[np.float32]]
    pooling: Pooling


class GroupMessages:
    """Messages between trainers, each of several groups.

    Args:
        dims: the columns of each group's rows. num_tables: of each group.
        rows, gradients: how they travel.
        apart: whether a thread of its own exchanges rows and gradients, so that one message is under way while others are made.
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
        apart: bool,
    ) -> None:
        self._ranks, self._exchange, self._stats = ranks, exchange, stats
        self._dims, self._num_tables = dims, num_tables
        self._rows, self._gradients = rows, gradients
        self._wire = ThreadPoolExecutor(1, "girih-exchange") if apart else None
        self._buffers = Buffers()

    def close(self) -> None:
        """Ends the thread."""
        if self._wire is not None:
            self._wire.shutdown()

    def packed_rows(self, convoy: Sequence[Traffic], coming: Mapping[int, Coming], part: int) -> Tensor:
        """Rows of some groups that others first need in a micro-batch: those for rank 0 first, group by group."""
        codec = self._rows
        widths = [codec.width(self._dims[each.group]) for each in convoy]
        counts = [each.asked[:, part] for each in convoy]
        flat = self._buffers.take(
            codec.dtype, sum(w * int(n.sum()) for w, n in zip(widths, counts, strict=True))
        )
        at = 0
        for rank in range(self._ranks.size):
            for each, width, count in zip(convoy, widths, counts, strict=True):
                size = int(count[rank])
                out = flat[at : at + size * width].reshape(size, width)
                start = int(each.asked[:rank].sum() + each.asked[rank, :part].sum())
                if codec.float16:
                    rows = np.empty((size, self._dims[each.group]), np.float32)
                    spread(coming[each.group].served, each.served, start, rows)
                    out[:] = codec.pack(rows)
                else:
                    spread(coming[each.group].served, each.served, start, out)
                at += size * width
        return torch.from_numpy(flat)

    def take_rows(
        self, convoy: Sequence[Traffic], coming: Mapping[int, Coming], part: int, came: NDArray[Any]
    ) -> None:
        """Notes where the rows lie that came; what :meth:`packed_rows` of all ranks packed for this one."""
        at, codec = 0, self._rows
        for rank in range(self._ranks.size):
            for each in convoy:
                dim, size = self._dims[each.group], int(each.asks[rank, part])
                width = codec.width(dim)
                packed = came[at : at + size * width].reshape(size, width)
                rows = as_rows(codec.unpack(packed), size, dim, f"rows from trainer {rank}")
                if codec.float16 and rank == self._ranks.rank:
                    self._restore_own(each, coming[each.group], part, rows)
                to = coming[each.group]
                first = int(each.asks[:rank].sum() + each.asks[rank, :part].sum())
                to.own.addresses[first : first + size] = addresses_in(rows)
                to.memory.append(rows)
                at += size * width

    def send_absent(self, each: Traffic) -> NDArray[Any]:
        """Whether keys of a group have no row, to who asked for them in an evaluation; returns it for the keys that this rank asked for."""
        absent = each.served.absent()[each.served.inverse].view(np.uint8)
        self._stats.sent("embeddings", len(absent) - int(each.asked[self._ranks.rank].sum()))
        flags = torch.from_numpy(absent)
        return each.route.back(flags, lambda counts: counts[..., each.columns].sum(axis=-1)).numpy()

    def _restore_own(self, each: Traffic, coming: Coming, part: int, rows: NDArray[np.float32]) -> None:
        """Rows of this rank that no other one asks for are not rounded."""
        rank = self._ranks.rank
        mine = _stretch(each.asked.sum(axis=1), rank)
        start = mine.start + int(each.asked[rank, :part].sum())
        exact = np.empty_like(rows)
        spread(coming.served, each.served, start, exact)
        alone = ~_asked_by_others(each.served, mine)[start - mine.start : start - mine.start + len(rows)]
        rows[alone] = exact[alone]

    def packed_gradients(self, convoy: Sequence[Traffic], own: Mapping[int, NDArray[np.float32]]) -> Tensor:
        """Gradients of some groups: those for rank 0 first, group by group."""
        packed = [self._gradients.pack(own[each.group]) for each in convoy]
        if len(packed) == 1:
            return torch.from_numpy(packed[0].reshape(-1))
        counts = [each.asks.sum(axis=1) for each in convoy]
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
        self, convoy: Sequence[Traffic], came: NDArray[Any], own: Mapping[int, NDArray[np.float32]]
    ) -> list[list[NDArray[np.float32]]]:
        """For each of some groups, what each rank has: what :meth:`packed_gradients` of all ranks packed for this one."""
        at, codec = 0, self._gradients
        found: list[list[NDArray[np.float32]]] = [[] for _ in convoy]
        for rank in range(self._ranks.size):
            for each, of_ranks in zip(convoy, found, strict=True):
                width, size = codec.width(self._dims[each.group]), int(each.asked[rank].sum())
                if codec.float16 and rank == self._ranks.rank:  # what does not travel is not rounded
                    of_ranks.append(own[each.group][_stretch(each.asks.sum(axis=1), rank)])
                else:
                    of_ranks.append(codec.unpack(came[at : at + size * width].reshape(size, width)))
                at += size * width
        return found

    def send(
        self, kind: str, convoy: Sequence[Traffic], sent: Tensor, parts: slice, *, train: bool
    ) -> Future[Tensor]:
        """One message to each rank: rows of some groups back to who asked for them, or gradients there to their owners.

        Args:
            parts: the micro-batches whose keys they are.
        """
        route, rank = convoy[0].route, self._ranks.rank
        if kind == "embeddings":
            codec, move, counts = self._rows, route.back, route.asked
        else:
            codec, move, counts = self._gradients, route.there, route.told
        widths = [codec.width(self._dims[each.group]) for each in convoy]

        def sizes(counts: Counts) -> Counts:
            of_groups = [counts[..., each.columns][..., parts].sum(axis=-1) for each in convoy]
            total: Counts = sum(np.multiply(w, n) for w, n in zip(widths, of_groups, strict=True))
            return total

        to_each = sizes(counts)
        self._stats.sent(kind, sent.element_size() * int(to_each.sum() - to_each[rank]))

        def exchange() -> Tensor:
            with self.waiting(kind, train=train):
                return move(sent, sizes)

        if self._wire is not None:
            return self._wire.submit(exchange)
        done: Future[Tensor] = Future()
        done.set_result(exchange())
        return done

    def one_ahead(
        self, send: Callable[..., Future[Tensor]], steps: Sequence[tuple[Any, ...]]
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
            route = self._exchange.tell(np.concatenate([each.sizes() for each in asked], axis=1))
            flat = route.there(torch.from_numpy(np.concatenate(parts)), sizes).numpy()
        self._stats.sent("ids", 8 * sum(len(part) for r, part in enumerate(parts) if r != self._ranks.rank))
        ends = np.cumsum(sizes(route.asked))
        received = [_unpacked(part, lengths) for part in np.split(flat, ends[:-1])]
        return route, list(zip(*received, strict=True))

    @contextmanager
    def waiting(self, kind: str, *, train: bool) -> Iterator[None]:
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
    """One rank's part of rows that lie by rank."""
    first = int(counts[:rank].sum())
    return slice(first, first + int(counts[rank]))
