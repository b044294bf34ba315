"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Shapes: R ranks, M micro-batches, T tables of a group, U unique keys of this rank's batch, K keys that are asked of
this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import product

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.between_hosts import BetweenHosts
from girih.comm.group.exchange import Direct, Exchange
from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.runs.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import Rows
from girih.sparse.half import SparseStats
from girih.sparse.halves.group_messages import Coming, GroupMessages, Traffic
from girih.sparse.halves.here import Arrival, ShardedHalf
from girih.sparse.routing.key_router import KeyRouter
from girih.sparse.routing.row_codec import RowCodec
from girih.sparse.routing.shard_reader import Request, ShardReader
from girih.sparse.spec import SparseSpec


class CollectiveSparse(ShardedHalf[list[Traffic], Traffic]):
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
        # gloo is not for two threads: what is exchanged beside a backward pass has connections of its own
        apart = ranks.size > 1 and (several or ahead)
        self._part = ranks.split(range(ranks.size)) if apart else None
        between = self._part or ranks
        grouped = 1 < len(set(hosts)) < len(hosts)
        self.exchange: Exchange = BetweenHosts(between, hosts) if grouped else Direct(between)
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
            apart=several and ranks.size > 1,
        )

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[Traffic]:
        """Finds the keys of a batch, and sends them to their owners, which find those that several ask for."""
        if not self._routers:  # a model of numbers alone
            return []
        asked = [router.ask(batch, parts) for router in self._routers]
        route, received = self._messages.send_keys(asked, len(parts), train=train)
        found = []
        for group, (reader, own, requests) in enumerate(zip(self._readers, asked, received, strict=True)):
            lengths, keys, counts = zip(*requests, strict=True)
            of_ranks = np.concatenate([each.reshape(len(parts), -1) for each in lengths])
            request = Request.of(np.concatenate(keys), np.concatenate(counts), of_ranks)
            columns = slice(group * len(parts), (group + 1) * len(parts))
            found.append(Traffic(group, own, request, reader.find_keys(request), route, columns))
        return found

    def fetch(self, found: list[Traffic]) -> None:
        """See :class:`ShardedHalf`."""
        for each in found:
            self._readers[each.group].fetch(each.served)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        found: list[Traffic] | None = None,
        *,
        train: bool,
    ) -> Iterator[Arrival[Traffic]]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        traffic = self.find(batch, parts, train=train) if found is None else found
        if not traffic:
            yield from (([], []) for _ in parts)
        coming: dict[int, Coming] = {}

        def send(part: int, convoy: list[int]) -> Future[Tensor]:
            if part == 0:
                coming.update((g, self._look_up(traffic[g], batch, step, train=train)) for g in convoy)
            sent = self._messages.packed_rows([traffic[g] for g in convoy], coming, part)
            return self._messages.send(
                "embeddings", [traffic[g] for g in convoy], sent, slice(part, part + 1), train=train
            )

        steps = list(product(range(len(parts)), self._convoys))
        for (part, convoy), came in zip(steps, self._messages.one_ahead(send, steps), strict=True):
            self._messages.take_rows([traffic[g] for g in convoy], coming, part, came.numpy())
            for g in convoy:
                coming[g].pooling.fill(parts[part])
            if convoy is self._convoys[-1]:
                for each in [] if train else traffic:
                    group, keys = self.groups_of_tables[each.group], each.own.keys
                    self.features.add_evaluation(batch, group, keys.inverse, self._messages.send_absent(each))
                outputs = [output for g in range(len(traffic)) for output in coming[g].pooling.outputs]
                yield traffic, outputs

    def update(
        self, batch: Batch, reads: list[Traffic], gradients: Sequence[Gradients], step: int, lr_scale: float
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
            return self._messages.send(
                "gradients", members, self._messages.packed_gradients(members, own), slice(None), train=True
            )

        sums, bad = {}, 0
        ways = [(convoy,) for convoy in self._convoys]
        for convoy, came in zip(self._convoys, self._messages.one_ahead(send, ways), strict=True):
            received = self._messages.received_gradients([reads[g] for g in convoy], came.numpy(), own)
            for g, of_ranks in zip(convoy, received, strict=True):
                sums[g], nonfinite = self._readers[g].sum_gradients(reads[g].served, of_ranks)
                bad = max(bad, 0 if nonfinite is None else 1 + self._tables.index(nonfinite))
        took_part = [float(any(gradient is not None for gradient in given)) for given in gradients]
        num_asked = int(reads[0].route.asked.sum()) if reads else 0
        with self._messages.waiting("vote", train=True):
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
        return over_all_ranks(super().stats(), self.ranks, self._stats)

    def close(self) -> None:
        """See :class:`ShardedHalf`; leaves the others."""
        super().close()
        self._messages.close()
        if self._part is not None:
            self._part.close()

    def _look_up(self, each: Traffic, batch: Batch, step: int, *, train: bool) -> Coming:
        """Reads the rows that this rank is asked for."""
        reader = self._readers[each.group]
        _, served = reader.look_up(each.requests, step, train=train, found=each.served)
        memory: list[NDArray[np.float32]] = []
        own = Rows(np.empty(each.own.keys.end, np.int64), memory)
        pooling = self._routers[each.group].bags.pooling(own, each.own.keys, batch)
        return Coming(served, own, memory, pooling)


def over_all_ranks(here: SparseStats, ranks: TrainerGroup, stats: Stats) -> SparseStats:
    """Sums of what all ranks have, and how evenly keys were spread over them.

    Args:
        stats: those of this process.
    """
    balance = ranks.sum_by_name({ASKED_KEYS: stats.counters[ASKED_KEYS]})
    return SparseStats(
        ranks.sum_by_name(here.store),
        ranks.sum_by_name(here.rows),
        balance={**balance, PACED_KEYS: stats.counters[PACED_KEYS]},
        features=ranks.sum_by_name(here.features),
    )


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
