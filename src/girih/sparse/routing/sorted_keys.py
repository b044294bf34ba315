"""The keys of a request to the shards of one group, sorted by shard. Each shard reads and updates its slice of them.

An embedding worker sorts its unique keys by shard and table (:class:`girih.sparse.routing.key_router.KeyRouter`). So a
server finds no keys and copies no rows for a request: each shard reads rows into its slice of the reply.

Shapes: S shards of this process, T tables, K keys, A askers, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from girih.errors import NonFiniteError, WireError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu.arrays import sealed
from girih.sparse.groups.shards import Dedup
from girih.sparse.routing.shard_reader import ids_of_askers
from girih.store import Keys, Push, RowUpdate, Store
from girih.store.spec import shard_of


@dataclass
class SortedKeys:
    """Keys sorted by shard, and by table in each shard.

    Attributes:
        keys, tables, counts: int64[K], int32[K], int32[K]. A count says how often the key occurs.
        lengths: int64[S, T], the number of keys of each shard and table.
        starts: the first key of each shard, and K.
        rows: int32[K], the row number of each key, -1 if it has no row. None if the keys are only updated.
    """

    keys: NDArray[np.int64]
    tables: NDArray[np.int32]
    counts: NDArray[np.int32]
    lengths: NDArray[np.int64]
    starts: list[int]
    rows: NDArray[np.int32] | None

    @classmethod
    def received(
        cls,
        stores: Sequence[Store],
        lengths: NDArray[np.int64],
        keys: NDArray[np.int64],
        counts: NDArray[np.int32] | None = None,
    ) -> SortedKeys:
        """Checks and copies the arrays of a request.

        Args:
            stores: the shards of this process. lengths: int64[S · T].
            counts: None if the keys are only updated.

        Raises:
            WireError: the lengths do not fit the keys, or a key belongs to another shard.
        """
        num_shards, num_tables = len(stores), len(stores[0].spec.tables)
        rows = None if counts is None else np.full(len(keys), -1, np.int32)
        counts = np.zeros(len(keys), np.int32) if counts is None else counts
        kinds = [array.dtype.name for array in (lengths, keys, counts)]
        fits = kinds == ["int64", "int64", "int32"] and lengths.shape == (num_shards * num_tables,)
        if not fits or (lengths < 0).any() or not keys.shape == counts.shape == (lengths.sum(),):
            raise WireError(
                f"lengths {lengths.dtype}{list(lengths.shape)} of {lengths.sum()} keys, keys {keys.dtype}{list(keys.shape)}, counts"
                f" {counts.dtype}{list(counts.shape)}; expected int64 lengths of {num_tables} tables in {num_shards} shards, that"
                " number of int64 keys, and int32 counts"
            )
        lengths = lengths.reshape(num_shards, num_tables)
        of_shards = lengths.sum(axis=1)
        tables = np.repeat(np.tile(np.arange(num_tables, dtype=np.int32), num_shards), lengths.reshape(-1))
        owners = np.repeat(np.arange(num_shards, dtype=np.int32) + stores[0].shard, of_shards)
        wrong = np.flatnonzero(shard_of(keys, tables, stores[0].num_shards) != owners)
        if len(wrong):
            raise WireError(
                f"key {keys[wrong[0]]} belongs to another shard than {owners[wrong[0]]}; do all processes have the same"
                " number of shards?"
            )
        starts = [0, *np.cumsum(of_shards).tolist()]
        return cls(np.array(keys), tables, np.array(counts), lengths.copy(), starts, rows)

    def slice_of(self, shards: range) -> slice:
        """Returns the keys of adjacent shards of this process, by their numbers within the process."""
        return slice(self.starts[shards.start], self.starts[shards.stop])

    def has_keys_of(self, shards: range) -> bool:
        """Returns whether there are keys of some adjacent shards."""
        return self.starts[shards.start] < self.starts[shards.stop]

    def absent(self) -> NDArray[np.uint8]:
        """Returns uint8[K]: 1 for each key without a row. Call it after the keys were read."""
        none = np.zeros(0, np.int32)
        return np.less(none if self.rows is None else self.rows, 0).view(np.uint8)

    def read(
        self, stores: Sequence[Store], shards: range, step: int, out: NDArray[np.float32], *, train: bool
    ) -> None:
        """Reads the rows of some shards into their slice of ``out``, float32[K, W], and notes the row numbers."""
        for s in shards:
            part = self.slice_of(range(s, s + 1))
            keys = Keys(self.keys[part], self.tables[part], self.counts[part])
            read = stores[s].lookup(keys, step, out[part]) if train else stores[s].peek(keys, out[part])
            if self.rows is not None:
                self.rows[part] = read


@dataclass(frozen=True)
class PartUpdate:
    """The gradients of the keys of some adjacent shards.

    Attributes:
        first: the number, within the process, of the first shard that ``keys`` has.
        gradients: float32[K, W], by key.
    """

    keys: SortedKeys
    gradients: NDArray[np.float32]
    first: int = 0

    def apply(
        self, stores: Sequence[Store], shards: range, step: int, lr_scale: float, push: Push | None
    ) -> None:
        """Updates the rows of some shards. See :meth:`girih.store.Store.apply_gradients`."""
        for s in shards:
            part = self.keys.slice_of(range(s - self.first, s - self.first + 1))
            rows = None if self.keys.rows is None else self.keys.rows[part]
            keys = Keys(self.keys.keys[part], self.keys.tables[part], rows=rows)
            stores[s].apply_gradients(keys, RowUpdate(self.gradients[part], step, lr_scale, push=push))


class GradientSums:
    """Sums the gradients of several askers for the keys of adjacent shards, in one thread."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._dedup = Dedup(self._buffers)

    def sum(
        self, stores: Sequence[Store], shards: range, parts: Sequence[tuple[SortedKeys, NDArray[np.float32]]]
    ) -> PartUpdate:
        """Returns the sum of the gradients for each key, in the order of the askers.

        Args:
            shards: the shards, by their numbers within the process.
            parts: the keys of each asker for all shards, and their gradients, float32[K, W].

        Raises:
            NonFiniteError: a sum is not finite. The message names the table.
        """
        slices = [keys.slice_of(shards) for keys, _ in parts]
        if len(parts) == 1:
            (keys, gradients), first, (part,) = parts[0], 0, slices
        else:
            first, part = shards.start, slice(None)
            keys, gradients = self._merged(
                shards,
                [(keys, gradients[own]) for (keys, gradients), own in zip(parts, slices, strict=True)],
                slices,
            )
        bad = gradient_kernels.first_nonfinite(0, len(gradients[part]), sealed(gradients[part]))
        if bad >= 0:
            table = stores[0].spec.tables[keys.tables[part][bad]].name
            raise NonFiniteError(f"a gradient of table {table!r} is NaN or infinite")
        return PartUpdate(keys, gradients, first)

    def _merged(
        self, shards: range, parts: Sequence[tuple[SortedKeys, NDArray[np.float32]]], slices: Sequence[slice]
    ) -> tuple[SortedKeys, NDArray[np.float32]]:
        """Returns the unique keys of the askers in some shards, and the sum of their gradients."""
        lengths = np.stack([keys.lengths[shards.start : shards.stop] for keys, _ in parts])
        num_askers, num_shards, num_tables = lengths.shape
        keys = np.concatenate([each.keys[own] for (each, _), own in zip(parts, slices, strict=True)])
        inverse = np.empty(len(keys), np.int32)
        # A table of a shard counts as a table of its own, so that the unique keys are sorted by shard too.
        ids = ids_of_askers(keys, lengths.reshape(num_askers, -1))
        unique = self._dedup.unique(ids, inverse)
        totals = np.zeros((len(unique.keys), parts[0][1].shape[1]), np.float32)
        start = 0
        for _, gradient in parts:
            gradient_kernels.scatter_whole(sealed(gradient), 0, inverse, start, 0, len(totals), totals)
            start += len(gradient)
        sizes = np.bincount(unique.tables, minlength=num_shards * num_tables).reshape(num_shards, num_tables)
        starts = [0, *np.cumsum(sizes.sum(axis=1)).tolist()]
        tables = unique.tables % np.int32(num_tables)
        return SortedKeys(unique.keys, tables, unique.counts, sizes, starts, None), totals
