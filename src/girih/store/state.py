"""One shard behind a store: the keys that have rows, and the memory of the rows' values.

:class:`State` is the seam below :class:`girih.store.Store`, which checks the arguments. :class:`ShardState` keeps
rows on the host, with values in rows or in several tiers. :class:`girih.store.gpu.group_state.GroupState` keeps rows
in GPU memory. A repair (:mod:`girih.store.memory.repair`) needs only the rows themselves.

Shapes: U unique keys, W columns of a row.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from girih.kernels.cpu import layout
from girih.kernels.cpu.tiers import ROW_WORDS
from girih.store.accounting import held_bytes
from girih.store.clock import Clock, clock_since, steady_clock
from girih.store.keys import Keys, RowUpdate
from girih.store.memory.arena import ArenaShape, open_arena
from girih.store.memory.mapping import ArenaOptions, Shared
from girih.store.memory.pushes import Pushes
from girih.store.memory.repair import Repaired, repair
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout, row_layout, without_hyperparameters, without_values
from girih.store.rows.row_table import RowTable
from girih.store.snapshot.snapshot import LiveSnapshot, Snapshot
from girih.store.spec import Floats, GroupSpec, Ints, Longs
from girih.store.tiers.tiered_values import TieredValues, Tiers
from girih.store.values import Values

if TYPE_CHECKING:
    from girih.store.gpu.gpu_memory import GpuMemory


class State(ABC):
    """One shard, as a store uses it. :class:`Store` documents the verbs.

    Attributes:
        spec: its tables.
        layout: the layout of its rows, and their rules.
        memory: the arrays.
        repaired: the result of a repair, or None. A repair runs if a process was killed while it changed this memory.
        pushes: the pushes that were applied or cut short, or None if the shard does not record pushes.
        noted: the values whose changes are recorded, or None if changes are not recorded.
    """

    spec: GroupSpec
    layout: RowLayout
    memory: ShardMemory | GpuMemory
    repaired: Repaired | None = None
    pushes: Pushes | None = None
    noted: Values | None = None

    @abstractmethod
    def lookup(self, keys: Keys, step: int, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for training."""

    @abstractmethod
    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation."""

    @abstractmethod
    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows of keys from lower tiers."""

    @abstractmethod
    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Updates rows by gradients."""

    @abstractmethod
    def assign(self, keys: Keys, values: Floats) -> Ints:
        """Sets rows. Returns their numbers, int32[U], or -1 if a table is full."""

    @abstractmethod
    def snapshot(self, directory: str | os.PathLike[str] | None) -> LiveSnapshot:
        """Returns a snapshot of the whole shard as it is now."""

    @abstractmethod
    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by the rows that ``fill`` puts into an empty shard."""

    @abstractmethod
    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part."""

    def peek_counters(self) -> dict[str, int]:
        """Returns counts of keys that groups peeked at without :class:`Store`. The dict is empty for host memory."""
        return {}

    def tier_counters(self) -> dict[str, int]:
        """Returns counts of each tier's work, or an empty dict with a single tier."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Releases memory."""


