"""From snapshots, of any number of shards, back into one store.

Shapes: n rows of a source, K rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, nearest
from girih.kernels.cpu import layout as at
from girih.kernels.cpu import recency, transfer, update
from girih.store.route import shard_of
from girih.store.rows.record import block_range
from girih.store.snapshot.columns import Chunk, is_listed
from girih.store.snapshot.file import SnapshotFile
from girih.store.snapshot.still import StillSnapshot

if TYPE_CHECKING:
    from girih.store.store import Store

Source = StillSnapshot | SnapshotFile
ELSEWHERE = -1
Keep = Callable[[NDArray[np.int64], NDArray[np.int32]], NDArray[np.bool_]]


def restore(
    store: Store,
    sources: Sequence[Source],
    keep: Keep | None,
    optimizer_state: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """What :meth:`Store.restore` does.

    The list of a table comes out as it was if one source gave all of its rows, as when N shards restore from
    the N files of N shards; else it is ordered by last use, then by source.
    Bloom filters are carried over, summed where shards were joined, unless a table's number or its filter's
    size changed: then they begin anew. Counters go to shard 0 if the number of shards changed.
    """
    for source in sources:
        check_source(store, source, optimizer_state, elsewhere)
    check_tables(store, sources)
    for source in sources:
        source.verify()
    store.space.clear()
    num_givers = np.zeros(len(store.spec.tables), np.int64)
    for source in sources:
        numbers = _table_numbers(store, source)
        gave = np.zeros(len(num_givers), np.bool_)
        lists = _Lists(source) if source.description["linked"] else None
        for chunk in source.chunks():
            kept, tables, rows = _load_chunk(
                store, chunk, numbers, keep or _routed_to(store), optimizer_state
            )
            gave[tables] = True
            if lists is not None:
                lists.add(chunk, kept, rows)
        if lists is not None:
            lists.follow(store, numbers)
        num_givers += gave
    for source in _latest(sources).values():
        _add_bloom(store, source)
    _order_lists(store, num_givers > 1)
    _carry_counters(store, sources)
    _shrink_to_bounds(store)


def check_source(
    store: Store, source: Source, optimizer_state: bool, elsewhere: frozenset[str] = frozenset()
) -> None:
    """Refuses a source whose rows do not fit, naming its tables.

    Raises:
        CheckpointError: another dtype, dim, segment or optimizer, or a table that the store does not have.
    """
    theirs, ours = source.description, store.description
    names = [table["name"] for table in theirs["tables"]]
    where = f"{source.where}: tables {', '.join(map(repr, names))}"
    for name in names:
        known = [table["name"] for table in ours["tables"]]
        if name not in known and name not in elsewhere:
            raise CheckpointError(
                f"{source.where}: table {name!r} is not in this model's group{nearest(name, known)}"
            )
    if theirs["dtype"] != ours["dtype"]:
        raise CheckpointError(
            f"{where}: dtype {theirs['dtype']}, expected {ours['dtype']}; set dtype to match"
        )
    for what in ("name", "dim"):
        found, expected = ([s[what] for s in d["segments"]] for d in (theirs, ours))
        if found != expected:
            raise CheckpointError(
                f"{where}: {what} of segments is {found}, expected {expected}; rows cannot be used"
            )
    if optimizer_state:
        found, expected = (
            [(s["optimizer"]["name"], s["state"]) for s in d["segments"]] for d in (theirs, ours)
        )
        if found != expected:
            raise CheckpointError(
                f"{where}: optimizer is {_optimizers(theirs)}, expected {_optimizers(ours)};"
                " go on with that one, or restore with optimizer_state=False to begin its state anew"
            )


def check_tables(store: Store, sources: Sequence[Source]) -> None:
    """Refuses sources that do not cover all tables of the store.

    Raises:
        CheckpointError: names the table that is missing.
    """
    found = {table["name"] for source in sources for table in source.description["tables"]}
    for table in store.spec.tables:
        if table.name not in found:
            wheres = ", ".join(source.where for source in sources) or "no snapshot"
            raise CheckpointError(f"{wheres}: table {table.name!r} is missing{nearest(table.name, found)}")


def _routed_to(store: Store) -> Keep:
    return lambda ids, tables: shard_of(ids, tables, store.num_shards) == store.shard


def _optimizers(description: dict[str, Any]) -> str:
    return ", ".join(
        s["optimizer"]["name"] + (f" with {', '.join(name for name, _ in s['state'])}" if s["state"] else "")
        for s in description["segments"]
    )


def _table_numbers(store: Store, source: Source) -> NDArray[np.int32]:
    """This store's number of each of the source's tables; :data:`ELSEWHERE` of those that it does not hold."""
    number = {table.name: position for position, table in enumerate(store.spec.tables)}
    found = [number.get(table["name"], ELSEWHERE) for table in source.description["tables"]]
    return np.array(found, np.int32)


def _load_chunk(
    store: Store, chunk: Chunk, numbers: NDArray[np.int32], keep: Keep, optimizer_state: bool
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Takes the rows to keep; returns the place of each in the chunk, its table and its row."""
    if len(chunk["tables"]) and int(chunk["tables"].view(np.uint32).max()) >= len(numbers):
        raise CheckpointError(
            f"a row has table number {chunk['tables'].max()}, expected below {len(numbers)}"
        )
    all_tables = numbers[chunk["tables"]]
    kept = np.flatnonzero(keep(np.ascontiguousarray(chunk["ids"]), all_tables) & (all_tables != ELSEWHERE))
    ids, tables = chunk["ids"][kept], all_tables[kept]
    rows = np.empty(len(kept), np.int32)
    if not len(kept):
        return kept, tables, rows
    store.space.grow_rows(len(kept))
    store.space.reserve_index(len(kept))
    arrays, layout = store.space.arrays, store.layout
    last_used, counts, versions = (chunk[name][kept] for name in ("last_used", "counts", "versions"))
    transfer.load_keys(arrays, layout.kernel, ids, tables, last_used, counts, versions, rows)
    weights: NDArray[Any] = arrays.values
    start = at.VALUES
    if store.spec.dtype != "float32":
        weights, start = arrays.halves, 2 * at.VALUES
    for number, segment in enumerate(store.spec.segments):
        first = start + int(layout.kernel.segments[number, at.FIRST_COLUMN])
        weights[rows, first : first + segment.dim] = chunk[segment.name][kept]
    if optimizer_state:
        for state in layout.state:
            arrays.values[rows, state.start : state.start + state.width] = chunk[
                f"{state.segment}.{state.name}"
            ][kept]
    else:
        update.begin_states(arrays, layout.kernel, rows, store.first_hyper)
    return kept, tables, rows


