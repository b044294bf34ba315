"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that are asked of
this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import BetweenHosts, DirectExchange, Exchange
from girih.comm.group.trainers import Numbers, Vote
from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import UniqueRows
from girih.sparse.half import SparseStats
from girih.sparse.halves.group_messages import GroupExchange, GroupMessages, IncomingRows
from girih.sparse.halves.row_updates import Inverses, nonfinite_feature, nonfinite_gradient
from girih.sparse.halves.sharded import Arrival, Read, Request, ShardedHalf
from girih.sparse.routing.key_router import KeyRouter, RowCodec
from girih.sparse.routing.shard_reader import MergedRequest, ShardReader
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats

if TYPE_CHECKING:
    from girih.sparse.halves.gpu_counters import DeferredCounts


class ExchangingSparse(ShardedHalf[Request, Read]):
    """Base of the halves whose shards are spread evenly over the trainers.

    Args:
        threaded: messages of a step go over connections of their own: gloo allows one thread for each.
        micro_batches, ahead: see :class:`ShardedHalf`.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None,
        *,
        micro_batches: int,
        ahead: bool,
        threaded: bool,
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(
            groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size, gpu=spec.gpu
        )
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        self.ranks, self._stats = ranks, stats or Stats()
        self._part = ranks.split(range(ranks.size)) if ranks.size > 1 and threaded else None
        self._tables = [table.name for group in groups for table in group.spec.tables]
        self._asked_of_all = 0  # as far as the host knows what came of steps

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks, and how evenly keys were spread over them."""
        local, total = super().stats(), self.ranks.sum_by_name
        balance = total({ASKED_KEYS: self._stats.counters[ASKED_KEYS]})
        self._asked_of_all = balance[ASKED_KEYS]
        balance[PACED_KEYS] = self._stats.counters[PACED_KEYS]
        return SparseStats(
            total(local.store), total(local.rows), balance=balance, features=total(local.features)
        )

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        if self._part is not None:
            self._part.close()

    def _report(
        self,
        vote: Vote,
        batch: Batch,
        inverses: Inverses,
        numbers: Sequence[Tensor],
        counts: DeferredCounts | None = None,
    ) -> None:
        """Has a vote report what rows refuse, and how evenly keys were spread.

        Args:
            numbers: [G], of each group a key of this rank whose gradient is not finite, or -1; [R, 2], of each rank 1 + the
                number of a table with a sum that is not finite, or 0, and how many keys it is asked for; [1], how many of
                those here are unique.
            counts: the counters of all stores; None where the half is to be asked.
        """
        parts = [*numbers, *(() if counts is None else (counts.numbers,))]
        ends = np.cumsum([part.numel() for part in numbers])

        def error_from(flat: Numbers) -> NonFiniteError | None:
            local_keys, of_all, *_ = np.split(np.array(flat), ends)
            worst = int(of_all[::2].max())
            if (feature := nonfinite_feature(inverses, batch, local_keys.tolist())) or not worst:
                return nonfinite_gradient(feature)
            return NonFiniteError(f"a gradient of table {self._tables[worst - 1]!r} is NaN or infinite")

        def counters_from(flat: Numbers) -> Mapping[str, int] | None:
            _, of_all, num_served, of_store = np.split(np.array(flat), ends)
            asked = of_all[1::2]
            self._stats.counters[ASKED_KEYS] += int(asked[self.ranks.rank])
            self._stats.counters[SERVED_ROWS] += int(num_served[0])
            self._stats.counters[PACED_KEYS] += self.ranks.size * int(asked.max())
            self._asked_of_all += int(asked.sum())
            if counts is None:
                return None
            balance = {ASKED_KEYS: self._asked_of_all, PACED_KEYS: self._stats.counters[PACED_KEYS]}
            return {**counts.by_name(of_store.tolist()), **balance}

        vote.reported = torch.cat([part.reshape(-1).double().to(vote.loss.device) for part in parts])
        vote.error_from, vote.counters_from = error_from, counters_from


