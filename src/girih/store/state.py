"""One shard's rows in one memory: what the verbs of a store do once their arguments were checked.

This is the seam below :class:`girih.store.Store`. :class:`girih.store.tiers.tiered_state.TieredState` answers the same verbs where
values lie in several tiers. A state whose values lie above another one's asks that for those of some rows, and gives them
back: :meth:`ShardState.forget`, ``choose``, ``copy_values``, ``put_values``, with the lock held. A repair
(:mod:`girih.store.memory.repair`) finds all there is to know of a row in the row itself (``memory.arrays.meta``), and makes
a new index and new lists of it.

Shapes: U unique keys, K rows of a chunk, W columns of a row that training sees, V 32-bit words of a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import device_slots, index, layout, update
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.update import Terms
from girih.store.clock import Clock, clock_since, steady_clock
from girih.store.memory.arena import ArenaShape, open_arena
from girih.store.memory.mapping import ArenaOptions, Shared
from girih.store.memory.pushes import Push
from girih.store.memory.repair import Repaired, repair
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout, hyper_rows, row_layout, without_hyperparameters
from girih.store.rows.row_table import ONCE, ReadTarget, RowTable
from girih.store.spec import Floats, GroupSpec, Ints, Longs

LAST_STEP = (1 << 31) - 1

LoadedColumn: TypeAlias = tuple[int, NDArray[Any]]
"""A column: the byte of a row at which it begins, and [K, width] of it."""


class GradientTerms(NamedTuple):
    """Gradients of keys that are still to be summed, from the rows of a matrix.

    Attributes:
        matrix: float32[·, W - E].
    """

    matrix: Floats
    terms: Terms


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of one shard; made by :func:`open_state`.

    Attributes:
        spec: its tables.
        layout: how their rows lie, and their rules.
        memory: the arrays, on one arena.
        rows: which keys have rows.
        repaired: what was found in memory whose writer was killed amid a change; None where none was.
    """

    spec: GroupSpec
    layout: RowLayout
    memory: ShardMemory
    rows: RowTable
    repaired: Repaired | None = field(default=None, kw_only=True)

    def lookup(
        self,
        ids: Longs,
        tables: Ints,
        counts: Ints,
        step: int,
        out: Floats,
        addresses: Longs | None = None,
    ) -> Ints:
        """Reads rows for training; see :meth:`Store.lookup`. ``counts`` is empty where all keys occur once."""
        now = self.rows.now(step)
        with self.memory.changing(step):
            self.rows.expire(now)
            return self.rows.read(ids, tables, counts, now, step, ReadTarget(out, addresses))

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation; see :meth:`Store.peek`."""
        return self.rows.peek(ids, tables, out, addresses)

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
    ) -> int:
        """Moves rows by gradients; see :meth:`Store.apply_gradients`."""
        with self.memory.changing(step):
            return self._move(ids, tables, rows, grads, step, lr_scale)

    def apply_push(
        self,
        push: Push,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
    ) -> int:
        """As :meth:`apply_gradients`, once for each row however often it is sent."""
        with self.memory.changing(step), self.memory.pushes.taking(push, len(ids)) as done:
            return self._move(ids, tables, rows, grads, step, lr_scale, done)

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> Ints:
        """Sets rows; see :meth:`Store.assign`. Returns int32[U]: where they are, -1 where a table is full."""
        memory = self.memory
        step = min(memory.last_step + 1, LAST_STEP)
        reads = [layout.LOOKUPS, layout.HITS, layout.FULL]
        with memory.changing():
            before = memory.arrays.tables[:, reads]
            target = ReadTarget(np.empty_like(values))
            rows = self.rows.read(ids, tables, ONCE, self.rows.now(step), step, target, forced=True)
            memory.arrays.tables[:, reads] = before
            kernel, hyper = self.layout.kernel, self.layout.first_hyper
            for part in memory.stretches(len(ids), 1):
                update.assign(memory.arrays, kernel, rows[part], values[part], hyper, step)
        return rows

    def fetch(self, ids: Longs, tables: Ints) -> None:
        """Begins to bring in the rows of keys; see :meth:`Store.fetch`. They are here already."""

    def forget(self, known: Ints, rows: Ints) -> None:
        """Called when keys got rows, where ``known`` is -1: what there is of those that had their numbers before goes."""

    def choose(self, step: int) -> None:
        """Chooses anew which values stay in memory, where it is time."""

    def copy_values(self, rows: Ints, out: Ints, *, reads: bool) -> None:
        """Copies all of rows, int32[K], but their meta.

        Args:
            out: int32[K, V - 8], written. reads: whether training reads these rows, for counters.
        """
        device_slots.copy_values(self.memory.arrays, rows, out)

    def put_values(self, rows: Ints, values: Ints) -> None:
        """Writes all of rows, int32[K], that have keys, but their meta: ``values``, int32[K, V - 8]."""
        for part in self.memory.stretches(len(rows), 1):
            device_slots.put_values(self.memory.arrays, rows[part], values[part])

    def load_values(
        self,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        *,
        begins: bool,
        states: Sequence[LoadedColumn] = (),
    ) -> None:
        """Writes the values of rows, int32[K], whose meta was loaded; the optimizer ``begins`` anew or is loaded too.

        Args:
            states: those columns of an optimizer that begins anew which are loaded all the same.
        """
        arrays = self.memory.arrays
        write_columns(arrays.values, rows, columns)
        if begins:
            update.begin_states(arrays, self.layout.kernel, rows, self.layout.first_hyper)
        write_columns(arrays.values, rows, states)

    def clear(self) -> None:
        """Forgets all rows."""
        self.memory.clear()

    def freeze(self) -> None:
        """Called with the lock held when a snapshot begins: from now on, :meth:`whole` gives values as they are now."""

    def whole(self, records: Ints, live: Ints) -> tuple[Ints, Ints]:
        """Records with their values, int32[·, V], and the places of the live ones in them.

        Args:
            records: int32[K, ·], as memory had them when the snapshot began. live: those that are wanted.
        """
        return records, live

    def thaw(self) -> None:
        """Called with the lock held when a snapshot ends."""

    def tier_counters(self) -> dict[str, int]:
        """Counts of what each tier did; empty where there is one."""
        return {}

    def peek_counters(self) -> dict[str, int]:
        """Keys that were peeked at by others than :class:`Store`; empty where there are none."""
        return {}

    def tier_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes of memory, used and reserved, that tiers take by part; empty where there is one."""
        return {}

    def at_rest(self) -> ShardState:
        """The shard that a save reads while verbs go on."""
        return self

    def replace(self, fill: Callable[[ShardState], None]) -> None:
        """Replaces all rows by those that ``fill`` puts into an empty shard."""
        with self.memory.replacing():
            fill(self)

    def close(self) -> None:
        """Lets go of memory."""
        self.memory.close()

    def _move(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
        done: int = 0,
    ) -> int:
        """Moves the rows of keys behind those that are ``done``."""
        memory, kernel, dropped = self.memory, self.layout.kernel, 0
        if rows is None:
            rows = self._find(ids, tables)
        matrix, terms = grads if isinstance(grads, GradientTerms) else (grads, None)
        hyper, gradients = hyper_rows(self.spec, lr_scale, step), sealed(matrix)
        for part in memory.stretches(len(ids), 1, done):
            cut = None if terms is None else terms._replace(starts=terms.starts[part.start : part.stop + 1])
            dropped += update.apply_gradients(
                memory.arrays, kernel, ids[part], tables[part], rows[part],
                gradients[part] if terms is None else gradients, hyper, step, cut, part.start,
            )  # fmt: skip
        return dropped

    def _find(self, ids: Longs, tables: Ints) -> Ints:
        rows = np.empty(len(ids), np.int32)
        index.find_all(self.memory.arrays, ids, tables, rows)
        return rows