class _Lists:
    """The lists of a source whose rows come in another order, by row numbers as they were: int32[R] each."""

    def __init__(self, source: Source) -> None:
        self._where, self._oldest = source.where, source.description["oldest"]
        num_rows = int(source.description["rows_ever"])
        self._newer_of = np.full(num_rows, at.NO_ROW, np.int32)
        self._new_of = np.full(num_rows, at.NO_ROW, np.int32)

    def add(self, chunk: Chunk, kept: NDArray[np.int64], rows: NDArray[np.int32]) -> None:
        """Notes where the chunk's rows came to be."""
        numbers, num_rows = chunk["rows"], len(self._new_of)
        if len(numbers) and int(numbers.view(np.uint32).max()) >= num_rows:
            raise CheckpointError(f"{self._where}: a row has a number above {num_rows}, which none can have")
        self._newer_of[numbers] = chunk["newer"]
        self._new_of[numbers[kept]] = rows

    def follow(self, store: Store, numbers: NDArray[np.int32]) -> None:
        """Makes the rows the newest of their tables in the order that they had."""
        arrays = store.space.arrays
        for theirs, ours in enumerate(numbers):
            oldest = int(self._oldest[theirs])
            if ours == ELSEWHERE:
                continue
            if is_listed(store.layout)[ours] and oldest < len(self._new_of):
                transfer.follow(arrays, int(ours), oldest, self._newer_of, self._new_of)