class CollectiveSparse(ExchangingSparse[list[GroupExchange], GroupExchange]):
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
        self._interleaving_sets = _numbered_sets(
            [group.spec.name for group in groups], interleaving, excluded
        )
        several = micro_batches > 1 or len(self._interleaving_sets) > 1
        super().__init__(
            spec, ranks, stats, micro_batches=micro_batches, ahead=ahead, threaded=several or ahead
        )
        between = self._part or ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange: Exchange = BetweenHosts(between, hosts) if grouped else DirectExchange(between)
        self._routers = [KeyRouter(group, ranks.size, self._shards.shards_each) for group in groups]
        self._readers = [ShardReader(stores, self._shards.pool) for stores in self._shards.stores]
        self._messages = GroupMessages(
            ranks,
            self.exchange,
            self._stats,
            dims=[reader.dim for reader in self._readers],
            num_tables=[len(group.spec.tables) for group in groups],
            rows=RowCodec(float16_embeddings),
            gradients=RowCodec(float16_gradients),
            threaded=several and ranks.size > 1,
        )

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[GroupExchange]:
        """Finds the keys of a batch, and sends them to their owners, which find those that several ask for."""
        if not self._routers:  # a model of numbers alone
            return []
        asked = [router.ask(batch, parts) for router in self._routers]
        route, received = self._messages.send_keys(asked, len(parts), train=train)
        exchanges = []
        for group, (reader, routed, requests) in enumerate(zip(self._readers, asked, received, strict=True)):
            lengths, keys, counts = zip(*requests, strict=True)
            of_ranks = np.concatenate([of_rank.reshape(len(parts), -1) for of_rank in lengths])
            request = MergedRequest.of(np.concatenate(keys), np.concatenate(counts), of_ranks)
            columns = slice(group * len(parts), (group + 1) * len(parts))
            exchanges.append(GroupExchange(group, routed, request, reader.find_keys(request), route, columns))
        return exchanges

    def fetch(self, request: list[GroupExchange]) -> None:
        """See :class:`ShardedHalf`."""
        for exchange in request:
            self._readers[exchange.group].fetch(exchange.served)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        request: list[GroupExchange] | None = None,
        *,
        train: bool,
    ) -> Generator[Arrival[GroupExchange], None, None]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        exchanges = self.find(batch, parts, train=train) if request is None else request
        if not exchanges:
            yield from (([], []) for _ in parts)
        coming: dict[int, IncomingRows] = {}

        def send(part: int, groups: list[int]) -> Future[Tensor]:
            if part == 0:
                coming.update((g, self._look_up(exchanges[g], batch, step, train=train)) for g in groups)
            sent = self._messages.packed_rows([exchanges[g] for g in groups], coming, part)
            return self._messages.send(
                "embeddings", [exchanges[g] for g in groups], sent, slice(part, part + 1), train=train
            )

        steps = list(product(range(len(parts)), self._interleaving_sets))
        for (part, groups), came in zip(steps, self._messages.one_ahead(send, steps), strict=True):
            self._messages.take_rows([exchanges[g] for g in groups], coming, part, came.numpy())
            for g in groups:
                coming[g].pooling.fill(parts[part])
            if groups is self._interleaving_sets[-1]:
                for exchange in [] if train else exchanges:
                    group, keys = self.groups_of_tables[exchange.group], exchange.routed.keys
                    absent = self._messages.send_absent(exchange)
                    self.features.add_evaluation(batch, group, keys.inverse, absent)
                outputs = [output for g in range(len(exchanges)) for output in coming[g].pooling.outputs]
                yield exchanges, outputs

    def update(
        self,
        batch: Batch,
        reads: list[GroupExchange],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers, or nothing."""
        local: dict[int, NDArray[np.float32]] = {}
        local_keys = [-1] * len(reads)

        def send(groups: list[int]) -> Future[Tensor]:
            for g in groups:
                local[g], local_keys[g] = self._routers[g].bags.scatter(
                    gradients[g], reads[g].routed.keys, batch
                )
            members = [reads[g] for g in groups]
            return self._messages.send(
                "gradients", members, self._messages.packed_gradients(members, local), slice(None), train=True
            )

        sums, bad = {}, 0
        ways = [(groups,) for groups in self._interleaving_sets]
        for groups, came in zip(self._interleaving_sets, self._messages.one_ahead(send, ways), strict=True):
            received = self._messages.received_gradients([reads[g] for g in groups], came.numpy(), local)
            for g, of_ranks in zip(groups, received, strict=True):
                sums[g], nonfinite = self._readers[g].sum_gradients(reads[g].served, of_ranks)
                bad = max(bad, 0 if nonfinite is None else 1 + self._tables.index(nonfinite))
        took_part = [float(any(gradient is not None for gradient in outputs)) for outputs in gradients]
        num_asked = int(reads[0].route.received_counts.sum()) if reads else 0
        words = torch.tensor([float(bad), float(num_asked), *took_part], dtype=torch.float64)
        with self._messages.waiting("vote", train=True):
            of_all = vote.cast(torch.tensor(max([bad - 1, *local_keys]) >= 0), words)
        inverses = [
            (router.group, read.routed.keys.inverse)
            for router, read in zip(self._routers, reads, strict=True)
        ]
        num_served = sum(len(shard.keys) for exchange in reads for shard in exchange.served.shards)
        self._report(
            vote, batch, inverses, [torch.tensor(local_keys), of_all[:, :2], torch.tensor([num_served])]
        )
        if vote.known_refused:
            return
        for exchange, apply in zip(reads, of_all[:, 2:].any(dim=0).tolist(), strict=True):
            if apply:
                self._readers[exchange.group].apply(exchange.served, sums[exchange.group], step, lr_scale)

    def close(self) -> None:
        """See :class:`ExchangingSparse`."""
        super().close()
        self._messages.close()

    def _look_up(self, exchange: GroupExchange, batch: Batch, step: int, *, train: bool) -> IncomingRows:
        """Reads the rows that this rank is asked for."""
        reader = self._readers[exchange.group]
        _, served = reader.look_up(exchange.requests, step, train=train, keys=exchange.served)
        memory: list[NDArray[np.float32]] = []
        asked_rows = UniqueRows(np.empty(exchange.routed.keys.end, np.int64), memory)
        pooling = self._routers[exchange.group].bags.pooling(asked_rows, exchange.routed.keys, batch)
        return IncomingRows(served, asked_rows, memory, pooling)


def _numbered_sets(
    names: Sequence[str], interleaving: Sequence[Sequence[str]], excluded: Sequence[str]
) -> list[list[int]]:
    """Numbers of the groups whose rows travel together, in the order in which they do."""
    wanted = [
        part for part in (excluded, *(interleaving or [[n for n in names if n not in excluded]])) if part
    ]
    if sorted(name for part in wanted for name in part) != sorted(names):
        raise ConfigError(
            f"schedule: interleaving groups {[list(part) for part in interleaving]}, excluded {list(excluded)}; expected"
            f" each of the groups {', '.join(names)} once; plan again with girih plan"
        )
    return [[names.index(name) for name in part] for part in wanted]