class StoreCounts:
    """The contents of a store, and counts of its events.

    Attributes:
        num_peeks, num_absent: the number of keys that this process read with ``peek``, and of those without a row.
    """

    state: State
    num_peeks: int
    num_absent: int

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return self.state.memory.num_rows

    def num_rows_of(self, table: int) -> int:
        """Returns the number of rows of one table."""
        return self.state.memory.num_rows_of(table)

    def rows_of_tables(self) -> list[int]:
        """Returns the number of rows of each table."""
        return self.state.memory.rows_of_tables()

    @property
    def last_step(self) -> int:
        """The largest step seen, or 0 before the first step."""
        return self.state.memory.last_step

    @property
    def repaired(self) -> Repaired | None:
        """The result of a repair, or None.

        A repair runs if a process was killed while it changed the attached arena.
        """
        return self.state.repaired

    def counters(self, table: int | None = None) -> dict[str, int]:
        """Returns counts of events so far, in one table or in all.

        - ``lookups``: keys read for training.
        - Parts of these keys: ``hits`` had a row, ``new`` got a row, ``refused`` were not admitted, and ``full`` found
          their table full.
        - ``evicted``, ``expired``: rows that left.
        - ``updates``, ``dropped``: gradients applied, and gradients dropped.
        """
        return self.state.memory.counters(table)

    def peek_counters(self) -> dict[str, int]:
        """Returns ``peeks`` and ``absent``: the number of keys that this process peeked at, and of those without a row.

        The counts include groups on a GPU.
        """
        others = self.state.peek_counters()
        of_process = {"peeks": self.num_peeks, "absent": self.num_absent}
        return {name: count + others.get(name, 0) for name, count in of_process.items()}

    def tier_counters(self) -> dict[str, int]:
        """Returns counts of the tiers' reads and writes, or an empty dict with a single tier.

        ``dram_reads`` and ``ssd_reads`` count the rows that training read from each tier. ``ssd_bytes_read`` and
        ``ssd_bytes_written`` count bytes.
        """
        return self.state.tier_counters()

    def memory(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part; see :func:`~girih.store.accounting.held_bytes`."""
        return self.state.held_bytes()


class ShardState(State):
    """A shard on the host, made by :func:`open_state`.

    Attributes:
        values: the values of its rows.
        rows: the keys that have rows.
    """

    memory: ShardMemory

    def __init__(self, values: Values, repaired: Repaired | None = None) -> None:
        self.values, self.repaired, self.noted = values, repaired, values
        self.spec, self.layout, self.memory, self.rows = (
            values.spec,
            values.layout,
            values.memory,
            values.rows,
        )
        self.pushes = self.memory.pushes if values.in_place else None

    def lookup(self, keys: Keys, step: int, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for training."""
        with self.memory.changing(step):
            now = self.rows.expire(step)
            return self.values.read(keys, now, step, out, addresses)

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation."""
        return self.values.peek(keys, out, addresses)

    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows of keys from lower tiers."""
        self.values.fetch(keys)

    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Updates rows by gradients. A push that is sent again does not update a row twice."""
        memory, push = self.memory, change.push
        with memory.changing(change.step):
            if push is None:
                return self.values.move(keys, change)
            with memory.pushes.taking(push, len(keys.ids)) as done:
                return self.values.move(keys, change, done)

    def assign(self, keys: Keys, values: Floats) -> Ints:
        """Sets rows."""
        with self.memory.setting() as step:
            return self.values.assign(keys, values, self.rows.now(step), step)

    def snapshot(self, directory: str | os.PathLike[str] | None) -> Snapshot:
        """Returns a snapshot of the whole shard as it is now."""
        return Snapshot(self.values, directory)

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by the rows that ``fill`` puts into an empty shard."""
        with self.memory.replacing():
            fill(self.values)

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part."""
        return held_bytes(self.values)

    def tier_counters(self) -> dict[str, int]:
        """Returns counts of each tier's work, or an empty dict with a single tier."""
        return self.values.counters()

    def close(self) -> None:
        """Releases memory."""
        self.values.close()


def open_state(
    spec: GroupSpec,
    shard: int,
    num_shards: int,
    arena: ArenaOptions,
    clock: Clock | None,
    tiers: Tiers | None = None,
) -> ShardState:
    """Lays out a shard, and opens its memory and the file of its tiers.

    Arguments and errors are the same as in :class:`Store`.
    """
    whole = row_layout(spec, shard, num_shards)
    own = whole if tiers is None else without_values(whole, ROW_WORDS)
    shape = ArenaShape(
        description=json.dumps(without_hyperparameters(whole.description), sort_keys=True),
        num_words=own.num_words,
        tables_bytes=8 * layout.TABLE_COLUMNS * len(spec.tables),
        cells_bytes=whole.num_cells,
    )
    memory = ShardMemory(open_arena(arena, shape), spec.dim if tiers is None else 0, own.num_words)
    repaired = None
    if memory.arena.torn:
        repaired = repair(memory, whole.listed)
        memory.arena.mark_whole()
    if clock is None and isinstance(arena, Shared):  # later processes use the same clock
        if not memory.arena.attached:
            memory.arena.state[layout.CLOCK] = int(steady_clock() - time.monotonic())
        clock = clock_since(float(memory.arena.state[layout.CLOCK]))
    rows = RowTable(memory, own, clock or steady_clock)
    if tiers is not None:
        return ShardState(TieredValues(spec, whole, memory, rows, tiers))
    return ShardState(Values(spec, whole, memory, rows), repaired)
