"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that are asked of
this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import product

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
from girih.sparse.groups.group import feature_of
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import UniqueRows
from girih.sparse.half import SparseStats
from girih.sparse.halves.group_messages import GroupExchange, GroupMessages, IncomingRows
from girih.sparse.halves.row_updates import nonfinite_gradient
from girih.sparse.halves.sharded import Arrival, ShardedHalf
from girih.sparse.routing.key_router import KeyRouter, RowCodec
from girih.sparse.routing.shard_reader import MergedRequest, ShardReader
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats


class CollectiveSparse(ShardedHalf[list[GroupExchange], GroupExchange]):
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
        shards = LocalShards(groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size)
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        self.ranks = ranks
        several = micro_batches > 1 or len(self._interleaving_sets) > 1
        # gloo allows one thread; exchanges during a backward pass have their own connections
        threaded = ranks.size > 1 and (several or ahead)
        self._part = ranks.split(range(ranks.size)) if threaded else None
        between = self._part or ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange: Exchange = BetweenHosts(between, hosts) if grouped else DirectExchange(between)
        self._stats = stats or Stats()
        self._routers = [KeyRouter(group, ranks.size, shards.shards_each) for group in groups]
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._tables = [table.name for group in groups for table in group.spec.tables]
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
        worst, most, *all_took_part = of_all.amax(dim=0).tolist()
        self._stats.counters[ASKED_KEYS] += num_asked
        self._stats.counters[SERVED_ROWS] += sum(
            len(shard.keys) for exchange in reads for shard in exchange.served.shards
        )
        self._stats.counters[PACED_KEYS] += self.ranks.size * int(most)
        if vote.stands:
            vote.error_from = partial(self._error, batch, reads, local_keys, int(worst))
            return
        for exchange, apply in zip(reads, all_took_part, strict=True):
            if apply:
                self._readers[exchange.group].apply(exchange.served, sums[exchange.group], step, lr_scale)

    def _error(
        self, batch: Batch, reads: list[GroupExchange], keys: Sequence[int], worst: int, numbers: Numbers
    ) -> NonFiniteError | None:
        """Why rows refuse a step: a feature of this trainer, or a table of any."""
        for router, read, key in zip(self._routers, reads, keys, strict=True):
            if key >= 0:
                return nonfinite_gradient(feature_of(router.group, read.routed.keys.inverse, key, batch))
        table = self._tables[worst - 1] if worst else None
        return None if table is None else NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        return over_all_ranks(super().stats(), self.ranks, self._stats)

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        self._messages.close()
        if self._part is not None:
            self._part.close()

    def _look_up(self, exchange: GroupExchange, batch: Batch, step: int, *, train: bool) -> IncomingRows:
        """Reads the rows that this rank is asked for."""
        reader = self._readers[exchange.group]
        _, served = reader.look_up(exchange.requests, step, train=train, keys=exchange.served)
        memory: list[NDArray[np.float32]] = []
        asked_rows = UniqueRows(np.empty(exchange.routed.keys.end, np.int64), memory)
        pooling = self._routers[exchange.group].bags.pooling(asked_rows, exchange.routed.keys, batch)
        return IncomingRows(served, asked_rows, memory, pooling)


def over_all_ranks(local: SparseStats, ranks: TrainerGroup, stats: Stats) -> SparseStats:
    """Sums over all ranks, and how evenly keys were spread over them.

    Args:
        stats: those of this process.
    """
    balance = ranks.sum_by_name({ASKED_KEYS: stats.counters[ASKED_KEYS]})
    return SparseStats(
        ranks.sum_by_name(local.store),
        ranks.sum_by_name(local.rows),
        balance={**balance, PACED_KEYS: stats.counters[PACED_KEYS]},
        features=ranks.sum_by_name(local.features),
    )


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
