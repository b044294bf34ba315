"""Measures what a training step touches, on the first batches of the data."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from girih.data import Dataset
from girih.data.batch import Batch, share_of
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
    if not groups:  # numeric features alone
        return AccessProfile(rows={}, rows_of_share={}, widths={})
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
        rows=whole.means("keys", num_batches),
        rows_of_share=share.means("keys", num_batches),
        widths=widths,
        ids=num_ids / max(1, num_batches),
        ids_of_tables=whole.means("ids", num_batches),
    )


class _Counts:
    """Unique keys and ids of each table, summed over batches."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._dedup = Dedup(Buffers())
        self._groups = list(groups)
        sizes = [len(group.spec.tables) for group in self._groups]
        self._sums = {kind: [np.zeros(size, np.int64) for size in sizes] for kind in ("keys", "ids")}

    def add(self, batch: Batch) -> None:
        """Adds those of a batch."""
        inverse = np.empty(len(batch.ids), np.int32)
        for group, keys, ids in zip(self._groups, self._sums["keys"], self._sums["ids"], strict=True):
            unique_keys = self._dedup.unique(ids_of(batch, group), inverse)
            np.add.at(keys, unique_keys.tables, 1)
            np.add.at(ids, unique_keys.tables, unique_keys.counts)

    def means(self, kind: str, num_batches: int) -> dict[str, float]:
        """Table → how many it had in a batch."""
        return {
            table.name: count / max(1, num_batches)
            for group, sums in zip(self._groups, self._sums[kind], strict=True)
            for table, count in zip(group.spec.tables, sums.tolist(), strict=True)
        }
