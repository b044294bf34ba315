"""One group's way from ids to tensors and back: dedup, look up, pool; scatter, apply.

Every shard's thread finds its own keys among all ids, so that nothing is sorted or copied between them. All
shards number their keys together: those of shard s from s · n on, n being the ids of the group.

Shapes: B examples, F features of the group, N ids in the batch, U unique keys of a shard, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.sparse.buffers import Buffers
from girih.sparse.pack import Group, Output
from girih.store import Store

T = TypeVar("T")
NO_WEIGHTS = np.empty(0, np.float32)
MAX_ROUNDS = (1 << dedup_kernels.ROUND_BITS) - 1


@dataclass
class ShardKeys:
    """The unique keys of one shard in one batch.

    Attributes:
        keys, tables, counts: int64[U], int32[U], int32[U], how often each occurs.
        rows: int32[U], row numbers in the shard, -1 for keys without a row: a hint, which the store verifies.
        first: the number of the first key.
        ends: int64[F], how many keys there are after each feature; those of one table stand together.
    """

    keys: NDArray[np.int64]
    tables: NDArray[np.int32]
    counts: NDArray[np.int32]
    rows: NDArray[np.int32]
    first: int
    ends: NDArray[np.int64]


@dataclass
class GroupPulled:
    """What one group read for one batch, and what it needs to find its way back."""

    shards: list[ShardKeys]
    inverse: NDArray[np.int32]
    """int32[N], the number of the key of each of the group's ids."""
    leaves: list[Tensor] = field(default_factory=list)
    """One tensor an output of the group; they collect the gradients."""


@dataclass
class GroupGradients:
    """One gradient a unique key: float32[U, W] for each shard, and a key whose own is not finite, or -1."""

    shards: list[NDArray[np.float32]]
    nonfinite_key: int


class _Scratch:
    """One thread's hash table, and memory for the ids of one feature, for dedup."""

    def __init__(self) -> None:
        self.slots: NDArray[np.int64] = np.zeros(1 << 10, np.int64)
        self.hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.own: NDArray[np.int32] = np.empty(0, np.int32)
        self.round = 1

    def make_room(self, ids_of_feature: int, ids_of_table: int, num_rounds: int) -> int:
        """Makes all large enough; returns the first of so many rounds that the table has not seen."""
        if len(self.hashes) < ids_of_feature:
            self.hashes = np.empty(ids_of_feature, np.uint64)
            self.own = np.empty(ids_of_feature, np.int32)
        if len(self.slots) < 2 * ids_of_table:
            self.slots = np.zeros(1 << (2 * ids_of_table - 1).bit_length(), np.int64)
            self.round = 1
        elif self.round + num_rounds > MAX_ROUNDS:
            self.slots[:] = 0
            self.round = 1
        first, self.round = self.round, self.round + num_rounds
        return first


