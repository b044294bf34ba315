"""Measures what a training step touches, on the first batches of the data.

Shapes: T tables of a group.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from girih.data import Dataset
from girih.data.batch import Batch
from girih.data.shares import share_of
from girih.kernels.buffers import Buffers
from girih.planner.facts import AccessProfile
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup
from girih.sparse.spec import SparseSpec

SAMPLE_BATCHES = 4


def measure_access(data: Dataset, spec: SparseSpec, num_trainers: int) -> AccessProfile:
    """Reads the first batches in file order, ids alone.

    Raises:
        DataError: a bad row.
    """
    groups = spec.groups()
    batches = data.select([feature.name for feature in spec.schema.sparse]).in_order()
    whole, share = _Counts(groups), _Counts(groups)
    num_batches, num_ids = 0, 0
    for batch, _ in zip(batches, range(SAMPLE_BATCHES), strict=False):
        num_batches += 1
        num_ids += len(batch.ids)
        whole.add(batch)
        share.add(share_of(batch, 0, num_trainers))
    widths = {table.name: group.spec.dim for group in groups for table in group.spec.tables}
    return AccessProfile(
        rows=whole.means(num_batches),
        rows_of_share=share.means(num_batches),
        widths=widths,
        ids=num_ids / max(1, num_batches),
    )


class _Counts:
    """Unique keys of each table, summed over batches."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._dedup = Dedup(Buffers())
        self._sums = [(group, np.zeros(len(group.spec.tables), np.int64)) for group in groups]

    def add(self, batch: Batch) -> None:
        """Adds those of a batch."""
        inverse = np.empty(len(batch.ids), np.int32)
        for group, sums in self._sums:
            sums += self._of_tables(batch, group, inverse)

    def means(self, num_batches: int) -> dict[str, float]:
        """Table → how many it had in a batch."""
        return {
            table.name: count / max(1, num_batches)
            for group, sums in self._sums
            for table, count in zip(group.spec.tables, sums.tolist(), strict=True)
        }

    def _of_tables(self, batch: Batch, group: Group, inverse: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[T]."""
        found = self._dedup.unique(ids_of(batch, group), inverse)
        return np.bincount(found.tables, minlength=len(group.spec.tables))
