"""Stores in tests: verbs without ceremony, and all that a store holds as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from girih.kernels.cpu.jit import JIT_DISABLED
from girih.optim import FTRL, SGD, Adam, SparseOptimizer
from girih.store import (
    DiskFile,
    GroupSpec,
    Keys,
    LiveSnapshot,
    RowUpdate,
    Segment,
    SnapshotFile,
    Store,
    TableSpec,
    shard_of,
    write_rows,
)
from girih.store.snapshot.columns import Chunk
from girih.store.snapshot.file import FileFacts
from girih.store.spec import Description
from girih.tables import Dtype, Normal, Zeros
from support.fake_store import FakeStore

AnyStore = Store | FakeStore
S = TypeVar("S", Store, FakeStore, AnyStore)
NUM_IDS = 60 if JIT_DISABLED else 400


def group(
    tables: tuple[str, ...] = ("t",),
    dim: int = 4,
    optimizer: SparseOptimizer | None = None,
    dtype: Dtype = "float32",
    seed: int = 1,
    **rules: Any,
) -> GroupSpec:
    """A group of tables of one segment; ``rules`` are those of every table."""
    return GroupSpec(
        name="group",
        tables=tuple(TableSpec(name, (Normal(std=1.0),), **rules) for name in tables),
        segments=(Segment("embedding", dim, optimizer or SGD(lr=0.5)),),
        dtype=dtype,
        seed=seed,
    )


def two_segments(
    dtype: Dtype = "float32",
    first: SparseOptimizer | None = None,
    second: SparseOptimizer | None = None,
    **rules: Any,
) -> GroupSpec:
    """Users, with ``rules``, and items, without; both of two segments."""
    return GroupSpec(
        "group",
        (TableSpec("users", (Normal(), Zeros()), **rules), TableSpec("items", (Normal(), Zeros()))),
        (Segment("embedding", 3, first or Adam(lr=0.1)), Segment("first_order", 1, second or FTRL(l1=0.01))),
        dtype,
    )


def train(store: S, steps: Iterable[int] = range(1, 6)) -> S:
    """Some steps on keys that the store owns."""
    for step in steps:
        rng = np.random.default_rng(step)
        ids = np.unique(rng.integers(-NUM_IDS, NUM_IDS, NUM_IDS))
        tables = (ids % len(store.spec.tables)).astype(np.int32)
        mine = shard_of(ids, tables, store.num_shards) == store.shard
        ids, tables = ids[mine], tables[mine]
        rng = np.random.default_rng(step)
        rows, values = look(store, ids, tables, step, counts=1 + ids % 3)
        grads = rng.normal(size=values.shape) if store.num_shards == 1 else values / np.float32(3)
        store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads.astype(np.float32), step))
    return store


def keys_of(*ids: int, table: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(int64[U], int32[U])."""
    return np.array(ids, np.int64), np.full(len(ids), table, np.int32)


def look(
    store: AnyStore,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    step: int,
    counts: ArrayLike | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """A training read; returns rows and values."""
    out = np.full((len(ids), store.spec.dim), np.nan, np.float32)
    keys = Keys(ids, tables) if counts is None else Keys(ids, tables, np.asarray(counts, np.int32))
    return store.lookup(keys, step, out), out


def peek(store: AnyStore, ids: NDArray[np.int64], tables: NDArray[np.int32]) -> NDArray[np.float32]:
    """The values of keys."""
    out = np.full((len(ids), store.spec.dim), np.nan, np.float32)
    store.peek(Keys(ids, tables), out)
    return out


def evict(store: AnyStore, ids: NDArray[np.int64], tables: NDArray[np.int32]) -> int:
    """Removes keys; returns how many had a row."""
    if isinstance(store, FakeStore):
        return store.evict(ids, tables)
    state: Any = store.state
    keys = Keys(np.ascontiguousarray(ids), np.ascontiguousarray(tables))
    with state.memory.changing():
        if hasattr(state, "values"):
            rows = state.values.find(keys)
        else:
            rows = state.peek(keys, np.empty((len(ids), store.spec.dim), np.float32))
        return int(state.rows.drop(np.unique(rows)))


def write_snapshot(source: Store | LiveSnapshot, path: Path) -> FileFacts:
    """Writes a store, or a snapshot of one, to a file; returns what :func:`write_rows` does."""
    if isinstance(source, Store):
        with source.snapshot(path.parent) as snapshot:
            return write_snapshot(snapshot, path)
    with path.open("wb", buffering=0) as file:
        return write_rows(source, DiskFile(file), str(path))


def read_snapshot(path: Path, checksums: Mapping[str, int] | None = None) -> SnapshotFile:
    """Opens a file of :func:`write_snapshot`."""
    with path.open("rb") as file:
        return SnapshotFile(file, str(path), checksums)


@dataclass
class MemorySnapshot:
    """A snapshot as plain arrays, from which a store can be restored."""

    description: Description
    columns: Chunk
    cells: Mapping[str, NDArray[np.uint8]]
    where: str = "snapshot in memory"

    def verify(self) -> None:
        """No-op."""

    def chunks(self) -> Iterator[Chunk]:
        """All rows at once."""
        if len(self.columns["ids"]):
            yield self.columns

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells of this shard, or None where it has none."""
        return self.cells.get(table)


def taken(store: AnyStore) -> MemorySnapshot:
    """A copy of all rows."""
    with store.snapshot() as snapshot:
        parts: dict[str, list[NDArray[Any]]] = {tensor.name: [] for tensor in snapshot.tensors()}
        for chunk in snapshot.chunks():
            for name, column in chunk.items():
                parts[name].append(column.copy())
        for table, cells in snapshot.blooms():
            parts[f"bloom.{table}"].append(cells.copy())
    columns: Chunk = {name: np.concatenate(p) if p else np.zeros(0, np.int32) for name, p in parts.items()}
    filters = {name: columns.pop(name) for name in parts if name.startswith("bloom.")}
    filters = {name.removeprefix("bloom."): cells for name, cells in filters.items()}
    return MemorySnapshot(snapshot.description, columns, filters)


def contents(store: AnyStore) -> dict[str, NDArray[Any]]:
    """All rows by column: those of tables without a list as they lie, then each list from its oldest row."""
    snapshot = taken(store)
    columns = dict(snapshot.columns)
    if not snapshot.description["linked"]:
        return columns
    numbers, newer = columns.pop("rows").tolist(), columns.pop("newer").tolist()
    place = {number: position for position, number in enumerate(numbers)}
    in_lists: dict[int, None] = {}
    for number in snapshot.description["oldest"]:
        while number >= 0:
            in_lists[place[number]] = None
            number = newer[place[number]]
    order = np.array([p for p in range(len(numbers)) if p not in in_lists] + list(in_lists), np.int64)
    return {name: column[order] for name, column in columns.items()}


def by_key(*stores: AnyStore) -> dict[tuple[str, int], dict[str, Any]]:
    """{(table name, id): the columns that do not depend on place}.

    Raises:
        ValueError: two stores have the same key.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for store in stores:
        columns = contents(store)
        for position, (key_id, table) in enumerate(zip(columns["ids"], columns["tables"], strict=True)):
            key = store.spec.tables[table].name, int(key_id)
            if key in found:
                raise ValueError(f"{key} is in two stores")
            found[key] = {n: c[position].tolist() for n, c in columns.items() if n not in ("ids", "tables")}
    return found
