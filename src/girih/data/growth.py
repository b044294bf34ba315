"""How tables grow with examples, from a sample: the number of unique ids follows a power of the number of examples (Heaps' law)."""

from __future__ import annotations

import math

import numpy as np

from girih.data.batch import Batch
from girih.data.dataset import Dataset
from girih.data.decode.decoder import chosen
from girih.data.formats.text import SUFFIXES
from girih.data.position import Cursor
from girih.schema import Schema

UNITS = 8


class Growth:
    """Unique ids of each table in the first examples.

    Attributes:
        num_examples: in the sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._unique: dict[str, np.ndarray] = {}
        self._counts: list[tuple[int, dict[str, int]]] = []
        self.num_examples = 0

    def add(self, batch: Batch) -> None:
        """Counts the ids of a batch."""
        found: dict[str, list[np.ndarray]] = {}
        for place, feature in enumerate(self._schema.sparse):
            found.setdefault(feature.table_name, []).append(batch.ids[batch.ids_of(place)])
        for name, ids in found.items():
            known = self._unique.get(name)
            self._unique[name] = np.unique(np.concatenate(ids if known is None else [known, *ids]))
        self.num_examples += batch.num_examples
        self._counts.append((self.num_examples, {name: len(ids) for name, ids in self._unique.items()}))

    def rows(self, table: str, num_examples: float) -> float:
        """The rows that so many examples are expected to make.

        The exponent is that between half of the sample and all of it, 0 where a table has stopped growing, 1 where each
        example brings new ids.
        """
        examples, counts = self._counts[-1]
        now = counts.get(table, 0)
        half_examples, half = min(self._counts, key=lambda each: abs(each[0] - examples / 2))
        before = half.get(table, 0)
        if num_examples <= examples or not before or half_examples == examples:
            return float(now)
        exponent = math.log(now / before) / math.log(examples / half_examples)
        return float(now * (num_examples / examples) ** min(1.0, exponent))


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
