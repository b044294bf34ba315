"""Restores one shard from snapshots of any number of shards.

Shapes: n rows of a source, K rows of a chunk, T tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, nearest
from girih.kernels.cpu import layout, update
from girih.kernels.cpu.arrays import sealed
from girih.store.rows.record import block_range
from girih.store.snapshot.columns import Chunk, counts_seconds, value_columns
from girih.store.spec import Description, Ints, Longs, shard_of
from girih.store.values import Values

ELSEWHERE = -1


class RowSource(Protocol):
    """The rows of a shard as columns: a snapshot or its file.

    Attributes:
        where: the source's name in errors.
    """

    where: str

    @property
    def description(self) -> Description:
        """The description of the rows; see :class:`Snapshot`."""
        ...

    def verify(self) -> None:
        """Raises :class:`CheckpointError` if the source is damaged."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the columns of some rows at a time. Readers do not check the table and row numbers."""

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """Returns a table's Bloom cells of this shard, or None if it has none."""


def restore(values: Values, sources: Sequence[RowSource], optimizer_state: bool) -> None:
    """Replaces the content of a shard by sources that :func:`check_sources` accepts; see :meth:`Store.restore`.

    If all rows of a table come from one whole snapshot, the table's list keeps its order. This is the case if N shards
    restore from the N files of N shards. Otherwise the list is ordered by last use, then by source. Lists are also
    ordered by last use if a file has more row numbers than bytes. In this case 99 % of its rows were evicted, or the
    file was crafted.

    Bloom filters are kept. Filters of joined shards are added up. If a table's number or its filter's size changed,
    the filter starts empty. If the number of shards changed, shard 0 gets the counters.
    """
    values.clear()
    num_givers = np.zeros(len(values.spec.tables), np.int64)
    for source in sources:
        num_givers += _load_rows(values, source, optimizer_state)
    for source in _latest(sources).values():
        add_bloom(values, source)
    order_lists(values, num_givers > 1)
    _carry_counters(values, sources)
    shrink_to_bounds(values)


def check_sources(
    ours: Description, sources: Sequence[RowSource], optimizer_state: bool, elsewhere: frozenset[str]
) -> None:
    """Refuses sources that are damaged, whose rows do not fit, or that do not cover all tables of the store.

    Args:
        ours: the description of the store's rows.

    Raises:
        CheckpointError: a source is damaged, or has another dtype, dim, segment or optimizer. Or a source has a table
            that the store does not have, or the store has a table that no source has. The message names the tables.
    """
    known = [table["name"] for table in ours["tables"]]
    allowed, seen = {*known, *elsewhere}, set[str]()
    for source in sources:
        names = [table["name"] for table in source.description["tables"]]
        seen.update(names)
        for name in names:
            if name not in allowed:
                raise CheckpointError(
                    f"{source.where}: table {name!r} is not in this model's group{nearest(name, known)}"
                )
        if misfit := _misfit(source.description, ours, optimizer_state):
            tables = "table" if len(names) == 1 else "tables"
            raise CheckpointError(f"{source.where}: {tables} {', '.join(map(repr, names))}: {misfit}")
    for name in known:
        if name not in seen:
            wheres = ", ".join(source.where for source in sources) or "no snapshot"
            raise CheckpointError(f"{wheres}: table {name!r} is missing{nearest(name, seen)}")
    for source in sources:
        source.verify()


def _misfit(theirs: Description, ours: Description, optimizer_state: bool) -> str:
    """Returns why rows of one description do not fit another, or an empty text if they fit."""
    if theirs["dtype"] != ours["dtype"]:
        return f"dtype {theirs['dtype']}, expected {ours['dtype']}; set dtype to match"
    names, expected = ([s["name"] for s in d["segments"]] for d in (theirs, ours))
    if names != expected:
        return f"rows hold {' and '.join(names)}, expected {' and '.join(expected)}; rows cannot be used"
    for their, our in zip(theirs["segments"], ours["segments"], strict=True):
        if their["dim"] != our["dim"]:
            return f"{our['name']} has dim {their['dim']}, expected {our['dim']}; set dim to match"
    before, now = ([(s["optimizer"]["name"], s["state"]) for s in d["segments"]] for d in (theirs, ours))
    if optimizer_state and before != now:
        return (
            f"optimizer is {_optimizers(theirs)}, expected {_optimizers(ours)};"
            " continue with that optimizer, or start a new run"
        )
    return ""


