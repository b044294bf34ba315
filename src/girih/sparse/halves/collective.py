"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Shapes: R ranks, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.runs.stats import Stats
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import GroupKeys, Rows
from girih.sparse.half import SparseStats
from girih.sparse.halves.here import ShardedHalf
from girih.sparse.routing.key_router import KeyRequest, KeyRouter, RoutedKeys
from girih.sparse.routing.shard_reader import ShardReader
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True)
class _Traffic:
    """One group in one step: what this rank asks for, what it is asked for, and how many keys each way.

    Attributes:
        asks, asked: number of keys for each rank, and of each rank.
    """

    own: RoutedKeys
    served: GroupKeys
    asks: list[int]
    asked: list[int]


class CollectiveSparse(ShardedHalf[_Traffic]):
    """Tables whose shards are spread evenly over the trainers."""

    def __init__(self, spec: SparseSpec, ranks: TrainerGroup, stats: Stats | None = None) -> None:
        groups = spec.groups()
        shards = LocalShards(groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size)
        super().__init__(groups, shards)
        self.ranks = ranks
        self._stats = stats or Stats()
        self._routers = [KeyRouter(group, ranks.size, shards.shards_each) for group in groups]
        self._readers = [ShardReader(stores, shards.pool) for stores in shards.stores]
        self._tables = [table.name for group in groups for table in group.spec.tables]

    def read(
        self, batch: Batch, step: int, *, train: bool
    ) -> tuple[list[_Traffic], list[NDArray[np.float32]]]:
        """Sends keys to their owners, and gets their rows; see :class:`ShardedHalf`."""
        traffic: list[_Traffic] = []
        outputs: list[NDArray[np.float32]] = []
        asked = [router.ask(batch) for router in self._routers]
        for router, reader, own, requests in zip(
            self._routers, self._readers, asked, self._send_keys(asked), strict=True
        ):
            of_rank, keys, counts = zip(*requests, strict=True)
            lengths = np.stack(of_rank)
            served, values = reader.read(
                np.concatenate(keys), np.concatenate(counts), lengths, step, train=train
            )
            each = _Traffic(own, served, np.diff(own.bounds()).tolist(), lengths.sum(axis=1).tolist())
            values = self._send("embeddings", values, each.asked, each.asks)
            outputs += router.bags.pool(Rows.copied(values), own.keys, batch)
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
            received = self._send("gradients", own, each.asks, each.asked)
            totals, nonfinite = reader.sum_gradients(each.served, received)
            took_part.append(float(any(gradient is not None for gradient in given)))
            bad = max(bad, 0 if nonfinite is None else 1 + self._tables.index(nonfinite))
            sums.append(totals)
        *all_took_part, worst = self.ranks.largest([*took_part, float(bad)])
        if worst:
            raise NonFiniteError(f"a gradient of table {self._tables[int(worst) - 1]!r} is NaN or infinite")
        for reader, each, totals, apply in zip(self._readers, reads, sums, all_took_part, strict=True):
            if apply:
                reader.apply(each.served, totals, step, lr_scale)

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        here = super().stats()
        return SparseStats(self.ranks.sum_by_name(here.store), self.ranks.sum_by_name(here.rows))

    def _send(
        self, kind: str, rows: NDArray[np.float32], sent: list[int], received: list[int]
    ) -> NDArray[np.float32]:
        """Rows, float32[·, W], to each rank its own; returns those that came."""
        width = rows.shape[1]
        flat = torch.from_numpy(rows.reshape(-1))
        self._stats.sent(kind, 4 * width * (sum(sent) - sent[self.ranks.rank]))
        out = self.ranks.exchange(flat, [n * width for n in sent], [n * width for n in received])
        return out.numpy().reshape(-1, width)

    def _send_keys(self, asked: list[RoutedKeys]) -> list[tuple[KeyRequest, ...]]:
        """Keys to the ranks that own them; returns, of each group, what each rank asks of this one."""
        parts = [_packed(asked, rank) for rank in range(self.ranks.size)]
        sizes = [len(part) for part in parts]
        ones = [1] * self.ranks.size
        theirs = self.ranks.exchange(torch.tensor(sizes), ones, ones).tolist()
        self._stats.sent("ids", 8 * (sum(sizes) - sizes[self.ranks.rank]))
        flat = self.ranks.exchange(torch.from_numpy(np.concatenate(parts)), sizes, theirs).numpy()
        num_tables = [len(router.group.spec.tables) for router in self._routers]
        received = [_unpacked(part, num_tables) for part in np.split(flat, np.cumsum(theirs)[:-1])]
        return list(zip(*received, strict=True))


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
