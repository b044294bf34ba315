"""One shard's rows in one memory: what the verbs of a store do once their arguments were checked.

This is the seam below :class:`girih.store.Store`. A tier answers the same ``lookup``, ``peek`` and
``apply_gradients``, over another store; a repair finds all there is to know of a row in the row itself
(``memory.arrays.meta``), and can make a new index and new lists of it.

Shapes: U unique keys, W columns of a row that training sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from girih.kernels.cpu import index, layout, update
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.update import Terms
from girih.store.arrays import Floats, Ints, Longs
from girih.store.memory.arena import ArenaShape, open_arena
from girih.store.memory.options import ArenaOptions
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout, hyper_rows, row_layout, without_hyperparameters
from girih.store.rows.row_table import ONCE, RowTable
from girih.store.spec import GroupSpec

LAST_STEP = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of one shard; made by :func:`open_state`.

    Attributes:
        spec: its tables.
        layout: how their rows lie, and their rules.
        memory: the arrays, on one arena.
        rows: which keys have rows.
    """

    spec: GroupSpec
    layout: RowLayout
    memory: ShardMemory
    rows: RowTable

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
            return self.rows.read(ids, tables, counts, now, step, out, addresses)

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation; see :meth:`Store.peek`."""
        return self.rows.peek(ids, tables, out, addresses)

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats,
        step: int,
        lr_scale: float,
        terms: Terms | None = None,
    ) -> int:
        """Moves rows by gradients; see :meth:`Store.apply_gradients`."""
        memory, kernel = self.memory, self.layout.kernel
        if rows is None:
            rows = self._find(ids, tables)
        hyper, gradients, dropped = hyper_rows(self.spec, lr_scale, step), sealed(grads), 0
        with memory.changing(step):
            for part in memory.stretches(len(ids), 1):
                own = (
                    None if terms is None else terms._replace(starts=terms.starts[part.start : part.stop + 1])
                )
                dropped += update.apply_gradients(
                    memory.arrays, kernel, ids[part], tables[part], rows[part],
                    gradients[part] if terms is None else gradients, hyper, step, own,
                )  # fmt: skip
        return dropped

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> Ints:
        """Sets rows; see :meth:`Store.assign`. Returns int32[U]: where they are, -1 where a table is full."""
        memory = self.memory
        step = min(memory.last_step + 1, LAST_STEP)
        reads = [layout.LOOKUPS, layout.HITS, layout.FULL]
        with memory.changing():
            before = memory.arrays.tables[:, reads]
            out = np.empty_like(values)
            rows = self.rows.read(ids, tables, ONCE, self.rows.now(step), step, out, forced=True)
            memory.arrays.tables[:, reads] = before
            kernel, hyper = self.layout.kernel, self.layout.first_hyper
            for part in memory.stretches(len(ids), 1):
                update.assign(memory.arrays, kernel, rows[part], values[part], hyper, step)
        return rows

    def _find(self, ids: Longs, tables: Ints) -> Ints:
        rows = np.empty(len(ids), np.int32)
        index.find_all(self.memory.arrays, ids, tables, rows)
        return rows


def open_state(
    spec: GroupSpec, shard: int, num_shards: int, arena: ArenaOptions, clock: Callable[[], float]
) -> ShardState:
    """Lays out a shard and opens its memory; arguments and errors are those of :class:`Store`."""
    own = row_layout(spec, shard, num_shards)
    shape = ArenaShape(
        description=json.dumps(without_hyperparameters(own.description), sort_keys=True),
        num_words=own.num_words,
        tables_bytes=8 * layout.TABLE_COLUMNS * len(spec.tables),
        cells_bytes=own.num_cells,
    )
    memory = ShardMemory(open_arena(arena, shape), spec.dim, own.num_words)
    return ShardState(spec, own, memory, RowTable(memory, own, clock))
