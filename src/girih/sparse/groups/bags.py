"""The examples' side of a group: rows become bags and sequences, and their gradients become gradients of keys.

Shapes: B examples, F features of the group, N ids in the batch, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers, Take
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.kernels.cpu.arrays import sealed
from girih.sparse.groups.pack import Group
from girih.sparse.groups.partition import partition, passes
from girih.sparse.groups.shards import FEW_IDS, GroupKeys, each

Gradients = Sequence[NDArray[np.float32] | None]
"""The gradient of each output, float32[·, D], or None where it took no part in the loss."""

NO_WEIGHTS = np.empty(0, np.float32)
NO_TAIL = np.empty((0, 0), np.float32)


class Bags:
    """Pools rows, and scatters gradients.

    Args:
        num_parts: shards whose keys are numbered together; the work is split into as many parts.
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
        self, values: NDArray[np.float32], keys: GroupKeys, batch: Batch, take: Take | None = None
    ) -> list[NDArray[np.float32]]:
        """The tensors of all outputs: float32[B, F, D], or float32[L, D] where one is whole.

        Args:
            values: float32[·, W], the row of the key of each number.
            take: gives the memory for the tensors; its own where None.
        """
        outputs, size = self.group.outputs, batch.num_examples
        num_parts = self._num_parts if len(keys.inverse) >= FEW_IDS else 1
        rows, offsets, weights = sealed(values), sealed(batch.offsets), _weights_of(batch)
        firsts = self._firsts(batch)
        found = [(take or self._buffers.take)(np.float32, *output.shape_in(batch)) for output in outputs]
        flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in found]

        def pool_part(part: int) -> None:
            for number, *tails in self._passes:
                output, out = outputs[number], flat[number]
                num_rows = len(out) if output.whole else size
                begin, end = part * num_rows // num_parts, (part + 1) * num_rows // num_parts
                if output.whole:
                    start = output.ids_in(batch).start + begin
                    pool_kernels.spread(rows, output.first_column, keys.inverse, start, out[begin:end])
                else:
                    pool_kernels.pool(
                        rows, output.first_column, keys.inverse, offsets, weights, size, output.features,
                        firsts[output.features], output.modes, begin, end, out, flat[tails[0]] if tails else NO_TAIL,
                    )  # fmt: skip

        each(self._pool, num_parts, pool_part, len(keys.inverse))
        return found

    def scatter(self, given: Gradients, keys: GroupKeys, batch: Batch) -> tuple[NDArray[np.float32], int]:
        """Sums the gradients of each key.

        Returns:
            float32[·, W], the gradient of the key of each number; and a key whose own is not finite, or -1.
        """
        firsts, offsets, weights = self._firsts(batch), sealed(batch.offsets), _weights_of(batch)
        totals = self._buffers.take(np.float32, keys.end, self.group.spec.dim)
        taking_part = list(self._taking_part(given))

        def scatter_part(number: int) -> int:
            part = self._parts[number]
            ranges = [part.key_range(s, shard.first, shard.ends) for s, shard in enumerate(keys.shards)]
            for first, last in ranges:
                totals[first:last] = 0
            # by tables, no other key can come up
            first, last = (0, len(totals)) if part.shard is None else ranges[part.shard]
            for n, gradient, tail in taking_part:
                output, mine = self.group.outputs[n], part.members[n]
                if output.whole and len(mine.features):
                    start = output.ids_in(batch).start
                    gradient_kernels.scatter_whole(
                        gradient, output.first_column, keys.inverse, start, first, last, totals
                    )
                elif len(mine.features):
                    gradient_kernels.scatter(
                        gradient, tail, output.first_column, keys.inverse, offsets, weights, batch.num_examples,
                        mine.features, firsts[mine.features], mine.places, mine.modes, len(output.features), first, last,
                        totals,
                    )  # fmt: skip
            return max(gradient_kernels.first_nonfinite(first, last, totals) for first, last in ranges)

        return totals, max(each(self._pool, len(self._parts), scatter_part, len(keys.inverse)))

    def _taking_part(
        self, given: Gradients
    ) -> Iterator[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
        """For each pass: an output, its gradient, and that of the output whose columns follow."""
        for numbers in self._passes:
            found = [
                (number, sealed(gradient)) for number in numbers if (gradient := given[number]) is not None
            ]
            if len(found) == 2:
                yield *found[0], found[1][1]
            else:
                yield from ((number, gradient, sealed(NO_TAIL)) for number, gradient in found)

    def _firsts(self, batch: Batch) -> NDArray[np.int64]:
        """int64[·], by feature: its first id where each of its bags holds one, without a weight; else -1."""
        firsts = np.full(1 + int(self.group.features.max()), -1, np.int64)
        if batch.weights is None:
            pool_kernels.find_singles(sealed(batch.offsets), batch.num_examples, self.group.features, firsts)
        return firsts


def _weights_of(batch: Batch) -> NDArray[np.float32]:
    return sealed(NO_WEIGHTS if batch.weights is None else batch.weights)
