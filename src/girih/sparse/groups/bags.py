"""The examples' side of a group: rows become bags and sequences, and their gradients become gradients of keys.

Shapes: B examples, F features of the group, N ids in the batch, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers, Take
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.sparse.groups.pack import Group, Output
from girih.sparse.groups.partition import Members, WorkSlice, partition, passes
from girih.sparse.groups.shards import ShardKeys
from girih.sparse.groups.threads import each

NO_WEIGHTS = np.empty(0, np.float32)
NO_TAIL = np.empty((0, 0), np.float32)


class Bags:
    """Pools rows, and scatters gradients.

    Args:
        num_parts: how many shards share the numbers of keys; so many parts the work is partition into.
        pool: runs the parts side by side; None runs them in turn.
    """

    def __init__(self, group: Group, num_parts: int, pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self._num_parts = num_parts
        self._pool = pool
        self._buffers = Buffers()
        self._passes = passes(group.outputs)
        self._parts = partition(group, num_parts)

    def pool(
        self,
        values: NDArray[np.float32],
        inverse: NDArray[np.int32],
        batch: Batch,
        take: Take | None = None,
    ) -> list[NDArray[np.float32]]:
        """The tensors of all outputs: float32[B, F, D], or float32[L, D] where one is whole.

        Args:
            values: float32[·, W], the row of the key of each number; inverse: int32[N], the key of each id.
            take: gives the memory for the tensors; its own where None.
        """
        outputs, size = self.group.outputs, batch.num_examples
        take = take or self._buffers.take
        firsts = self._firsts(batch)
        found: dict[int, NDArray[np.float32]] = {}
        for numbers in self._passes:
            if outputs[numbers[0]].whole:
                found[numbers[0]] = self._whole(outputs[numbers[0]], values, inverse, batch, take)
                continue
            for number in numbers:
                shape = (size, len(outputs[number].features), outputs[number].segment.dim)
                found[number] = take(np.float32, *shape)
            flat = [found[number].reshape(-1, outputs[number].segment.dim) for number in numbers]
            self._pool_bags(outputs[numbers[0]], values, inverse, firsts, batch, *flat)
        return [found[number] for number in range(len(outputs))]

    def scatter(
        self,
        given: Sequence[NDArray[np.float32] | None],
        shards: Sequence[ShardKeys],
        inverse: NDArray[np.int32],
        batch: Batch,
    ) -> tuple[NDArray[np.float32], int]:
        """Sums the gradients of each key.

        Args:
            given: float32[·, D], the gradient of each output, or None where it took no part in the loss.

        Returns:
            float32[·, W], the gradient of the key of each number; and a key whose own is not finite, or -1.
        """
        last, firsts = shards[-1], self._firsts(batch)
        totals = self._buffers.take(np.float32, last.first + len(last.keys), self.group.spec.dim)

        def scatter_part(number: int) -> int:
            return self._scatter(self._parts[number], given, shards, inverse, firsts, batch, totals)

        return totals, max(each(self._pool, len(self._parts), scatter_part, len(inverse)))

    def _scatter(
        self,
        part: WorkSlice,
        given: Sequence[NDArray[np.float32] | None],
        shards: Sequence[ShardKeys],
        inverse: NDArray[np.int32],
        firsts: NDArray[np.int64],
        batch: Batch,
        totals: NDArray[np.float32],
    ) -> int:
        """Sums the gradients of a part's keys; returns one that is not finite, or -1."""
        ranges = [part.key_range(s, shard.first, shard.ends) for s, shard in enumerate(shards)]
        for first, last in ranges:
            totals[first:last] = 0
        # by tables, no other key can come up
        keys = (0, len(totals)) if part.shard is None else ranges[part.shard]
        for numbers in self._passes:
            taking_part = [
                (number, gradient) for number in numbers if (gradient := given[number]) is not None
            ]
            if len(taking_part) == 2:
                (number, gradient), (_, tail) = taking_part
                self._scatter_output(
                    number, part.members, gradient, tail, inverse, firsts, batch, keys, totals
                )
            else:
                for number, gradient in taking_part:
                    self._scatter_output(
                        number, part.members, gradient, NO_TAIL, inverse, firsts, batch, keys, totals
                    )
        return max(gradient_kernels.first_nonfinite(first, last, totals) for first, last in ranges)

    def _scatter_output(
        self,
        number: int,
        members: Sequence[Members],
        gradient: NDArray[np.float32],
        tail: NDArray[np.float32],
        inverse: NDArray[np.int32],
        firsts: NDArray[np.int64],
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
                gradient, output.first_column, inverse, start, keys[0], keys[1], totals
            )
            return
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        gradient_kernels.scatter(
            gradient, tail, output.first_column, inverse, batch.offsets, weights, size, mine.features,
            firsts[mine.features], mine.places, mine.modes, len(output.features), keys[0], keys[1], totals,
        )  # fmt: skip

    def _firsts(self, batch: Batch) -> NDArray[np.int64]:
        """int64[·], by feature: its first id where each of its bags holds one, without a weight; else -1."""
        firsts = np.full(1 + int(self.group.features.max()), -1, np.int64)
        if batch.weights is None:
            pool_kernels.find_singles(batch.offsets, batch.num_examples, self.group.features, firsts)
        return firsts

    def _pool_bags(
        self,
        output: Output,
        values: NDArray[np.float32],
        inverse: NDArray[np.int32],
        firsts: NDArray[np.int64],
        batch: Batch,
        out: NDArray[np.float32],
        tail: NDArray[np.float32] = NO_TAIL,
    ) -> None:
        size, num_parts = batch.num_examples, self._num_parts
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        firsts = firsts[output.features]

        def pool_part(part: int) -> None:
            pool_kernels.pool(
                values, output.first_column, inverse, batch.offsets, weights, size, output.features, firsts, output.modes,
                part * size // num_parts, (part + 1) * size // num_parts, out, tail,
            )  # fmt: skip

        each(self._pool, num_parts, pool_part, len(inverse))

    def _whole(
        self,
        output: Output,
        values: NDArray[np.float32],
        inverse: NDArray[np.int32],
        batch: Batch,
        take: Take,
    ) -> NDArray[np.float32]:
        size, feature = batch.num_examples, int(output.features[0])
        start, end = int(batch.offsets[feature * size]), int(batch.offsets[(feature + 1) * size])
        whole: NDArray[np.float32] = take(np.float32, end - start, output.segment.dim)
        pool_kernels.spread(values, output.first_column, inverse, start, whole)
        return whole
