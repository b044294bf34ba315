"""A fast path for requests whose tensors are bytes that need no conversion. Most requests are like this.

girih makes one plan for all requests of the same layout. The plan copies all columns with a few copies. Requests
without a plan, and invalid requests, go to :class:`~girih.serving.reading.RequestReader`, which also reports the
errors.

Shapes: n examples, F categorical and sequence features, X numeric features, K columns of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch, single_bags
from girih.data.from_memory import columns_of
from girih.kernels.buffers import Buffers
from girih.schema import Schema
from girih.serving.protocol import BinaryLayout, BinaryTensor
from girih.serving.tensors import NUMPY

MOST_IDS = 1 << 22
"""The limit of ids in one request. Ids in shared lists and in split strings count once per example."""
_MOST_PLANS = 64


class _ColumnRun(NamedTuple):
    """Columns of one type that are adjacent both in the request and in the batch.

    Attributes:
        first: the place of the first column in the batch.
        begin: the first byte of the first column.
        num_rows: values per column: n, or 1 if all examples share it.
    """

    first: int
    num_columns: int
    begin: int
    dtype: np.dtype[np.generic]
    num_rows: int

    @property
    def end(self) -> int:
        return self.begin + self.num_columns * self.num_rows * self.dtype.itemsize

    def read(self, data: memoryview) -> NDArray[np.generic]:
        """Returns the columns, [K, n] or [K, 1]."""
        found = np.frombuffer(data, self.dtype, self.num_columns * self.num_rows, self.begin)
        return found.reshape(self.num_columns, self.num_rows)


class _DecodePlan(NamedTuple):
    """Runs of ids and of numbers, for a fixed number of examples."""

    num_examples: int
    ids: Sequence[_ColumnRun]
    numbers: Sequence[_ColumnRun]


class PlainReader:
    """Reads requests with plans.

    Args:
        plain: names of features whose values need no conversion. most_examples: the limit per request.
    """

    def __init__(self, schema: Schema, plain: Collection[str], most_examples: int) -> None:
        self._columns = columns_of(schema)
        self._most_examples = most_examples
        features = (*schema.sparse, *schema.numeric)
        self._sources: tuple[list[str], list[str]] | None = None
        if all(feature.name in plain for feature in features):
            self._sources = [f.source for f in schema.sparse], [f.source for f in schema.numeric]
        self._plans: dict[BinaryLayout, _DecodePlan | None] = {}
        self._buffers = Buffers()

    def read(self, layout: BinaryLayout, data: memoryview) -> Batch | None:
        """Returns a batch, with numbers not yet standardized; None if the fast path cannot read the request."""
        if layout not in self._plans:
            while len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[layout] = self._plan(layout)
        plan = self._plans[layout]
        if plan is None or self._sources is None:
            return None
        size, num_features, num_numbers = plan.num_examples, *map(len, self._sources)
        ids = self._buffers.take(np.int64, num_features, size)
        for run in plan.ids:
            ids[run.first : run.first + run.num_columns] = run.read(data)
        numeric = np.empty((size, num_numbers), np.float32)
        with np.errstate(over="ignore"):  # numbers beyond float32 become inf
            for run in plan.numbers:
                values = run.read(data)
                if values.dtype.kind != "f":
                    values = values.astype(np.float64)  # the decoder converts in the same way
                numeric[:, run.first : run.first + run.num_columns] = values.T
        if not np.isfinite(numeric).all():  # the decoder reports the value, and what it expects
            return None
        return Batch(
            ids=ids.reshape(-1),
            offsets=single_bags(num_features * size),
            numeric=numeric,
            labels=np.empty((size, 0), np.float32),
        )

    def _plan(self, layout: BinaryLayout) -> _DecodePlan | None:
        columns = {each.name: each for each in layout.tensors}
        if self._sources is None or set(columns) != set(self._columns):
            return None
        if any(len(each.shape) == 2 and each.shape[1] != 1 for each in layout.tensors):
            return None
        size = max(each.shape[0] for each in layout.tensors)
        if not all(each.shape[0] in (1, size) for each in layout.tensors):
            return None
        if not 0 < size <= self._most_examples or size * len(columns) > MOST_IDS:
            return None
        ids, numbers = ([columns[name] for name in names] for names in self._sources)
        kinds = {name: NUMPY[each.datatype].kind for name, each in columns.items() if each.datatype in NUMPY}
        if not all(kinds.get(each.name, "") in ("i", "u") for each in ids):
            return None
        if not all(kinds.get(each.name, "") in ("f", "i", "u") for each in numbers):
            return None
        return _DecodePlan(size, _runs(ids), _runs(numbers))


def _runs(columns: Sequence[BinaryTensor]) -> list[_ColumnRun]:
    """Returns the columns in the order of a batch. Columns whose bytes are adjacent are joined."""
    found: list[_ColumnRun] = []
    for place, each in enumerate(columns):
        dtype, num_rows = NUMPY[each.datatype], each.shape[0]
        last = found[-1] if found else None
        if last is not None and (last.end, last.dtype, last.num_rows) == (each.begin, dtype, num_rows):
            found[-1] = last._replace(num_columns=last.num_columns + 1)
        else:
            found.append(_ColumnRun(place, 1, each.begin, dtype, num_rows))
    return found