def _optimizers(description: Description) -> str:
    return ", ".join(
        s["optimizer"]["name"] + (f" with {', '.join(name for name, _ in s['state'])}" if s["state"] else "")
        for s in description["segments"]
    )


def table_numbers(values: Values, source: RowSource) -> Ints:
    """Returns this shard's number of each table of the source, or :data:`ELSEWHERE` for unknown tables."""
    number = {table.name: position for position, table in enumerate(values.spec.tables)}
    numbers = [number.get(table["name"], ELSEWHERE) for table in source.description["tables"]]
    return np.array(numbers, np.int32)


def _load_rows(values: Values, source: RowSource, optimizer_state: bool) -> Longs:
    """Loads the rows of a source that belong to this shard, and restores the links of the tables' lists.

    Returns:
        int64[T]: for each table, 0 if the source gave no row, 1 if it gave rows, 2 if it gave rows of unknown order.
    """
    description, numbers = source.description, table_numbers(values, source)
    linked = description["linked"]
    columns = value_columns(values.layout.description)
    loaded = [column for column in columns if optimizer_state or "." not in column.name]
    # Indexed by the source's row numbers.
    num_rows = int(description["rows_ever"]) if linked else 0
    newer_of, new_of = (np.full(num_rows, layout.NO_ROW, np.int32) for _ in range(2))
    gave = np.zeros(len(values.spec.tables), np.int64)
    for chunk in source.chunks():
        kept, tables, rows = load_keys(values, description, chunk, numbers, goes_on=True)
        if len(kept):
            values.load(
                rows, [(c.first_byte, chunk[c.name][kept]) for c in loaded], begins=not optimizer_state
            )
        gave[tables] = 1 if linked else 2
        if linked:
            newer_of[chunk["rows"]] = chunk["newer"]
            new_of[chunk["rows"][kept]] = rows
    for theirs, ours in enumerate(numbers):
        if linked and ours != ELSEWHERE and values.layout.listed[ours]:
            oldest = int(description["oldest"][theirs])
            update.follow(values.memory.arrays, int(ours), oldest, newer_of, new_of)
    return gave


def load_keys(
    values: Values, theirs: Description, chunk: Chunk, numbers: Ints, *, goes_on: bool
) -> tuple[Longs, Ints, Ints]:
    """Gives rows to the keys of a chunk that belong to this shard, and writes their meta.

    Args:
        theirs: the description of the source. numbers: see :func:`table_numbers`.
        goes_on: True continues the source's step numbers. False counts steps from the start.

    Returns:
        The index of each key in the chunk, int64[K], its table and its row, int32[K].
    """
    all_tables, ours = numbers[chunk["tables"]], values.layout.description
    shards = shard_of(np.ascontiguousarray(chunk["ids"]), all_tables, ours["num_shards"])
    kept = np.flatnonzero((shards == ours["shard"]) & (all_tables != ELSEWHERE))
    tables, rows = all_tables[kept], np.empty(len(kept), np.int32)
    if len(kept):
        values.memory.grow_rows(len(kept))
        values.memory.reserve_index(len(kept))
        counts, versions = (chunk[name][kept] for name in ("counts", "versions"))
        update.load_keys(
            values.memory.arrays, values.layout.kernel, chunk["ids"][kept], tables,
            _last_uses(values, theirs, chunk, kept, tables, goes_on=goes_on), counts,
            versions if goes_on else np.zeros_like(versions), rows,
        )  # fmt: skip
    return kept, tables, rows


