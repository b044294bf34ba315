"""Shards spread over the GPUs of all trainers: keys and rows go from GPU to GPU, by AllToAllv.

It is :class:`girih.sparse.halves.collective.CollectiveSparse` with rows in GPU memory. What the host must know of a batch, how
many keys go where, is found and told when the batch is prepared, on a stream of its own. Keys, rows and gradients travel within
a step, while the trainer waits for what comes of them: so all trainers issue one order of messages, those of their dense halves included.

Shapes: R ranks, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank, W columns of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import Counts, Direct
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.runs.stats import ASKED_KEYS, EXCHANGE_NS, PACED_KEYS, SERVED_ROWS, Stats
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.side_stream import SideStream, take_over
from girih.sparse.half import SparseStats
from girih.sparse.halves.collective import over_all_ranks
from girih.sparse.halves.here import Arrival, ShardedHalf
from girih.sparse.routing.gpu_reader import GpuReader, GpuServed
from girih.sparse.routing.gpu_router import KEY_WORDS, GpuRouter, GpuTraffic
from girih.sparse.routing.gpu_row_codec import GpuRowCodec
from girih.sparse.spec import SparseSpec

Coming = Callable[[], Tensor]
"""A message on its way: returns it, which on a GPU may be before it is there, as its stream knows."""


@dataclass(frozen=True)
class GpuExchanged:
    """One group in one step: what was asked here and elsewhere, and what is served here."""

    traffic: GpuTraffic
    served: GpuServed


class GpuCollectiveSparse(ShardedHalf[list[GpuTraffic], GpuExchanged]):
    """Tables whose shards are spread evenly over the GPUs of the trainers, one shard on each.

    Each group has messages of its own; while those of one are on the way, what the next one needs is done. With micro-batches all rows
    come before the first, and bags are filled in micro-batch by micro-batch.

    Args:
        float16_embeddings, float16_gradients: rows and their gradients travel as float16 with a scale each.
        micro_batches, ahead: see :class:`ShardedHalf`.

    Raises:
        ConfigError: a store that is not in GPU memory.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None = None,
        *,
        float16_embeddings: bool = False,
        float16_gradients: bool = False,
        micro_batches: int = 1,
        ahead: bool = False,
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(
            groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size, gpu=spec.gpu
        )
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        self.ranks = ranks
        # a thread has connections, and a communicator, of its own
        apart = ranks.size > 1 and (ahead or micro_batches > 1)
        self._part = ranks.split(range(ranks.size)) if apart else None
        self._between = self._part or ranks
        self._exchange = Direct(self._between)
        self._stats = stats or Stats()
        self._readers = [GpuReader(*each) for each in zip(groups, shards.stores, strict=True)]
        self._routers = [
            GpuRouter(group, reader.state, ranks.size)
            for group, reader in zip(groups, self._readers, strict=True)
        ]
        self._rows, self._gradients = GpuRowCodec(float16_embeddings), GpuRowCodec(float16_gradients)
        self._tables = [table.name for group in groups for table in group.spec.tables]
        self._table_ends = np.cumsum([len(group.spec.tables) for group in groups])
        if groups:
            self._device = self._readers[0].state.memory.device
            self._side = SideStream(self._device)

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[GpuTraffic]:
        """Finds the keys of a batch, and tells all ranks how many are whose; waits for the GPU to have found them."""
        if not self._routers:  # a model of numbers alone
            return []
        with self._side() as ready:
            asked = [router.ask(batch, train=train) for router in self._routers]
            counts = [torch.diff(each.ends, prepend=each.ends.new_zeros(1)) for each in asked]
            by_rank = [each.view(self.ranks.size, -1) for each in counts]
            told = torch.cat(by_rank, dim=1).cpu().numpy()  # waits for this stream alone
            with self._waiting("ids", train=train):
                route = self._exchange.tell(told)
            asks, of_ranks = (
                np.split(each, self._table_ends[:-1], axis=1) for each in (route.told, route.asked)
            )
            return [
                router.traffic(*each, ready)
                for router, each in zip(self._routers, zip(asked, asks, of_ranks, strict=True), strict=True)
            ]

    def fetch(self, found: list[GpuTraffic]) -> None:
        """No-op: all rows are in memory."""

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        found: list[GpuTraffic] | None = None,
        *,
        train: bool,
    ) -> Iterator[Arrival[GpuExchanged]]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        traffic = self.find(batch, parts, train=train) if found is None else found
        for each in traffic:
            take_over(each.ready, each.tensors(), self._device)
        keys = [self._there("ids", KEY_WORDS, each, each.message, train=train) for each in traffic]
        reads, rows = [], []
        for each, reader, came in zip(traffic, self._readers, keys, strict=True):
            message = came().view(int(each.asked.sum()), KEY_WORDS)
            served, values = reader.read(message, each.sections, step, train=train)
            reads.append(GpuExchanged(each, served))
            rows.append(self._send_rows(reads[-1], reader, values, train=train))
        outputs = [router.bags.outputs(batch) for router in self._routers]
        fills = [
            router.fill(own, each, came, batch, parts)
            for router, own, each, came in zip(self._routers, outputs, traffic, rows, strict=True)
        ]
        of_all: list[Any] = [output for own in outputs for output in own]
        for _ in parts:
            for fill in fills:
                next(fill)
            yield reads, of_all

    def update(
        self,
        batch: Batch,
        reads: list[GpuExchanged],
        gradients: Sequence[Any],
        step: int,
        lr_scale: float,
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers.

        Raises:
            NonFiniteError: a gradient of any trainer is NaN or infinite; no row was moved anywhere.
        """
        coming = [
            self._send_gradients(read, router.gradients(read.traffic, given, batch))
            for read, router, given in zip(reads, self._routers, gradients, strict=True)
        ]
        sums = [
            reader.sum_gradients(read.served, came())
            for read, reader, came in zip(reads, self._readers, coming, strict=True)
        ]
        bad, num_served = self._judged(reads, [refused for _, refused in sums])
        num_asked = sum(int(read.traffic.asked.sum()) for read in reads)
        took_part = [float(any(gradient is not None for gradient in given)) for given in gradients]
        with self._waiting("vote", train=True):
            *all_took_part, worst, most = self.ranks.largest([*took_part, float(bad), float(num_asked)])
        self._stats.counters[ASKED_KEYS] += num_asked
        self._stats.counters[SERVED_ROWS] += num_served
        self._stats.counters[PACED_KEYS] += self.ranks.size * int(most)
        if worst:
            raise NonFiniteError(f"a gradient of table {self._tables[int(worst) - 1]!r} is NaN or infinite")
        for read, reader, summed, apply in zip(reads, self._readers, sums, all_took_part, strict=True):
            if apply:
                reader.apply(read.served, *summed, step, lr_scale)

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        return over_all_ranks(super().stats(), self.ranks, self._stats)

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        if self._part is not None:
            self._part.close()

    def _send_rows(
        self, read: GpuExchanged, reader: GpuReader, values: Tensor, *, train: bool
    ) -> Callable[[], Tensor]:
        """Rows that this rank serves go to who asked, and those that it asked for come: float32[U, W]."""
        each, codec, dim = read.traffic, self._rows, values.shape[1]
        came = self._back("embeddings", codec.width(dim), each, codec.pack(values), train=train)

        def rows() -> Tensor:
            found = codec.unpack(came().view(int(each.asks.sum()), codec.width(dim)))
            if codec.float16:  # what this rank alone asks for does not travel, and is not rounded
                mine, theirs = self._own(each.asks), self._own(each.asked)
                alone = reader.asked_once(read.served, theirs.start, theirs.stop)
                found[mine] = torch.where(alone.unsqueeze(1), values[theirs], found[mine])
            return found

        return rows

    def _send_gradients(self, read: GpuExchanged, own: Tensor) -> Coming:
        """Gradients of rows that this rank asked for go to their owners, and those of rows here come: float32[K, W]."""
        each, codec, dim = read.traffic, self._gradients, own.shape[1]
        came = self._there("gradients", codec.width(dim), each, codec.pack(own), train=True)

        def gradients() -> Tensor:
            found = codec.unpack(came().view(int(each.asked.sum()), codec.width(dim)))
            if codec.float16:  # what does not travel is not rounded
                found[self._own(each.asked)] = own[self._own(each.asks)]
            return found

        return gradients

    def _judged(self, reads: Sequence[GpuExchanged], refused: Sequence[Tensor]) -> tuple[int, int]:
        """1 + the number of a table with a gradient that is not finite, or 0; and how many keys are served: waits for the GPU."""
        if not reads:
            return 0, 0
        starts = self._table_ends - [len(read.traffic.sections.most) for read in reads]
        found = []
        for start, reader, read, flag in zip(starts.tolist(), self._readers, reads, refused, strict=True):
            bad = reader.bad_table(read.served, flag)
            found.append(torch.cat([torch.where(bad > 0, bad + start, bad), read.served.keys.num.long()]))
        told = torch.stack(found).cpu()
        return int(told[:, 0].max()), int(told[:, 1].sum())

    def _own(self, counts: Counts) -> slice:
        """This rank's part of what lies by rank."""
        behind = counts.sum(axis=1).cumsum()[self.ranks.rank]
        return slice(int(behind - counts[self.ranks.rank].sum()), int(behind))

    def _there(self, kind: str, width: int, each: GpuTraffic, sent: Tensor, *, train: bool) -> Coming:
        """Sends something of each key that this rank asks for to the key's owner."""
        return self._begin(kind, sent, width * each.asks, width * each.asked, train=train)

    def _back(self, kind: str, width: int, each: GpuTraffic, sent: Tensor, *, train: bool) -> Coming:
        """Sends something of each key that this rank is asked for to who asked."""
        return self._begin(kind, sent, width * each.asked, width * each.asks, train=train)

    def _begin(self, kind: str, sent: Tensor, to_each: Counts, of_each: Counts, *, train: bool) -> Coming:
        sizes, others = to_each.sum(axis=1), np.arange(self.ranks.size) != self.ranks.rank
        self._stats.sent(kind, sent.element_size() * int(sizes[others].sum()))
        with self._waiting(kind, train=train):
            came = self._between.begin_exchange(
                sent.reshape(-1), sizes.tolist(), of_each.sum(axis=1).tolist()
            )

        def wait() -> Tensor:
            with self._waiting(kind, train=train):
                return came()

        return wait

    @contextmanager
    def _waiting(self, kind: str, *, train: bool) -> Iterator[None]:
        """Times what the host waits for others; on a GPU it hands messages over and goes on."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._stats.spans.add(f"exchange {kind}", start, seconds)
        if train:
            self._stats.counters[EXCHANGE_NS] += round(1e9 * seconds)
