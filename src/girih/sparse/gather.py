"""One group's way from ids to tensors and back: dedup, look up, pool; scatter, apply.

Every shard's thread finds its own keys among all ids, so that nothing is sorted or copied between them. All
shards number their keys together: those of shard s from s · n on, n being the ids of the group.

Shapes: B examples, F features of the group, N ids in the batch, U unique keys of a shard, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.buffers import Buffers
from girih.data.batch import Batch
from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.sparse.pack import Group, Output
from girih.sparse.parts import Members, Part, cut, passes
from girih.store import Store

T = TypeVar("T")
NO_WEIGHTS = np.empty(0, np.float32)
NO_TAIL = np.empty((0, 0), np.float32)
FEW_IDS = 8192  # fewer are done by one thread before another one is awake
SLOTS_PER_ID = 3  # at least: few enough to stay in L2, many enough that homes are free


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
        self.slots: NDArray[np.int32] = np.zeros(1 << 10, np.int32)
        self.hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.own: NDArray[np.int32] = np.empty(0, np.int32)
        self.base = 1

    def make_room(self, ids_of_feature: int, ids_of_table: int, num_ids: int) -> None:
        """Makes all large enough for a batch of so many ids."""
        if len(self.hashes) < ids_of_feature:
            self.hashes = np.empty(ids_of_feature, np.uint64)
            self.own = np.empty(ids_of_feature, np.int32)
        if len(self.slots) < SLOTS_PER_ID * ids_of_table:
            self.slots = np.zeros(1 << (SLOTS_PER_ID * ids_of_table - 1).bit_length(), np.int32)
            self.base = 1
        elif self.base + num_ids > dedup_kernels.MAX_NUMBER:
            self.slots[:] = 0
            self.base = 1


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
        self._passes = passes(group.outputs)
        self._parts = cut(group, len(self.shards))

    def read(self, batch: Batch, step: int, *, train: bool) -> GroupPulled:
        """Reads and pools the rows of a batch; ``train`` gives new keys rows and marks rows as used."""
        group, take = self.group, self._buffers.take
        num_ids, longest, of_table = dedup_kernels.count_ids(
            batch.offsets, batch.num_examples, group.features, group.tables
        )
        inverse = take(np.int32, len(batch.ids))
        values = take(np.float32, len(self.shards) * num_ids, group.spec.dim)

        def read_shard(s: int) -> ShardKeys:
            store, scratch = self.shards[s], self._scratch[s]
            scratch.make_room(longest, of_table, num_ids)
            keys, tables, counts = take(np.int64, num_ids), take(np.int32, num_ids), take(np.int32, num_ids)
            ends, first = np.empty(len(group.features), np.int64), s * num_ids
            num_keys = dedup_kernels.dedup(
                batch.ids, batch.offsets, batch.num_examples, group.features, group.tables, s, len(self.shards),
                scratch.slots, scratch.base, scratch.hashes, first, scratch.own, inverse, keys, tables, counts, ends,
            )  # fmt: skip
            scratch.base += num_keys
            keys, tables, counts = keys[:num_keys], tables[:num_keys], counts[:num_keys]
            out = values[first : first + num_keys]
            if train:
                rows = store.lookup(keys, tables, counts, step, out)
            else:
                rows = store.peek(keys, tables, out)
            return ShardKeys(keys, tables, counts, rows, first, ends)

        shards = self._each(len(self.shards), read_shard, num_ids)
        outputs = self._outputs(values, inverse, batch)
        return GroupPulled(shards, inverse, [torch.from_numpy(o).requires_grad_(train) for o in outputs])

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
            len(self._parts),
            lambda part: self._scatter(self._parts[part], pulled, given, batch, totals),
            len(pulled.inverse),
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

        self._each(len(self.shards), apply_shard, len(pulled.inverse))

    def _scatter(
        self,
        part: Part,
        pulled: GroupPulled,
        given: Sequence[NDArray[np.float32] | None],
        batch: Batch,
        totals: NDArray[np.float32],
    ) -> int:
        """Sums the gradients of a part's keys; returns one that is not finite, or -1."""
        ranges = [part.key_range(s, shard.first, shard.ends) for s, shard in enumerate(pulled.shards)]
        for first, last in ranges:
            gradient_kernels.clear(first, last, totals)
        # by tables, no other key can come up
        keys = (0, len(totals)) if part.shard is None else ranges[part.shard]
        for numbers in self._passes:
            taking_part = [
                (number, gradient) for number in numbers if (gradient := given[number]) is not None
            ]
            if len(taking_part) == 2:
                (number, gradient), (_, tail) = taking_part
                self._scatter_output(number, part.members, gradient, tail, pulled, batch, keys, totals)
            else:
                for number, gradient in taking_part:
                    self._scatter_output(number, part.members, gradient, NO_TAIL, pulled, batch, keys, totals)
        bits = totals.view(np.uint32)
        return max(gradient_kernels.first_nonfinite(first, last, bits) for first, last in ranges)

    def _scatter_output(
        self,
        number: int,
        members: Sequence[Members],
        gradient: NDArray[np.float32],
        tail: NDArray[np.float32],
        pulled: GroupPulled,
        batch: Batch,
        keys: tuple[int, int],
        totals: NDArray[np.float32],
    ) -> None:
        output, mine, size = self.group.outputs[number], members[number], batch.num_examples
        if not len(mine.features):
            return
        if output.whole:
            start = batch.offsets[output.features[0] * size]
            gradient_kernels.scatter_whole(
                gradient, output.first_column, pulled.inverse, start, keys[0], keys[1], totals
            )
            return
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        gradient_kernels.scatter(
            gradient, tail, output.first_column, pulled.inverse, batch.offsets, weights, size, mine.features,
            mine.places, mine.modes, len(output.features), keys[0], keys[1], totals,
        )  # fmt: skip

    def _outputs(
        self, values: NDArray[np.float32], inverse: NDArray[np.int32], batch: Batch
    ) -> list[NDArray[np.float32]]:
        """The tensors of all outputs."""
        outputs, size = self.group.outputs, batch.num_examples
        found: dict[int, NDArray[np.float32]] = {}
        for numbers in self._passes:
            if outputs[numbers[0]].whole:
                found[numbers[0]] = self._whole(outputs[numbers[0]], values, inverse, batch)
                continue
            for number in numbers:
                shape = (size, len(outputs[number].features), outputs[number].segment.dim)
                found[number] = self._buffers.take(np.float32, *shape)
            flat = [found[number].reshape(-1, outputs[number].segment.dim) for number in numbers]
            self._pool_bags(outputs[numbers[0]], values, inverse, batch, *flat)
        return [found[number] for number in range(len(outputs))]

    def _pool_bags(
        self,
        output: Output,
        values: NDArray[np.float32],
        inverse: NDArray[np.int32],
        batch: Batch,
        out: NDArray[np.float32],
        tail: NDArray[np.float32] = NO_TAIL,
    ) -> None:
        size, num_parts = batch.num_examples, len(self.shards)
        weights = NO_WEIGHTS if batch.weights is None else batch.weights

        def pool_part(part: int) -> None:
            pool_kernels.pool(
                values, output.first_column, inverse, batch.offsets, weights, size, output.features, output.modes,
                part * size // num_parts, (part + 1) * size // num_parts, out, tail,
            )  # fmt: skip

        self._each(num_parts, pool_part, len(inverse))

    def _whole(
        self, output: Output, values: NDArray[np.float32], inverse: NDArray[np.int32], batch: Batch
    ) -> NDArray[np.float32]:
        size, feature = batch.num_examples, int(output.features[0])
        start, end = int(batch.offsets[feature * size]), int(batch.offsets[(feature + 1) * size])
        whole = self._buffers.take(np.float32, end - start, output.segment.dim)
        pool_kernels.spread(values, output.first_column, inverse, start, whole)
        return whole

    def _each(self, num_parts: int, work: Callable[[int], T], num_ids: int) -> list[T]:
        """Does the parts side by side, the first one here; those of a small batch in turn."""
        if self._pool is None or num_ids < FEW_IDS:
            return [work(part) for part in range(num_parts)]
        others = [self._pool.submit(work, part) for part in range(1, num_parts)]
        try:
            first = work(0)
        finally:  # whatever happens, nobody works on after this
            wait(others)
        return [first, *(other.result() for other in others)]
