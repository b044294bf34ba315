"""Frozen descriptions of the tables that a store holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.hashing import shards_of_keys
from girih.optim import SparseOptimizer
from girih.tables import Admission, Dtype, Eviction, Initializer


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns of a row that one optimizer updates: the embedding, or the first-order weight."""

    name: str
    dim: int
    optimizer: SparseOptimizer


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of a group. Its number is its index in :attr:`GroupSpec.tables`.

    ``initializers`` has one entry per segment.
    """

    name: str
    initializers: tuple[Initializer, ...]
    admission: Admission | None = None
    eviction: Eviction | None = None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Tables with the same row layout, which one store holds.

    A key is (table number, id). ``seed`` and the table's name decide initial values, so these do not depend on packing,
    order of arrival or number of shards. ``dim`` is W: the columns of a row that training sees, of all segments.
    """

    name: str
    tables: tuple[TableSpec, ...]
    segments: tuple[Segment, ...]
    dtype: Dtype = "float32"
    seed: int = 0
    dim: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", sum(segment.dim for segment in self.segments))

    def table_seed(self, table: int) -> int:
        """Returns 64 bits from the run's seed and the table's name."""
        return hash_of(f"{self.seed}/{self.tables[table].name}")


class SegmentDescription(TypedDict):
    """A segment in a :class:`Description`. ``state`` has the name and width of each optimizer state."""

    name: str
    dim: int
    optimizer: dict[str, Any]
    state: list[list[Any]]


class TableDescription(TypedDict):
    """A table in a :class:`Description`."""

    name: str
    admission: dict[str, Any] | None
    eviction: dict[str, Any] | None


class Description(TypedDict, total=False):
    """The plain values that describe a shard. Only snapshots have ``num_rows`` and the keys after it."""

    version: int
    group: str
    dtype: str
    dim: int
    segments: list[SegmentDescription]
    tables: list[TableDescription]
    seed: int
    shard: int
    num_shards: int
    num_rows: int
    last_step: int
    counters: list[dict[str, int]]
    linked: bool
    oldest: list[int]
    rows_ever: int


def hash_of(text: str) -> int:
    """Returns a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]


LAST_STEP = (1 << 31) - 1
"""The largest step that rows can record."""


def shard_of(ids: Longs, tables: Ints, num_shards: int) -> Ints:
    """Returns the shard that owns each key, int32[U]. Keys are spread evenly.

    Args:
        ids: int64[U].
        tables: int32[U], table numbers within the group.
        num_shards: at least 1, below 2³¹.
    """
    out = np.zeros(len(ids), np.int32)
    if num_shards > 1:
        shards_of_keys(
            sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), num_shards, out
        )
    return out
