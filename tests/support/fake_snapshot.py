"""A snapshot of a :class:`support.fake_store.FakeStore`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from girih.store import GroupSpec
from girih.store.rows.record import row_layout
from girih.store.snapshot.columns import columns_of
from girih.store.snapshot.tensorfile import StoredTensor
from girih.store.spec import Description
from support.twins import Floats


@dataclass
class Row:
    """A key's values, the state of each segment's optimizer, and what is known of its use."""

    value: Floats
    state: list[dict[str, Floats]]
    last_used: int
    count: int
    version: int

    def copy(self) -> Row:
        """A row of its own."""
        state = [{name: values.copy() for name, values in segment.items()} for segment in self.state]
        return Row(self.value.copy(), state, self.last_used, self.count, self.version)


@dataclass
class FakeSnapshot:
    """The copy that :meth:`FakeStore.snapshot` made."""

    spec: GroupSpec
    shard: int
    num_shards: int
    last_step: int
    tables: list[dict[int, Row]]
    seen: list[dict[int, int]]
    counts: list[dict[str, int]]

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(map(len, self.tables))

    @property
    def description(self) -> Description:
        """The parts of a snapshot's description that its columns depend on."""
        layout = row_layout(self.spec, self.shard, self.num_shards)
        return {**layout.description, "linked": False, "last_step": self.last_step}

    def tensors(self) -> list[StoredTensor]:
        """All columns."""
        return [column.tensor(self.num_rows) for column in columns_of(self.description)]

    def chunks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """All rows at once; 16-bit values as float32."""
        columns: dict[str, list[Any]] = {tensor.name: [] for tensor in self.tensors()}
        for table, rows in enumerate(self.tables):
            for key_id, row in rows.items():
                values: list[Any] = [key_id, table, row.last_used, row.count, row.version]
                start = 0
                for segment, state in zip(self.spec.segments, row.state, strict=True):
                    values += [row.value[start : start + segment.dim], *state.values()]
                    start += segment.dim
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        kinds = {"I64": np.int64, "I32": np.int32}
        if self.num_rows:
            yield {t.name: np.array(columns[t.name], kinds.get(t.dtype, np.float32)) for t in self.tensors()}

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """None: what was seen is in :attr:`seen`."""
        yield from ()

    def close(self) -> None:
        """No-op."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
