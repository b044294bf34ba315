"""One group's way from ids to tensors and back: dedup, route, look up, pool; scatter, apply.

Shapes: B examples, N ids in the batch, U unique keys, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.sparse.pack import Group, Output
from girih.store import Store, shard_of

NO_WEIGHTS = np.empty(0, np.float32)
MAX_ROUNDS = (1 << dedup_kernels.ROUND_BITS) - 1


@dataclass
class GroupPulled:
    """What one group read for one batch, and what it needs to find its way back."""

    keys: NDArray[np.int64]
    tables: NDArray[np.int32]
    bounds: NDArray[np.int64]
    """Shard s holds the keys ``bounds[s]`` to ``bounds[s+1]``."""
    inverse: NDArray[np.int32]
    rows: NDArray[np.int32]
    """Row numbers in their shards, -1 for keys without a row: a hint, which the store verifies."""
    leaves: list[Tensor] = field(default_factory=list)
    """One tensor an output of the group; they collect the gradients."""


class GroupTile:
    """A packed group over its shards.

    Args:
        group: tables, features and outputs.
        shards: the stores; keys are shuffled uniformly over them.
        pool: runs the shards side by side; None runs them in turn.
    """

    def __init__(self, group: Group, shards: Sequence[Store], pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self.shards = tuple(shards)
        self._pool = pool
        self._scratch = np.zeros((1 << 10, 2), np.int64)
        self._round = 1

    def read(self, batch: Batch, step: int, *, train: bool) -> GroupPulled:
        """Reads and pools the rows of a batch; ``train`` gives new keys rows and marks rows as used."""
        keys, tables, counts, inverse = self._dedup(batch)
        bounds = np.array([0, len(keys)], np.int64)
        if len(self.shards) > 1:
            keys, tables, counts, bounds = self._route(batch, keys, tables, counts, inverse)
        rows = np.empty(len(keys), np.int32)
        values = np.empty((len(keys), self.group.spec.dim), np.float32)

        def read_shard(s: int) -> None:
            part = slice(bounds[s], bounds[s + 1])
            if train:
                rows[part] = self.shards[s].lookup(keys[part], tables[part], counts[part], step, values[part])
            else:
                rows[part] = self.shards[s].peek(keys[part], tables[part], values[part])

        self._each_shard(read_shard)
        pulled = GroupPulled(keys, tables, bounds, inverse, rows)
        for output in self.group.outputs:
            leaf = torch.from_numpy(self._output(output, values, inverse, batch))
            pulled.leaves.append(leaf.requires_grad_(train))
        return pulled

    def gradients(self, pulled: GroupPulled, batch: Batch) -> NDArray[np.float32] | None:
        """The gradient of each unique key, float32[U, W]; None where no output took part in the loss."""
        if all(leaf.grad is None for leaf in pulled.leaves):
            return None
        result = np.zeros((len(pulled.keys), self.group.spec.dim), np.float32)
        weights = NO_WEIGHTS if batch.weights is None else batch.weights

        def scatter_shard(s: int) -> None:
            first, last = pulled.bounds[s], pulled.bounds[s + 1]
            for output, leaf in zip(self.group.outputs, pulled.leaves, strict=True):
                if leaf.grad is None:
                    continue
                gradient = leaf.grad.contiguous().numpy()
                if output.whole:
                    start = batch.offsets[output.features[0] * batch.num_examples]
                    pool_kernels.gather_spread(
                        gradient, output.first_column, pulled.inverse, start, first, last, result
                    )
                else:
                    pool_kernels.scatter(
                        gradient, output.first_column, pulled.inverse, batch.offsets, weights, batch.num_examples,
                        output.features, output.modes, first, last, result,
                    )  # fmt: skip

        self._each_shard(scatter_shard)
        return result

    def first_nonfinite(
        self, pulled: GroupPulled, gradients: NDArray[np.float32], batch: Batch
    ) -> int | None:
        """A feature (its index in the batch) that has a NaN or an infinite gradient, if any."""
        key = pool_kernels.first_nonfinite(gradients)
        if key < 0:
            return None
        size = batch.num_examples
        for feature in self.group.features:
            if (
                pulled.inverse[batch.offsets[feature * size] : batch.offsets[(feature + 1) * size]] == key
            ).any():
                return int(feature)
        return None

    def apply(self, pulled: GroupPulled, gradients: NDArray[np.float32], step: int, lr_scale: float) -> None:
        """Moves the rows by their gradients."""

        def apply_shard(s: int) -> None:
            part = slice(pulled.bounds[s], pulled.bounds[s + 1])
            self.shards[s].apply_gradients(
                pulled.keys[part], pulled.tables[part], pulled.rows[part], gradients[part], step, lr_scale
            )

        self._each_shard(apply_shard)

    def _dedup(self, batch: Batch) -> tuple[Any, Any, Any, Any]:
        size, group = batch.num_examples, self.group
        bounds = batch.offsets[group.features * size], batch.offsets[(group.features + 1) * size]
        num_ids = (bounds[1] - bounds[0]).astype(np.int64)
        most = int(np.bincount(group.tables, num_ids).max())
        self._make_scratch(most, len(group.features))
        total = int(num_ids.sum())
        keys, tables, counts = np.empty(total, np.int64), np.empty(total, np.int32), np.empty(total, np.int32)
        inverse = np.empty(len(batch.ids), np.int32)
        num_keys = dedup_kernels.dedup(
            batch.ids, batch.offsets, size, group.features, group.tables,
            self._scratch, self._round, inverse, keys, tables, counts,
        )  # fmt: skip
        self._round += len(group.features)
        return keys[:num_keys], tables[:num_keys], counts[:num_keys], inverse

    def _make_scratch(self, most_ids: int, num_rounds: int) -> None:
        if len(self._scratch) < 2 * most_ids:
            self._scratch = np.zeros((1 << (2 * most_ids - 1).bit_length(), 2), np.int64)
            self._round = 1
        elif self._round + num_rounds > MAX_ROUNDS:
            self._scratch[:] = 0
            self._round = 1

    def _route(
        self, batch: Batch, keys: Any, tables: Any, counts: Any, inverse: Any
    ) -> tuple[Any, Any, Any, Any]:
        num_shards = len(self.shards)
        order = np.empty(len(keys), np.int64)
        bounds = np.empty(num_shards + 1, np.int64)
        dedup_kernels.order_by_shard(shard_of(keys, tables, num_shards), num_shards, order, bounds)
        position = np.empty(len(keys), np.int32)
        position[order] = np.arange(len(keys), dtype=np.int32)
        dedup_kernels.renumber(inverse, batch.offsets, batch.num_examples, self.group.features, position)
        return keys[order], tables[order], counts[order], bounds

    def _output(
        self, output: Output, values: NDArray[np.float32], inverse: NDArray[np.int32], batch: Batch
    ) -> NDArray[np.float32]:
        size = batch.num_examples
        if output.whole:
            start, end = (
                batch.offsets[output.features[0] * size],
                batch.offsets[(output.features[0] + 1) * size],
            )
            whole = np.empty((end - start, output.segment.dim), np.float32)
            pool_kernels.spread(values, output.first_column, inverse, start, whole)
            return whole
        pooled = np.empty((size, len(output.features), output.segment.dim), np.float32)
        weights = NO_WEIGHTS if batch.weights is None else batch.weights
        num_parts = len(self.shards)

        def pool_part(part: int) -> None:
            pool_kernels.pool(
                values, output.first_column, inverse, batch.offsets, weights, size, output.features, output.modes,
                part * size // num_parts, (part + 1) * size // num_parts, pooled,
            )  # fmt: skip

        self._each_shard(pool_part)
        return pooled

    def _each_shard(self, work: Callable[[int], None]) -> None:
        if self._pool is None:
            for s in range(len(self.shards)):
                work(s)
        else:
            for done in [self._pool.submit(work, s) for s in range(len(self.shards))]:
                done.result()
