"""The growth of tables with examples, from a sample: the number of unique ids follows a power of the number of examples (Heaps' law)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.data.dataset import Dataset
from girih.data.decode.decoder import chosen
from girih.data.formats.text import SUFFIXES
from girih.data.position import Cursor
from girih.schema import Schema

UNITS = 8


class Growth:
    """The ids of each table in the first examples, all of which are held.

    Attributes:
        num_examples: in the sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._ids: dict[str, list[NDArray[np.int64]]] = {feature.table_name: [] for feature in schema.sparse}
        self._ends: list[int] = []  # of batches, in examples
        self.num_examples = 0

    def add(self, batch: Batch) -> None:
        """Takes the ids of a batch."""
        of_tables: dict[str, list[NDArray[np.int64]]] = {}
        for place, feature in enumerate(self._schema.sparse):
            of_tables.setdefault(feature.table_name, []).append(batch.ids[batch.ids_of(place)])
        for name, ids in of_tables.items():
            self._ids[name].append(np.concatenate(ids))
        self.num_examples += batch.num_examples
        self._ends.append(self.num_examples)

    def rows(self, table: str, num_examples: float) -> float:
        """The rows that so many examples are expected to make.

        The exponent is that between half of the sample and all of it, 0 where a table has stopped growing, 1 where each
        example brings new ids.
        """
        if not self._ids[table]:
            return 0.0
        firsts = np.unique(np.concatenate(self._ids[table]), return_index=True)[1]
        now, half = len(firsts), int(np.searchsorted(self._ends, self.num_examples / 2, side="right"))
        before = int(np.count_nonzero(firsts < sum(map(len, self._ids[table][:half]))))
        if num_examples <= self.num_examples or not before:
            return float(now)
        exponent = math.log(now / before) / math.log(self.num_examples / self._ends[half - 1])
        return float(now * (num_examples / self.num_examples) ** min(1.0, exponent))


def examples_of(data: Dataset) -> float | None:
    """Examples of an epoch, estimated from some units where nobody has counted them; None where these do not tell.

    A condition keeps as large a share of all rows as of those; text has as many rows a byte. Streams, compressed text and
    pyarrow datasets of other files than Parquet are not told.
    """
    if data.num_examples is not None or data.source.bounds is not None:
        return None if data.num_examples is None else float(data.num_examples)
    source, num_rows, num_kept, num_bytes = data.source, 0, 0, 0
    for part in sorted({place * (source.num_parts - 1) // (UNITS - 1) for place in range(UNITS)}):
        unit = next(source.read(data.plan, np.array([part]), Cursor()), None)
        if unit is not None:
            num_rows += unit.table.num_rows + len(unit.bad)
            num_kept += chosen(unit, data.plan).table.num_rows
            num_bytes += unit.after.byte
    total = None if source.num_rows is None else float(source.num_rows)
    if total is None and num_bytes and not any(file.path.endswith(tuple(SUFFIXES)) for file in source.files):
        total = num_rows / num_bytes * sum(file.size for file in source.files)
    return None if total is None or not num_rows else total * num_kept / num_rows
