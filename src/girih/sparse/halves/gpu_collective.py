"""Shards spread over the GPUs of all trainers: keys and rows go from GPU to GPU, by AllToAllv.

It is :class:`girih.sparse.halves.collective.CollectiveSparse` with rows in GPU memory. A batch that is prepared has its unique keys found,
and all ranks told how many go where, on a stream of its own, while batches before it are computed. Its keys travel with the rows of
the batch before, while the trainer waits for these: so all trainers issue one order of messages, those of their dense halves included. What
ids alone decide at their owners is done on that stream too, and so are rows brought in from tiers below.

Shapes: R ranks, G groups, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank, W columns of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import DirectExchange
from girih.comm.group.trainers import Numbers, Vote
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.sparse.groups.gpu_bags import SideStream, take_over
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.half import SparseStats
from girih.sparse.halves.collective import over_all_ranks
from girih.sparse.halves.gpu_counters import counts_of, summed_over
from girih.sparse.halves.gpu_messages import GpuMessages
from girih.sparse.halves.row_updates import nonfinite_gradient
from girih.sparse.halves.sharded import Arrival, ShardedHalf
from girih.sparse.routing.gpu_reader import GpuReader, GpuServed
from girih.sparse.routing.gpu_router import GpuRouter, GpuRowCodec, GpuTraffic
from girih.sparse.spec import SparseSpec
from girih.store.gpu.gpu_memory import to_device, to_host
from girih.store.gpu.gpu_state import GpuState
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats


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

    def tensors(self) -> Iterator[Tensor | None]:
        """All tensors of this."""
        for group_traffic in self.traffic:
            yield from group_traffic.tensors()
        for served in self.served or ():
            yield from served.tensors()


@dataclass(frozen=True)
class GpuExchanged:
    """One group in one step: what was asked here and elsewhere, what is served here, and where these rows are, as stores have it."""

    traffic: GpuTraffic
    served: GpuServed
    rows: Any


class GpuCollectiveSparse(ShardedHalf[GpuRequest, GpuExchanged]):
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
        # counts go over gloo while the trainer computes, and gloo allows one thread
        self._part = ranks.split(range(ranks.size)) if ranks.size > 1 and ahead else None
        self._exchange = DirectExchange(self._part or ranks)
        self._stats = stats or Stats()
        self._messages = GpuMessages(
            ranks,
            self._stats,
            rows=GpuRowCodec(float16_embeddings),
            gradients=GpuRowCodec(float16_gradients),
        )
        self._readers = [GpuReader(*each) for each in zip(groups, shards.stores, strict=True)]
        shared_copy = SharedCopy()
        self._routers = [
            GpuRouter(group, reader.state, ranks.size, shared_copy)
            for group, reader in zip(groups, self._readers, strict=True)
        ]
        self._unsent: deque[GpuRequest] = deque()
        self._tables = [table.name for group in groups for table in group.spec.tables]
        self._table_ends = np.cumsum([len(group.spec.tables) for group in groups])
        # tiers below have the host wait in every step
        self._memories = [each.state.memory for each in self._readers if isinstance(each.state, GpuState)]
        self._is_deferred = bool(groups) and len(self._memories) == len(groups)
        self._asked_of_all = 0  # as far as the host knows what came of steps
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
            counts = [torch.diff(item.ends, prepend=item.ends.new_zeros(1)) for item in asked]
            by_rank = [item.view(self.ranks.size, -1) for item in counts]
            counts_of_ranks = to_host(torch.cat(by_rank, dim=1))  # waits for this stream alone
            with self._messages.waiting("ids", train=train):
                route = self._exchange.send_counts(counts_of_ranks)
            asks, of_ranks = (
                np.split(item, self._table_ends[:-1], axis=1)
                for item in (route.sent_counts, route.received_counts)
            )
            return GpuRequest(
                [
                    router.traffic(*item)
                    for router, item in zip(
                        self._routers, zip(asked, asks, of_ranks, strict=True), strict=True
                    )
                ]
            )

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
            take_over(request.ready, request.tensors(), self._device)
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
        sums = self._summed(batch, reads, gradients)
        took_part = [float(any(gradient is not None for gradient in outputs)) for outputs in gradients]
        num_asked = sum(int(read.traffic.asked.sum()) for read in reads)
        num_served = torch.cat([read.served.keys.num for read in reads]).double().sum()  # each key once
        worst, local_keys = self._worst(reads, sums), torch.cat([summed.local_key for summed in sums])
        words = torch.cat(
            [worst.reshape(1).double(), to_device(np.array([num_asked, *took_part]), self._device)]
        )
        with self._messages.waiting("vote", train=True):
            of_all = vote.cast((worst > 0) | (local_keys >= 0).any(), words)
        if not vote.stands:
            # as the kernels have it: a key's number where nothing is to move, else -1; aligned, as they are compiled for
            moves = ~vote.refused & (of_all[:, 2:] > 0).any(dim=0)
            flags = (-moves.to(torch.int32)).to(self._device).unsqueeze(1).repeat(1, 4)
            for read, reader, summed, flag in zip(reads, self._readers, sums, flags, strict=True):
                reader.apply(read.served, read.rows, summed.totals, flag[:1], step, lr_scale)
        parts = [local_keys, of_all[:, :2].reshape(-1), num_served.reshape(1)]
        counts = None
        if vote.deferred:
            stores = [store for _, store in self._shards.files()]
            counts = summed_over(counts_of(stores, self._memories), self.ranks)
            parts.append(counts.numbers)
        ends = np.cumsum([part.numel() for part in parts[:3]])

        def error_from(numbers: Numbers) -> NonFiniteError | None:
            local_keys, of_all, *_ = np.split(np.array(numbers), ends)
            for router, read, key in zip(self._routers, reads, local_keys, strict=True):
                if key >= 0:
                    return nonfinite_gradient(router.feature_of(read.traffic, int(key), batch))
            worst = of_all[::2].max()
            table = self._tables[int(worst) - 1] if worst else None
            return (
                None if table is None else NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")
            )

        def counters_from(numbers: Numbers) -> Mapping[str, int] | None:
            _, of_all, num_served, of_store = np.split(np.array(numbers), ends)
            asked = of_all[1::2]
            self._stats.counters[ASKED_KEYS] += num_asked
            self._stats.counters[SERVED_ROWS] += int(num_served[0])
            self._stats.counters[PACED_KEYS] += self.ranks.size * int(asked.max())
            self._asked_of_all += int(asked.sum())
            if counts is None:
                return None
            balance = {ASKED_KEYS: self._asked_of_all, PACED_KEYS: self._stats.counters[PACED_KEYS]}
            return {**counts.by_name(of_store.tolist()), **balance}

        vote.reported = torch.cat([part.double().to(vote.loss.device) for part in parts])
        vote.error_from, vote.counters_from = error_from, counters_from

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        totals = over_all_ranks(super().stats(), self.ranks, self._stats)
        self._asked_of_all = totals.balance[ASKED_KEYS]
        return totals

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        if self._part is not None:
            self._part.close()

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
    ) -> list[_Summed]:
        """The sums over all trainers of the gradients of each group's rows here; waits for nothing on a GPU."""
        local_keys, coming = [], []
        for read, router, outputs in zip(reads, self._routers, gradients, strict=True):
            sent, local_key = router.gradients(read.traffic, outputs, batch)
            local_keys.append(local_key)
            coming.append(self._messages.send_gradients(read.traffic, sent))
        return [
            _Summed(*reader.sum_gradients(read.served, came()), local_key)
            for read, reader, came, local_key in zip(reads, self._readers, coming, local_keys, strict=True)
        ]

    def _worst(self, reads: Sequence[GpuExchanged], sums: Sequence[_Summed]) -> Tensor:
        """int64[], on the device: 1 + the number of a table with a sum that is not finite, or 0."""
        starts = self._table_ends - [len(read.traffic.sections.most) for read in reads]
        worst = []
        for start, reader, read, summed in zip(starts.tolist(), self._readers, reads, sums, strict=True):
            bad = reader.bad_table(read.served, summed.refused)
            worst.append(torch.where(bad > 0, bad + start, bad))
        return torch.cat(worst).max()


@dataclass(frozen=True)
class _Summed:
    """Gradients of one group's rows here.

    Attributes:
        totals: float32[K, W], of which the first are those of unique keys.
        refused: int32[1]: a key whose own is not finite, or -1.
        local_key: int32[1]: a key of this rank's batch whose gradient is not finite, or -1.
    """

    totals: Tensor
    refused: Tensor
    local_key: Tensor
