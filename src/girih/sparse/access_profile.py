"""Measures what a training step touches, on the first batches of the data."""

from __future__ import annotations

from collections import Counter

import numpy as np

from girih.data import Dataset
from girih.data.batch import Batch
from girih.data.shares import share_of
from girih.planner.facts import AccessProfile
from girih.sparse.groups.pack import Group, ids_within
from girih.sparse.spec import SparseSpec

SAMPLE_BATCHES = 4


def measure_access(data: Dataset, spec: SparseSpec, num_trainers: int) -> AccessProfile:
    """Reads the first batches in file order, ids alone.

    Raises:
        DataError: a bad row.
    """
    groups = spec.groups()
    batches = data.select([feature.name for feature in spec.schema.sparse]).in_order()
    sums: list[Counter[str]] = [Counter(), Counter()]
    num_batches, num_ids = 0, 0
    for batch, _ in zip(batches, range(SAMPLE_BATCHES), strict=False):
        num_batches += 1
        num_ids += len(batch.ids)
        for total, part in zip(sums, (batch, share_of(batch, 0, num_trainers)), strict=True):
            for group in groups:
                total.update(_unique(group, part))
    rows, of_share = ({name: n / num_batches for name, n in total.items()} for total in sums)
    widths = {table.name: group.spec.dim for group in groups for table in group.spec.tables}
    return AccessProfile(rows=rows, rows_of_share=of_share, widths=widths, ids=num_ids / max(1, num_batches))


def _unique(group: Group, batch: Batch) -> dict[str, int]:
    found = {}
    for number, table in enumerate(group.spec.tables):
        features = group.features[group.tables == number]
        parts = [batch.ids[ids_within(batch, f)] for f in features]
        found[table.name] = len(np.unique(np.concatenate(parts)))
    return found