def _last_uses(
    values: Values, theirs: Description, chunk: Chunk, kept: Longs, tables: Ints, *, goes_on: bool
) -> Ints:
    """Returns the last use of rows, int32[K], in the unit of this shard's tables.

    If the source used another unit, the last use is now.

    Args:
        theirs: the description of the source.
        goes_on: True continues the source's step numbers. False counts steps from the start.
    """
    last_step = int(theirs["last_step"])
    in_seconds = np.array([counts_seconds(table) for table in theirs["tables"]])
    now, counted = values.rows.now(last_step if goes_on else 0)[tables], in_seconds[chunk["tables"][kept]]
    counts = values.layout.kernel.rules[tables, layout.IN_SECONDS] != 0
    saved = chunk["last_used"][kept].astype(np.int64)
    before = np.where(counted | goes_on, saved, saved - last_step)
    return np.where(counted == counts, before, now).astype(np.int32)


def add_bloom(values: Values, source: RowSource) -> None:
    """Adds a source's Bloom filters to the filters of tables with the same number and size."""
    description = source.description
    for theirs, ours in enumerate(table_numbers(values, source)):
        total, block_cells, first, blocks = (
            int(values.layout.kernel.bloom[ours, column])
            for column in (layout.TOTAL_BLOCKS, layout.BLOCK_CELLS, layout.FIRST_BLOCK, layout.NUM_BLOCKS)
        )
        if theirs != ours or not total:
            continue
        cells = source.bloom(description["tables"][theirs]["name"])
        their_first, their_blocks = block_range(total, description["shard"], description["num_shards"])
        if cells is None or len(cells) != their_blocks * block_cells:
            continue
        low, high = max(first, their_first), min(first + blocks, their_first + their_blocks)
        if low < high:
            mine = values.memory.arrays.cells[values.layout.cells_of(ours)]
            update.add_cells(
                mine[(low - first) * block_cells : (high - first) * block_cells],
                sealed(cells[(low - their_first) * block_cells : (high - their_first) * block_cells]),
            )


def order_lists(values: Values, tables: NDArray[np.bool_]) -> None:
    """Orders the lists of ``tables``, bool[T], by last use. Rows with equal last use keep the order of the sources."""
    arrays = values.memory.arrays
    for table in np.flatnonzero(tables & values.layout.listed):
        rows = values.rows.oldest_first(int(table))
        order = np.argsort(arrays.meta[rows, layout.LAST_USED], kind="stable")
        update.relink(arrays, int(table), rows[order])


def _carry_counters(values: Values, sources: Sequence[RowSource]) -> None:
    arrays, shard = values.memory.arrays, values.layout.description["shard"]
    arrays.state[layout.LAST_STEP] = max((s.description["last_step"] for s in sources), default=0)
    latest, num_shards = _latest(sources), values.layout.description["num_shards"]
    of_shard = [s for place, s in latest.items() if place[:2] == (num_shards, shard)]
    if not of_shard and shard:
        return
    for source in of_shard or latest.values():
        for ours, counters in zip(table_numbers(values, source), source.description["counters"], strict=True):
            if ours != ELSEWHERE:
                for name, column in layout.COUNTERS.items():
                    arrays.tables[ours, column] += counters[name]


def _latest(sources: Sequence[RowSource]) -> dict[tuple[int, int, tuple[str, ...]], RowSource]:
    """Returns the last source of each shard of some tables."""
    return {
        (d["num_shards"], d["shard"], tuple(table["name"] for table in d["tables"])): source
        for source in sources
        for d in [source.description]
    }


def shrink_to_bounds(values: Values) -> None:
    """Evicts rows above ``max_rows``.

    The limit may be lower than in the snapshot, or rounded differently because the number of shards changed.
    """
    rules = values.layout.kernel.rules
    for table in np.flatnonzero(values.layout.listed):
        surplus = values.memory.num_rows_of(int(table)) - int(rules[table, layout.MAX_ROWS])
        if surplus <= 0:
            continue
        if rules[table, layout.EVICTION] == layout.EVICT_LFU:
            values.rows.evict_least_used(int(table), 1 << 31, surplus)
        else:
            values.rows.drop(values.rows.oldest_first(int(table))[:surplus])