class GroupTile:
    """A packed group over its shards.

    Args:
        group: tables, features and outputs.
        shards: the stores; keys are spread evenly over them.
        pool: runs the shards side by side; None runs them in turn.
    """

    def __init__(self, group: Group, shards: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self.shards = tuple(shards)
        self._pool = pool
        self._scratch = [_Scratch() for _ in shards]
        self._buffers = Buffers()
        self._parts = [_part(group, first, last) for first, last in _cut_by_tables(group, len(self.shards))]

    def read(self, batch: Batch, step: int, *, train: bool) -> GroupPulled:
        """Reads and pools the rows of a batch; ``train`` gives new keys rows and marks rows as used."""
        group, take = self.group, self._buffers.take
        starts = batch.offsets[group.features * batch.num_examples]
        lengths = (batch.offsets[(group.features + 1) * batch.num_examples] - starts).astype(np.int64)
        longest, num_ids = int(lengths.max()), int(lengths.sum())
        of_table = int(np.bincount(group.tables, lengths).max())
        inverse = take(np.int32, len(batch.ids))
        values = take(np.float32, len(self.shards) * num_ids, group.spec.dim)

        def read_shard(s: int) -> ShardKeys:
            store, scratch = self.shards[s], self._scratch[s]
            first_round = scratch.make_room(longest, of_table, len(group.features))
            keys, tables, counts = take(np.int64, num_ids), take(np.int32, num_ids), take(np.int32, num_ids)
            ends, first = np.empty(len(group.features), np.int64), s * num_ids
            num_keys = dedup_kernels.dedup(
                batch.ids, batch.offsets, batch.num_examples, group.features, group.tables, s, len(self.shards),
                scratch.slots, first_round, scratch.hashes, first, scratch.own, inverse, keys, tables, counts, ends,
            )  # fmt: skip
            keys, tables, counts = keys[:num_keys], tables[:num_keys], counts[:num_keys]
            out = values[first : first + num_keys]
            if train:
                rows = store.lookup(keys, tables, counts, step, out)
            else:
                rows = store.peek(keys, tables, out)
            return ShardKeys(keys, tables, counts, rows, first, ends)

        pulled = GroupPulled(self._each(len(self.shards), read_shard), inverse)
        for output in group.outputs:
            leaf = torch.from_numpy(self._output(output, values, inverse, batch))
            pulled.leaves.append(leaf.requires_grad_(train))
        return pulled

    def gradients(self, pulled: GroupPulled, batch: Batch) -> GroupGradients | None:
        """The gradient of each unique key; None where no output took part in the loss."""
        given = [
            None if leaf.grad is None else leaf.grad.contiguous().view(-1, leaf.grad.shape[-1]).numpy()
            for leaf in pulled.leaves
        ]
        if all(gradient is None for gradient in given):
            return None
        last = pulled.shards[-1]
        totals = self._buffers.take(np.float32, last.first + len(last.keys), self.group.spec.dim)
        bad = self._each(
            len(self._parts), lambda part: self._scatter(self._parts[part], pulled, given, batch, totals)
        )
        shards = [totals[shard.first : shard.first + len(shard.keys)] for shard in pulled.shards]
        return GroupGradients(shards, max(bad))

    def feature_of(self, pulled: GroupPulled, key: int, batch: Batch) -> int | None:
        """A feature (its index in the batch) that has an id of this key number, if any."""
        size = batch.num_examples
        for feature in self.group.features:
            ids = slice(batch.offsets[feature * size], batch.offsets[(feature + 1) * size])
            if (pulled.inverse[ids] == key).any():
                return int(feature)
        return None

    def apply(self, pulled: GroupPulled, gradients: GroupGradients, step: int, lr_scale: float) -> None:
        """Moves the rows by their gradients."""

        def apply_shard(s: int) -> int:
            part = pulled.shards[s]
            return self.shards[s].apply_gradients(
                part.keys, part.tables, part.rows, gradients.shards[s], step, lr_scale
            )

        self._each(len(self.shards), apply_shard)

    def _scatter(
        self,
        part: _Part,
        pulled: GroupPulled,
        given: Sequence[NDArray[np.float32] | None],
        batch: Batch,
        totals: NDArray[np.float32],
    ) -> int:
        """Sums the gradients of the keys of some tables; returns one that is not finite, or -1."""
        ranges = [part.keys_of(shard) for shard in pulled.shards]
        for first, last in ranges:
            gradient_kernels.clear(first, last, totals)
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        size = batch.num_examples
        for output, members, gradient in zip(self.group.outputs, part.members, given, strict=True):
            if gradient is None or not len(members.features):
                continue
            if output.whole:
                start = batch.offsets[output.features[0] * size]
                gradient_kernels.scatter_whole(gradient, output.first_column, pulled.inverse, start, totals)
            else:
                gradient_kernels.scatter(
                    gradient, output.first_column, pulled.inverse, batch.offsets, weights, size,
                    members.features, members.places, members.modes, len(output.features), totals,
                )  # fmt: skip
        bits = totals.view(np.uint32)
        return max(gradient_kernels.first_nonfinite(first, last, bits) for first, last in ranges)

    def _output(
        self, output: Output, values: NDArray[np.float32], inverse: NDArray[np.int32], batch: Batch
    ) -> NDArray[np.float32]:
        size = batch.num_examples
        if output.whole:
            start, end = (int(batch.offsets[(output.features[0] + more) * size]) for more in (0, 1))
            whole = self._buffers.take(np.float32, end - start, output.segment.dim)
            pool_kernels.spread(values, output.first_column, inverse, start, whole)
            return whole
        pooled = self._buffers.take(np.float32, size, len(output.features), output.segment.dim)
        flat = pooled.reshape(-1, output.segment.dim)
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        num_parts = len(self.shards)

        def pool_part(part: int) -> None:
            pool_kernels.pool(
                values, output.first_column, inverse, batch.offsets, weights, size, output.features, output.modes,
                part * size // num_parts, (part + 1) * size // num_parts, flat,
            )  # fmt: skip

        self._each(num_parts, pool_part)
        return pooled

    def _each(self, num_parts: int, work: Callable[[int], T]) -> list[T]:
        """Does the parts side by side, the first one here."""
        if self._pool is None:
            return [work(part) for part in range(num_parts)]
        others = [self._pool.submit(work, part) for part in range(1, num_parts)]
        return [work(0), *(other.result() for other in others)]


@dataclass(frozen=True)
class _Members:
    """Some features of an output: which, where they stand in it, and how they are pooled."""

    features: NDArray[np.int64]
    places: NDArray[np.int64]
    modes: NDArray[np.int8]


@dataclass(frozen=True)
class _Part:
    """All features of some tables, ``first`` to ``last`` of the group's: no other part has their keys."""

    first: int
    last: int
    members: tuple[_Members, ...]

    def keys_of(self, shard: ShardKeys) -> tuple[int, int]:
        """Numbers of the first of a shard's keys of these tables, and of the first behind them."""
        before = shard.ends[self.first - 1] if self.first else 0
        return int(shard.first + before), int(shard.first + shard.ends[self.last - 1])


def _cut_by_tables(group: Group, num_parts: int) -> list[tuple[int, int]]:
    """Cuts the group's features into at most so many parts of like size, never amid a table."""
    num_features = len(group.features)
    changes = [f for f in range(1, num_features) if group.tables[f] != group.tables[f - 1]]
    wanted = [part * num_features / num_parts for part in range(1, num_parts)]
    cuts = {min(changes, key=lambda f, w=w: abs(f - w)) for w in wanted} if changes else set()  # type: ignore[misc]
    bounds = [0, *sorted(cuts), num_features]
    return list(pairwise(bounds))


def _part(group: Group, first: int, last: int) -> _Part:
    inside = set(group.features[first:last].tolist())
    members = []
    for output in group.outputs:
        places = [place for place, feature in enumerate(output.features) if int(feature) in inside]
        members.append(_Members(output.features[places], np.array(places, np.int64), output.modes[places]))
    return _Part(first, last, tuple(members))