def write_columns(values: Floats, rows: Ints, columns: Sequence[LoadedColumn]) -> None:
    """Writes columns to rows of ``values``, float32[·, V]."""
    for first_byte, column in columns:
        words = values.view(column.dtype)
        first = first_byte // column.itemsize
        words[rows, first : first + column.shape[1]] = column


def open_state(
    spec: GroupSpec, shard: int, num_shards: int, arena: ArenaOptions, clock: Clock | None
) -> ShardState:
    """Lays out a shard and opens its memory; arguments and errors are those of :class:`Store`."""
    layout_of_rows = row_layout(spec, shard, num_shards)
    shape = ArenaShape(
        description=json.dumps(without_hyperparameters(layout_of_rows.description), sort_keys=True),
        num_words=layout_of_rows.num_words,
        tables_bytes=8 * layout.TABLE_COLUMNS * len(spec.tables),
        cells_bytes=layout_of_rows.num_cells,
    )
    memory = ShardMemory(open_arena(arena, shape), spec.dim, layout_of_rows.num_words)
    repaired = None
    if memory.arena.torn:
        repaired = repair(memory, layout_of_rows.listed)
        memory.arena.mark_whole()
    if clock is None and isinstance(arena, Shared):  # whoever attaches goes on by the clock of those before
        if not memory.arena.attached:
            memory.arena.state[layout.CLOCK] = int(steady_clock() - time.monotonic())
        clock = clock_since(float(memory.arena.state[layout.CLOCK]))
    return ShardState(
        spec,
        layout_of_rows,
        memory,
        RowTable(memory, layout_of_rows, clock or steady_clock),
        repaired=repaired,
    )
