"""One shard: which keys have rows, and where the values of the rows lie. Verbs of a store, once their arguments were checked.

:class:`State` is the seam below :class:`girih.store.Store`. :class:`ShardState` answers on the host, with values in rows or in several
tiers; :class:`girih.store.gpu.group_state.GroupState` answers in GPU memory. A repair (:mod:`girih.store.memory.repair`) finds all that it
needs to know of a row in the row itself.

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
    """One shard, as a store uses it; for the verbs see :class:`Store`.

    Attributes:
        spec: its tables.
        layout: the layout of its rows, and their rules.
        memory: the arrays.
        repaired: the state in which memory was found whose writer was killed in a change; None if there was none.
        pushes: those that were applied, or cut short; None if they are not kept.
        noted: the values of which changes are noted; None if they are not.
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
        """Begins to bring in the rows of keys."""

    @abstractmethod
    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Moves rows by gradients."""

    @abstractmethod
    def assign(self, keys: Keys, values: Floats) -> Ints:
        """Sets rows. Returns int32[U]: where they are, -1 where a table is full."""

    @abstractmethod
    def snapshot(self, directory: str | os.PathLike[str] | None) -> LiveSnapshot:
        """The whole shard as it is now."""

    @abstractmethod
    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by those that ``fill`` puts into an empty shard."""

    @abstractmethod
    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part."""

    def peek_counters(self) -> dict[str, int]:
        """Keys that others than :class:`Store` peeked at; empty if there are none."""
        return {}

    def tier_counters(self) -> dict[str, int]:
        """Counts of what each tier did; empty if there is one."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Lets go of memory."""


class StoreCounts:
    """The contents of a store, and counts of what happened to it.

    Attributes:
        num_peeks, num_absent: keys that this process asked for by ``peek``, and those of them that had no row.
    """

    state: State
    num_peeks: int
    num_absent: int

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return self.state.memory.num_rows

    def num_rows_of(self, table: int) -> int:
        """Rows of one table."""
        return self.state.memory.num_rows_of(table)

    def rows_of_tables(self) -> list[int]:
        """Rows of each table."""
        return self.state.memory.rows_of_tables()

    @property
    def last_step(self) -> int:
        """The largest step seen; 0 before the first."""
        return self.state.memory.last_step

    @property
    def repaired(self) -> Repaired | None:
        """The state in which an attached arena was found whose writer was killed in a change; None if there was none."""
        return self.state.repaired

    def counters(self, table: int | None = None) -> dict[str, int]:
        """Counts of what happened so far, in one table or in all.

        ``lookups`` keys read for training, of which ``hits`` had a row, ``new`` got one, ``refused`` were not
        admitted and ``full`` found their table full; rows ``evicted`` and ``expired``; gradients applied
        (``updates``) and ``dropped``.
        """
        return self.state.memory.counters(table)

    def peek_counters(self) -> dict[str, int]:
        """``peeks``, ``absent``: keys peeked at by this process, by groups on a GPU too, and those of them that had no row."""
        others = self.state.peek_counters()
        of_process = {"peeks": self.num_peeks, "absent": self.num_absent}
        return {name: count + others.get(name, 0) for name, count in of_process.items()}

    def tier_counters(self) -> dict[str, int]:
        """Counts of what tiers did; empty where there is one.

        ``dram_reads``, ``ssd_reads`` rows that training read from each; ``ssd_bytes_read``, ``ssd_bytes_written``.
        """
        return self.state.tier_counters()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part; see :func:`~girih.store.accounting.held_bytes`."""
        return self.state.held_bytes()


class ShardState(State):
    """A shard of the host; made by :func:`open_state`.

    Attributes:
        values: where its values lie.
        rows: which keys have rows.
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
        """Begins to bring in the rows of keys from tiers below."""
        self.values.fetch(keys)

    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Moves rows by gradients, a push once for each row however often it is sent."""
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
        """The whole shard as it is now."""
        return Snapshot(self.values, directory)

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by those that ``fill`` puts into an empty shard."""
        with self.memory.replacing():
            fill(self.values)

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part."""
        return held_bytes(self.values)

    def tier_counters(self) -> dict[str, int]:
        """Counts of what each tier did; empty if there is one."""
        return self.values.counters()

    def close(self) -> None:
        """Lets go of memory."""
        self.values.close()


def open_state(
    spec: GroupSpec,
    shard: int,
    num_shards: int,
    arena: ArenaOptions,
    clock: Clock | None,
    tiers: Tiers | None = None,
) -> ShardState:
    """Lays out a shard and opens its memory, and the file of its tiers; arguments and errors are those of :class:`Store`."""
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
    if clock is None and isinstance(arena, Shared):  # whoever attaches goes on by the clock of those before
        if not memory.arena.attached:
            memory.arena.state[layout.CLOCK] = int(steady_clock() - time.monotonic())
        clock = clock_since(float(memory.arena.state[layout.CLOCK]))
    rows = RowTable(memory, own, clock or steady_clock)
    if tiers is not None:
        return ShardState(TieredValues(spec, whole, memory, rows, tiers))
    return ShardState(Values(spec, whole, memory, rows), repaired)
