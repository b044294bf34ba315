"""What a training step touches: measured on the first batches of the data, before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from girih.data import Dataset
from girih.data.shares import share_of
from girih.sparse.groups.pack import Group
from girih.sparse.spec import SparseSpec

SAMPLE_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessProfile:
    """Means over some batches.

    Attributes:
        rows: table → unique keys of a whole batch. rows_of_share: those of one trainer's share of it.
        widths: table → numbers of a row, first-order weights included.
    """

    rows: dict[str, float]
    rows_of_share: dict[str, float]
    widths: dict[str, int]

    def loads(self) -> dict[str, float]:
        """Table → rows touched a step × numbers a row: what it costs its owner."""
        return {name: rows * self.widths[name] for name, rows in self.rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"rows": self.rows, "rows_of_share": self.rows_of_share, "widths": self.widths}

    @classmethod
    def measure(cls, data: Dataset, spec: SparseSpec, num_trainers: int) -> AccessProfile:
        """Reads the first batches in file order, ids alone.

        Raises:
            DataError: a bad row.
        """
        groups = spec.groups()
        ids = data.select([feature.name for feature in spec.schema.sparse]).in_order()
        sums: list[dict[str, float]] = [{}, {}]
        num_batches = 0
        for batch, _ in zip(ids, range(SAMPLE_BATCHES), strict=False):
            num_batches += 1
            for total, part in zip(sums, (batch, share_of(batch, 0, num_trainers)), strict=True):
                for group in groups:
                    for table, count in _unique(group, part).items():
                        total[table] = total.get(table, 0.0) + count
        rows, of_share = ({name: n / num_batches for name, n in total.items()} for total in sums)
        widths = {table.name: group.spec.dim for group in groups for table in group.spec.tables}
        return cls(rows=rows, rows_of_share=of_share, widths=widths)


def _unique(group: Group, batch: Any) -> dict[str, int]:
    size = batch.num_examples
    found = {}
    for number, table in enumerate(group.spec.tables):
        features = group.features[group.tables == number]
        parts = [batch.ids[batch.offsets[f * size] : batch.offsets[(f + 1) * size]] for f in features]
        found[table.name] = len(np.unique(np.concatenate(parts)))
    return found
