"""Merges the requests of several askers for the shards of this process into one read and one update.

A key that several askers request is read, counted and updated once. Gradients are summed in the order of the askers.

Shapes: K keys of all requests, A askers, T tables, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError
from girih.kernels.buffers import Take
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.kernels.cpu.arrays import sealed
from girih.sparse.groups.shards import GroupKeys, Ids, Shards, run_parts


@dataclass(frozen=True)
class MergedRequest:
    """The keys of all askers together.

    Attributes:
        ids: the keys, in the order of askers, and table by table for each asker.
        counts: int32[K], how often each key occurs.
    """

    ids: Ids
    counts: NDArray[np.int32]

    @classmethod
    def of(
        cls, keys: NDArray[np.int64], counts: NDArray[np.int32], lengths: NDArray[np.int64]
    ) -> MergedRequest:
        """Merges keys; for the arguments and errors see :meth:`ShardReader.read`."""
        _check(keys, counts, lengths)
        return cls(ids_of_askers(keys, lengths), counts)


class ShardReader(Shards):
    """The shards of one group that this process holds and that other processes use."""

    def read(
        self,
        keys: NDArray[np.int64],
        counts: NDArray[np.int32],
        lengths: NDArray[np.int64],
        step: int,
        *,
        train: bool,
        take: Take | None = None,
    ) -> tuple[GroupKeys, NDArray[np.float32]]:
        """Reads the rows of keys that belong to this process.

        Args:
            keys, counts: int64[K], int32[K], in the order of askers, and table by table for each asker.
            lengths: int64[A, T], the number of keys of each asker and table.
            take: allocates memory for the rows; None takes memory of this reader.

        Returns:
            The unique keys, and float32[K, W], the row of each requested key.

        Raises:
            ConfigError: the lengths do not fit the keys, or a key belongs to another process.
        """
        request = MergedRequest.of(keys, counts, lengths)
        merged_keys, rows = self.lookup(request.ids, step, train=train, counts=counts)
        _check_keys(merged_keys, request)
        values = (take or self._buffers.take)(np.float32, len(keys), self.dim)
        pool_kernels.spread(rows.addresses, 0, merged_keys.inverse, 0, values)
        return merged_keys, values

    def find_keys(self, request: MergedRequest) -> GroupKeys:
        """Returns the unique keys of a request, without reading rows. Raises the same errors as :meth:`read`."""
        keys = self.find(request.ids, counts=request.counts)
        _check_keys(keys, request)
        return keys

    def sum_gradients(
        self, keys: GroupKeys, gradients: Sequence[NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], str | None]:
        """Sums the gradients of several askers for each key.

        Args:
            gradients: float32[·, W] of each asker, in the order of the asker's keys.

        Returns:
            The gradients for :meth:`apply`, and a table with a gradient that is not finite, or None.
        """
        shards = keys.shards
        totals = self._buffers.take(np.float32, keys.end, self.dim)
        starts = [0, *accumulate(len(run_parts) for run_parts in gradients)]

        def add(s: int) -> int:
            first, behind = shards[s].first, shards[s].first + len(shards[s].keys)
            totals[first:behind] = 0
            for start, part in zip(starts, gradients, strict=False):
                gradient_kernels.scatter_whole(sealed(part), 0, keys.inverse, start, first, behind, totals)
            return gradient_kernels.first_nonfinite(first, behind, sealed(totals))

        bad = max(run_parts(self.pool, len(shards), add, starts[-1]))
        if bad < 0:
            return totals, None
        shard = next(shard for shard in reversed(shards) if shard.first <= bad)
        return totals, self.stores[0].spec.tables[shard.tables[bad - shard.first]].name


def _check_keys(keys: GroupKeys, request: MergedRequest) -> None:
    if len(keys.inverse) and keys.inverse.min() < 0:
        raise ConfigError(
            f"key {request.ids.ids[keys.inverse.argmin()]} belongs to another process; do all processes have the same number of shards?"
        )


def ids_of_askers(keys: NDArray[np.int64], lengths: NDArray[np.int64]) -> Ids:
    """Returns the keys of all askers, with the keys of each table side by side.

    Args:
        keys, lengths: int64[K], int64[A, T], in the order of askers, and table by table for each asker.
    """
    num_askers, num_tables = lengths.shape
    offsets = np.zeros(num_askers * num_tables + 1, np.int32)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    sections = np.arange(num_askers * num_tables).reshape(num_askers, num_tables)
    return Ids(
        keys,
        offsets,
        1,
        np.ascontiguousarray(sections.T).reshape(-1),
        np.repeat(np.arange(num_tables, dtype=np.int32), num_askers),
    )


def _check(keys: NDArray[np.int64], counts: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
    """Checks a request, because kernels do not check bounds."""
    sums_up = not (lengths < 0).any() and lengths.sum() == len(keys) == len(counts)
    kinds = [array.dtype.name for array in (keys, counts, lengths)]
    if not sums_up or kinds != ["int64", "int32", "int64"]:
        raise ConfigError(
            f"keys {keys.dtype}[{len(keys)}], counts {counts.dtype}[{len(counts)}] and lengths {lengths.dtype} of"
            f" {lengths.sum()} keys; expected int64, int32 and int64, all for the same number of keys"
        )
