"""Shards spread over the trainers: keys go to the rank that owns them and rows come back, by AllToAllv.

Every trainer reads and moves the rows of all trainers' batches, once for each key: the same as one process that
has the whole batch (PICASSO §III-A). All methods are called by all trainers, in the same order.

Shapes: R ranks, T tables of a group, U unique keys of this rank's batch, K keys that are asked of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.runs.stats import Stats
from girih.sparse.groups.group import bounds_in
from girih.sparse.groups.leaves import Leaves
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.half import SparseStats
from girih.sparse.halves.done import Done
from girih.sparse.routing.key_router import KeyRouter, RoutedKeys, ShardTopology
from girih.sparse.routing.shard_reader import LookupResult, ShardReader
from girih.sparse.spec import SparseSpec


@dataclass
class _Traffic:
    """One group in one step: what this rank asks for, what it is asked for, and how many keys each way.

    Attributes:
        asks, asked: number of keys for each rank, and of each rank.
    """

    own: RoutedKeys
    served: LookupResult
    asks: list[int]
    asked: list[int]


class CollectivePulled:
    """A batch whose embeddings are here."""

    def __init__(
        self,
        half: CollectiveSparse,
        batch: Batch,
        traffic: list[_Traffic],
        outputs: list[list[NDArray[np.float32]]],
        *,
        train: bool,
    ) -> None:
        self.staleness = 0
        self._half, self._batch, self._traffic = half, batch, traffic
        self._leaves = Leaves(half.groups, outputs, bounds_in(batch), train=train)

    def wait(self, examples: slice | None = None) -> Embeddings:
        """The embeddings."""
        return self._leaves.embeddings(examples)

    def push(self, step: int, lr_scale: float = 1.0) -> Done:
        """Applies the gradients that the pulled embeddings of all trainers collected: one optimizer step.

        Raises:
            NonFiniteError: a gradient of any trainer is NaN or infinite; no row was moved anywhere.
        """
        self._half.update(self._batch, self._traffic, self._leaves.gradients(), step, lr_scale)
        return Done()

    def discard(self, *, refused: bool = True) -> Done:
        """No-op: nothing is kept for a batch elsewhere."""
        return Done()


class CollectiveSparse:
    """Tables whose shards are spread evenly over the trainers."""

    def __init__(self, spec: SparseSpec, ranks: TrainerGroup, stats: Stats | None = None) -> None:
        self.ranks = ranks
        self.groups = spec.groups()
        self._stats = stats or Stats()
        self._last_step = 0
        self._shards = LocalShards(
            self.groups, spec.resolved_store(), place=ranks.rank, num_places=ranks.size
        )
        topology = ShardTopology(ranks.size, self._shards.shards_each)
        self._routers = [KeyRouter(group, topology) for group in self.groups]
        self._readers = [ShardReader(stores, self._shards.pool) for stores in self._shards.stores]

    def pull(self, batch: Batch) -> CollectivePulled:
        """Reads a batch's rows for training."""
        return self._read(batch, train=True)

    def peek(self, batch: Batch) -> CollectivePulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return self._read(batch, train=False)

    def update(
        self,
        batch: Batch,
        traffic: list[_Traffic],
        gradients: list[list[NDArray[np.float32] | None]],
        step: int,
        lr_scale: float,
    ) -> None:
        """Sends the gradients of rows to their owners, which apply the sum over all trainers.

        Raises:
            NonFiniteError: a gradient of any trainer is NaN or infinite; no row was moved anywhere.
        """
        tables = [table.name for group in self.groups for table in group.spec.tables]
        took_part, bad, sums = [], 0, []
        for router, reader, each, given in zip(self._routers, self._readers, traffic, gradients, strict=True):
            own, _ = router.scatter(each.own, given, batch)
            received = self._send("gradients", own, each.asks, each.asked)
            totals, nonfinite = reader.sum_gradients(each.served, received)
            took_part.append(float(any(gradient is not None for gradient in given)))
            bad = max(bad, 0 if nonfinite is None else 1 + tables.index(nonfinite))
            sums.append(totals)
        *all_took_part, worst = self.ranks.largest([*took_part, float(bad)])
        if worst:
            raise NonFiniteError(f"a gradient of table {tables[int(worst) - 1]!r} is NaN or infinite")
        self._last_step = step
        for reader, each, totals, apply in zip(self._readers, traffic, sums, all_took_part, strict=True):
            if apply:
                reader.apply(each.served, totals, step, lr_scale)

    def sync(self) -> None:
        """No-op: nothing is ever in flight."""

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Sums over all shards of all ranks."""
        return SparseStats(
            self.ranks.sum_by_name(self._shards.counters()), self.ranks.sum_by_name(self._shards.rows())
        )

    def begin_save(self, writer: Storage) -> ShardsSave:
        """All ranks take live snapshots of their shards, to be written as parts of one checkpoint."""
        return self._shards.begin_save(writer)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows by those of any number of shards; each rank takes what belongs to it."""
        self._shards.load(reader)
        self._last_step = step

    def close(self) -> None:
        """Gives the memory back."""
        self._shards.close()

    def _read(self, batch: Batch, *, train: bool) -> CollectivePulled:
        asked = [router.ask(batch) for router in self._routers]
        received = self._send_keys(asked)
        traffic, outputs = [], []
        for number, own in enumerate(asked):
            lengths = np.stack([lengths[number] for lengths, _, _ in received])
            served = self._readers[number].read(
                np.concatenate([keys[number] for _, keys, _ in received]),
                np.concatenate([counts[number] for _, _, counts in received]),
                lengths,
                self._last_step + 1,
                train=train,
            )
            asks, is_asked = np.diff(own.bounds()).tolist(), lengths.sum(axis=1).tolist()
            values = self._send("embeddings", served.values, is_asked, asks)
            outputs.append(self._routers[number].pool(own, values, batch))
            traffic.append(_Traffic(own, served, asks, is_asked))
        return CollectivePulled(self, batch, traffic, outputs, train=train)

    def _send(
        self, kind: str, rows: NDArray[np.float32], sent: list[int], received: list[int]
    ) -> NDArray[np.float32]:
        """Rows, float32[·, W], to each rank its own; returns those that came."""
        width = rows.shape[1]
        flat = torch.from_numpy(rows.reshape(-1))
        self._stats.sent(kind, 4 * width * (sum(sent) - sent[self.ranks.rank]))
        out = self.ranks.exchange(flat, [n * width for n in sent], [n * width for n in received])
        return out.numpy().reshape(-1, width)

    def _send_keys(self, asked: list[RoutedKeys]) -> list[_Keys]:
        """Keys to the ranks that own them; returns what each rank asks of this one."""
        parts = [_packed(asked, rank) for rank in range(self.ranks.size)]
        sizes = [len(part) for part in parts]
        ones = [1] * self.ranks.size
        theirs = self.ranks.exchange(torch.tensor(sizes), ones, ones).tolist()
        self._stats.sent("ids", 8 * (sum(sizes) - sizes[self.ranks.rank]))
        flat = self.ranks.exchange(torch.from_numpy(np.concatenate(parts)), sizes, theirs).numpy()
        starts = np.cumsum([0, *theirs])
        return [
            _unpacked(flat[starts[rank] : starts[rank + 1]], [len(g.spec.tables) for g in self.groups])
            for rank in range(self.ranks.size)
        ]


_Keys = tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], list[NDArray[np.int32]]]
"""Of each group: how many keys of each table, the keys, how often each occurs."""


def _packed(asked: list[RoutedKeys], rank: int) -> NDArray[np.int64]:
    """The packed request to one rank: the lengths of all groups, then the keys and counts of each."""
    parts = [each.lengths(rank) for each in asked]
    for each in asked:
        first, behind = each.bounds()[rank : rank + 2]
        counts = np.zeros(-(-(behind - first) // 2) * 2, np.int32)
        counts[: behind - first] = each.counts[first:behind]
        parts += [each.keys[first:behind], counts.view(np.int64)]
    return np.concatenate(parts)


def _unpacked(flat: NDArray[np.int64], num_tables: list[int]) -> _Keys:
    lengths, keys, counts, at = [], [], [], 0
    for count in num_tables:
        lengths.append(flat[at : at + count])
        at += count
    for each in lengths:
        size = int(each.sum())
        keys.append(flat[at : at + size])
        counts.append(flat[at + size : at + size + -(-size // 2)].view(np.int32)[:size])
        at += size + -(-size // 2)
    return lengths, keys, counts
