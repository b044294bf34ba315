"""Shards spread over the GPUs of all trainers: keys and rows go from GPU to GPU, by AllToAllv.

It is :class:`girih.sparse.halves.collective.CollectiveSparse` with rows in GPU memory. A batch that is prepared has its unique keys found,
and all ranks told how many go where, on a stream of its own, while batches before it are computed. Its keys travel with the rows of
the batch before, while the trainer waits for these: so all trainers issue one order of messages, those of their dense halves included. What
ids alone decide at their owners is done on that stream too, and so are rows brought in from tiers below.

Shapes: R ranks, G groups, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank, W columns of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import DirectExchange
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch
from girih.sparse.groups.gpu_bags import SideStream, take_over
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.halves.collective import ExchangingSparse
from girih.sparse.halves.gpu_counters import counts_of, summed_over
from girih.sparse.halves.gpu_messages import GpuMessages
from girih.sparse.halves.sharded import Arrival
from girih.sparse.routing.gpu_reader import GpuReader, GpuServed
from girih.sparse.routing.gpu_router import GpuRouter, GpuRowCodec, GpuTraffic
from girih.sparse.spec import SparseSpec
from girih.store.gpu.gpu_memory import to_device, to_host
from girih.store.gpu.gpu_state import GpuState
from girih.telemetry.stats import Stats

Sums = Sequence[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class GpuRequest:
    """The keys of one batch.

    Attributes:
        traffic: of each group, what this rank asks for, and how much is asked of it.
        served: of each group, the keys that are asked of this rank; None until they have come.
        ready: when all of it is there, for other streams.
        brought: done once its rows were brought in from tiers below; None where nobody was asked to.
    """

    traffic: Sequence[GpuTraffic]
    served: Sequence[GpuServed] | None = None
    ready: torch.cuda.Event | None = None
    brought: Future[None] | None = None


@dataclass(frozen=True)
class GpuExchanged:
    """One group in one step: what was asked here and elsewhere, what is served here, and where these rows are, as stores have it."""

    traffic: GpuTraffic
    served: GpuServed
    rows: Any


class GpuCollectiveSparse(ExchangingSparse[GpuRequest, GpuExchanged]):
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
        # counts go over gloo while the trainer computes
        super().__init__(spec, ranks, stats, micro_batches=micro_batches, ahead=ahead, threaded=ahead)
        groups = self.groups_of_tables
        self._exchange = DirectExchange(self._part or ranks)
        self._messages = GpuMessages(
            ranks,
            self._stats,
            rows=GpuRowCodec(float16_embeddings),
            gradients=GpuRowCodec(float16_gradients),
        )
        self._readers = [GpuReader(*each) for each in zip(groups, self._shards.stores, strict=True)]
        shared_copy = SharedCopy()
        self._routers = [
            GpuRouter(group, reader.state, ranks.size, shared_copy)
            for group, reader in zip(groups, self._readers, strict=True)
        ]
        self._unsent: deque[GpuRequest] = deque()
        self._table_ends = np.cumsum([len(group.spec.tables) for group in groups])
        # tiers below have the host wait in every step
        self._memories = [each.state.memory for each in self._readers if isinstance(each.state, GpuState)]
        self._is_deferred = bool(groups) and len(self._memories) == len(groups)
        if groups:
            self._device = self._readers[0].state.device
            self._side = SideStream(self._device)

    def is_on_gpu_of(self, device: torch.device) -> bool:
        """Whether there are rows, all in the memory of a device's kind; where kernels are interpreted, that is the CPU."""
        return self._is_deferred and self._device.type == device.type

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> GpuRequest:
        """Finds the keys of a batch, and tells all ranks how many are whose; waits for the GPU to have found them."""
        if not self._routers:  # a model of numbers alone
            return GpuRequest(())
        with self._side():
            asked = [router.ask(batch, train=train) for router in self._routers]
            counts = [torch.diff(ends, prepend=ends.new_zeros(1)) for *_, ends in asked]
            by_rank = [item.view(self.ranks.size, -1) for item in counts]
            counts_of_ranks = to_host(torch.cat(by_rank, dim=1))  # waits for this stream alone
            with self._messages.waiting("ids", train=train):
                route = self._exchange.send_counts(counts_of_ranks)
            asks, of_ranks = (
                np.split(item, self._table_ends[:-1], axis=1)
                for item in (route.sent_counts, route.received_counts)
            )
            groups = zip(self._routers, asked, asks, of_ranks, strict=True)
            return GpuRequest([router.traffic(*keys[:2], *both) for router, keys, *both in groups])

    def fetch(self, request: GpuRequest) -> None:
        """Has the keys sent with the rows of the next batch that is read."""
        self._unsent.append(request)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        request: GpuRequest | None = None,
        *,
        train: bool,
    ) -> Generator[Arrival[GpuExchanged], None, None]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        request = self.find(batch, parts, train=train) if request is None else request
        if request.brought is not None and request.brought.done():
            request.brought.result()  # which raises what went wrong there
        all_served = self._served(request, train=train)
        if request.traffic:
            take_over(request.ready, request, self._device)
        reads, rows = [], []
        for traffic, reader, served in zip(request.traffic, self._readers, all_served, strict=True):
            places, values = reader.read(served, step, train=train)
            reads.append(GpuExchanged(traffic, served, places))
            alone = partial(reader.asked_once, served)
            rows.append(self._messages.send_rows(traffic, values, alone, train=train))
        if not train:
            self._count_absent(batch, reads)
        outputs = [router.bags.outputs(batch) for router in self._routers]
        fills = [
            router.fill(tensors, traffic, came, batch, parts)
            for router, tensors, traffic, came in zip(
                self._routers, outputs, request.traffic, rows, strict=True
            )
        ]
        of_all: list[Any] = [output for tensors in outputs for output in tensors]
        for number, _ in enumerate(parts):
            for fill in fills:
                next(fill)
            while self._unsent and number == 0:  # before the trainer goes on, and sends messages itself
                request = self._unsent.popleft()
                self._served(request, train=True)
                if self._readers and not self._is_deferred:
                    # behind this batch's rows, for which the trainer waits
                    request.brought = self._submit(partial(self._begin_read, request))
            yield reads, of_all

    def update(
        self,
        batch: Batch,
        reads: list[GpuExchanged],
        gradients: Sequence[Any],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers, or nothing."""
        if not reads:
            vote.cast(torch.tensor(False))
            return
        sums, local_keys = self._summed(batch, reads, gradients)
        worst = self._worst(reads, sums)
        took_part = [float(any(gradient is not None for gradient in outputs)) for outputs in gradients]
        num_asked = sum(int(read.traffic.asked.sum()) for read in reads)
        num_served = torch.cat([read.served.keys.num for read in reads]).double().sum()  # each key once
        words = torch.cat(
            [worst.reshape(1).double(), to_device(np.array([num_asked, *took_part]), self._device)]
        )
        with self._messages.waiting("vote", train=True):
            of_all = vote.cast((worst > 0) | (local_keys >= 0).any(), words)
        if not vote.known_refused:
            # as the kernels have it: a key's number where nothing is to move, else -1; aligned, as they are compiled for
            moves = ~vote.refused & (of_all[:, 2:] > 0).any(dim=0)
            flags = (-moves.to(torch.int32)).to(self._device).unsqueeze(1).repeat(1, 4)
            for read, reader, (totals, _), flag in zip(reads, self._readers, sums, flags, strict=True):
                reader.apply(read.served, read.rows, totals, flag[:1], step, lr_scale)
        counts = None
        if vote.deferred:
            stores = [store for _, store in self._shards.files()]
            counts = summed_over(counts_of(stores, self._memories), self.ranks)
        inverses = [
            (router.group, read.traffic.keys.unique.inverse)
            for router, read in zip(self._routers, reads, strict=True)
        ]
        self._report(vote, batch, inverses, [local_keys, of_all[:, :2], num_served], counts)

    def _served(self, request: GpuRequest, *, train: bool) -> Sequence[GpuServed]:
        """The keys that are asked of this rank, beside whatever the GPU does; keys are sent where they were not."""
        if request.served is None:
            if not request.traffic:
                return ()
            with self._side() as request.ready:
                coming = [self._messages.send_keys(traffic, train=train) for traffic in request.traffic]
                request.served = [
                    reader.find(came(), traffic.sections, train=train)
                    for reader, traffic, came in zip(self._readers, request.traffic, coming, strict=True)
                ]
        return request.served

    def _count_absent(self, batch: Batch, reads: Sequence[GpuExchanged]) -> None:
        """Counts the ids of an evaluation that have no row; waits for the GPU."""
        for read, router in zip(reads, self._routers, strict=True):
            asked, unique = read.traffic, read.traffic.keys.unique
            absent = torch.as_tensor(read.rows, device=self._device) < 0
            sent = absent[read.served.unique.inverse.long()].to(torch.uint8)
            flags = sent.new_zeros(len(unique.keys))
            flags[asked.order] = self._messages.send_to_askers("embeddings", 1, asked, sent, train=False)()
            self.features.add_evaluation(batch, router.group, to_host(unique.inverse), to_host(flags))

    def _begin_read(self, request: GpuRequest) -> None:
        """Brings in the rows of a batch that was served, beside whatever the GPU does."""
        with self._side():
            for reader, served in zip(self._readers, request.served or (), strict=True):
                reader.begin_read(served)

    def _summed(
        self, batch: Batch, reads: Sequence[GpuExchanged], gradients: Sequence[Sequence[Tensor | None]]
    ) -> tuple[Sums, Tensor]:
        """The sums over all trainers of the gradients of each group's rows here; waits for nothing on a GPU.

        Returns:
            These, as :meth:`GpuReader.sum_gradients` gives them; and int32[G]: of each group a key of this rank's batch whose
            gradient is not finite, or -1.
        """
        local_keys, coming = [], []
        for read, router, outputs in zip(reads, self._routers, gradients, strict=True):
            sent, local_key = router.gradients(read.traffic, outputs, batch)
            local_keys.append(local_key)
            coming.append(self._messages.send_gradients(read.traffic, sent))
        readers = zip(reads, self._readers, coming, strict=True)
        sums = [reader.sum_gradients(read.served, came()) for read, reader, came in readers]
        return sums, torch.cat(local_keys)

    def _worst(self, reads: Sequence[GpuExchanged], sums: Sums) -> Tensor:
        """int64[], on the device: 1 + the number of a table with a sum that is not finite, or 0."""
        starts = self._table_ends - [len(read.traffic.sections.most) for read in reads]
        worst = []
        for start, reader, read, (_, refused) in zip(
            starts.tolist(), self._readers, reads, sums, strict=True
        ):
            bad = reader.bad_table(read.served, refused)
            worst.append(torch.where(bad > 0, bad + start, bad))
        return torch.cat(worst).max()