def _add_bloom(store: Store, source: Source) -> None:
    bloom = store.layout.kernel.bloom
    description = source.description
    for theirs, ours in enumerate(_table_numbers(store, source)):
        if ours == ELSEWHERE:
            continue
        cells = source.bloom(description["tables"][theirs]["name"])
        total, block_cells, first, blocks, start = (
            int(bloom[ours, column])
            for column in (at.TOTAL_BLOCKS, at.BLOCK_CELLS, at.FIRST_BLOCK, at.NUM_BLOCKS, at.CELLS_START)
        )
        if cells is None or theirs != ours or not total:
            continue
        their_first, their_blocks = block_range(total, description["shard"], description["num_shards"])
        if len(cells) != their_blocks * block_cells:
            continue
        low, high = max(first, their_first), min(first + blocks, their_first + their_blocks)
        if low < high:
            mine = store.space.arrays.cells[
                start + (low - first) * block_cells : start + (high - first) * block_cells
            ]
            transfer.add_cells(
                mine, cells[(low - their_first) * block_cells : (high - their_first) * block_cells]
            )


def _order_lists(store: Store, merged: NDArray[np.bool_]) -> None:
    """Orders the lists of ``merged`` tables, bool[T], by last use, ties as the sources came."""
    arrays, rules = store.space.arrays, store.layout.kernel.rules
    for table in np.flatnonzero(merged & (rules[:, at.EVICTION] != at.EVICT_NONE)):
        rows = np.empty(store.num_rows_of(int(table)), np.int32)
        recency.oldest_first(arrays.meta, arrays.tables, int(table), rows)
        order = np.argsort(arrays.meta[rows, at.LAST_USED], kind="stable")
        transfer.relink(arrays, int(table), rows[order])


def _carry_counters(store: Store, sources: Sequence[Source]) -> None:
    arrays = store.space.arrays
    arrays.state[at.LAST_STEP] = max((s.description["last_step"] for s in sources), default=0)
    latest = _latest(sources)
    own = [source for place, source in latest.items() if place[:2] == (store.num_shards, store.shard)]
    if not own and store.shard:
        return
    for source in own or latest.values():
        for ours, counters in zip(_table_numbers(store, source), source.description["counters"], strict=True):
            if ours == ELSEWHERE:
                continue
            for name, column in at.COUNTERS.items():
                arrays.tables[ours, column] += counters[name]


def _latest(sources: Sequence[Source]) -> dict[tuple[int, int, tuple[str, ...]], Source]:
    """The last source of each shard of some tables: what a delta says of it replaces what its base says."""
    return {
        (d["num_shards"], d["shard"], tuple(table["name"] for table in d["tables"])): source
        for source in sources
        for d in [source.description]
    }


def _shrink_to_bounds(store: Store) -> None:
    """Evicts what is above ``max_rows``, which may be lower, or rounded otherwise, than before."""
    arrays, rules = store.space.arrays, store.layout.kernel.rules
    for table in np.flatnonzero(rules[:, at.EVICTION] != at.EVICT_NONE):
        surplus = store.num_rows_of(int(table)) - int(rules[table, at.MAX_ROWS])
        if surplus <= 0:
            continue
        if rules[table, at.EVICTION] == at.EVICT_LFU:
            store.residents.evict_least_used(int(table), 1 << 31, surplus)
        else:
            rows = np.empty(store.num_rows_of(int(table)), np.int32)
            recency.oldest_first(arrays.meta, arrays.tables, int(table), rows)
            update.drop_rows(arrays, store.layout.kernel, rows[:surplus])
