"""One shard's rows with their values in several tiers: HybridHash (PICASSO §III-D, Algorithm 1).

The hash map, and the meta of every row, lie in the shard's memory as those of any shard do; so which keys have rows,
who is evicted and what is counted do not depend on tiers. Only values move: between slots of memory (the paper's
Hot-storage) and a file (its Cold-storage). Frequencies are the counts that rows have anyway.

Shapes: U unique keys, W columns of a row that training sees, V 32-bit words of a record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from girih.kernels.cpu import index, layout, tiers, update
from girih.kernels.cpu.arrays import sealed
from girih.store.clock import Clock
from girih.store.memory.arena import ArenaShape, open_arena
from girih.store.memory.mapping import Heap
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import hyper_rows, row_layout, without_hyperparameters, without_values
from girih.store.rows.row_table import ONCE, ReadTarget, RowTable
from girih.store.spec import Floats, GroupSpec, Ints, Longs
from girih.store.state import LAST_STEP, GradientTerms, LoadedColumn, ShardState, write_columns
from girih.store.tiers.slot_memory import shard_of_records
from girih.store.tiers.tiered_values import TieredValues, Tiers


@dataclass(frozen=True, slots=True)
class TieredState(ShardState):
    """The state of one shard; made by :func:`open_tiered_state`. For the verbs see :class:`Store`.

    Attributes:
        layout: how whole rows lie; those of ``memory`` have their meta alone, and a place.
        values: where the values are.
    """

    values: TieredValues

    def lookup(
        self,
        ids: Longs,
        tables: Ints,
        counts: Ints,
        step: int,
        out: Floats,
        addresses: Longs | None = None,
    ) -> Ints:
        """Reads rows for training."""
        now, values = self.rows.now(step), self.values
        with self.memory.changing(step):
            self.rows.expire(now)
            rows, num_known = self._read_keys(ids, tables, counts, now, step)
            values.num_reads += num_known
            values.choose(step)
            for part in values.parts(len(ids)):
                values.read(ids[part], tables[part], rows[part], out[part])
            values.collect()
        _write_addresses(out, addresses)
        return rows

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation."""
        with self.memory.changing():
            rows = self._find(ids, tables)
            self.values.peek(ids, tables, rows, out)
        _write_addresses(out, addresses)
        return rows

    def fetch(self, ids: Longs, tables: Ints) -> None:
        """Begins to read from the file what the next batch will want."""
        with self.memory.changing():
            self.values.fetch(self._find(ids, tables))

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
    ) -> int:
        """Moves rows by gradients."""
        kernel, values = self.layout.kernel, self.values
        matrix, terms = grads if isinstance(grads, GradientTerms) else (grads, None)
        hyper, gradients, dropped = hyper_rows(self.spec, lr_scale, step), sealed(matrix), 0
        with self.memory.changing(step):
            found_now = np.empty(len(ids), np.int32)
            if rows is None:
                index.find_all(self.memory.arrays, ids, tables, found_now)
            else:
                tiers.check_rows(self.memory.arrays, ids, tables, rows, found_now)
            num_missed = 0
            for part in values.parts(len(ids)):
                slots, num_cold = values.bring(ids[part], tables[part], found_now[part])
                num_missed += num_cold
                values.mark_changed(found_now[part], slots, step)
                cut = (
                    None if terms is None else terms._replace(starts=terms.starts[part.start : part.stop + 1])
                )
                dropped += update.apply_gradients(
                    values.memory.shard, kernel, ids[part], tables[part], slots,
                    gradients[part] if terms is None else gradients, hyper, step, cut,
                )  # fmt: skip
            if num_missed:
                values.memory.keep_longer()
        return dropped

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> Ints:
        """Sets rows."""
        memory, tiered = self.memory, self.values
        step = min(memory.last_step + 1, LAST_STEP)
        reads = [layout.LOOKUPS, layout.HITS, layout.FULL]
        with memory.changing():
            before = memory.arrays.tables[:, reads]
            rows, _ = self._read_keys(ids, tables, ONCE, self.rows.now(step), step, forced=True)
            memory.arrays.tables[:, reads] = before
            kernel, hyper = self.layout.kernel, self.layout.first_hyper
            for part in tiered.parts(len(ids)):
                slots, _ = tiered.bring(ids[part], tables[part], rows[part])
                tiered.mark_changed(rows[part], slots, step)
                update.assign(tiered.memory.shard, kernel, slots, values[part], hyper, step)
            tiered.collect()
        return rows

    def forget(self, known: Ints, rows: Ints) -> None:
        """See :class:`ShardState`."""
        for part in self.memory.stretches(len(rows), 1):
            self.values.forget(known[part], rows[part])

    def choose(self, step: int) -> None:
        """See :class:`ShardState`."""
        self.values.choose(step)

    def copy_values(self, rows: Ints, out: Ints, *, reads: bool) -> None:
        """See :class:`ShardState`."""
        self.values.copy(rows, out, reads=reads)
        self.values.collect()

    def put_values(self, rows: Ints, values: Ints) -> None:
        """See :class:`ShardState`."""
        for part in self.memory.stretches(len(rows), 1):
            self.values.put(rows[part], values[part])
        self.values.collect()

    def load_values(
        self,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        *,
        begins: bool,
        states: Sequence[LoadedColumn] = (),
    ) -> None:
        """Writes the values of rows, int32[K], whose meta was loaded, to the file."""
        arrays, row_layout = self.memory.arrays, self.layout
        records = np.zeros((len(rows), row_layout.num_words), np.float32)
        numbers = np.arange(len(rows), dtype=np.int32)
        records.view(np.int32)[:, : layout.META_COLUMNS] = arrays.meta[rows, : layout.META_COLUMNS]
        write_columns(records, numbers, columns)
        if begins:
            shard = shard_of_records(records, arrays.tables, self.spec.dim)
            update.begin_states(shard, row_layout.kernel, numbers, row_layout.first_hyper)
        write_columns(records, numbers, states)
        self.values.load(rows, records.view(np.int32))

    def clear(self) -> None:
        """Forgets all rows."""
        self.values.clear()
        self.memory.clear()

    def freeze(self) -> None:
        """See :class:`ShardState`."""
        self.values.freeze()

    def whole(self, records: Ints, live: Ints) -> tuple[Ints, Ints]:
        """See :class:`ShardState`."""
        return self.values.whole(records[live]), np.arange(len(live), dtype=np.int32)

    def thaw(self) -> None:
        """See :class:`ShardState`."""
        self.values.thaw()

    def tier_counters(self) -> dict[str, int]:
        """Reads that each tier answered, and bytes that the file's disk read and wrote."""
        return self.values.counters()

    def tier_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes of slots, and of what is on its way to the file."""
        slots, buffers = self.values.memory, self.values.cold.memory_bytes
        return {"slots": (slots.used_bytes, slots.num_bytes), "ssd_buffers": (buffers, buffers)}

    def close(self) -> None:
        """Lets go of memory and file."""
        self.values.close()
        self.memory.close()

    def _read_keys(
        self, ids: Longs, tables: Ints, counts: Ints, now: Longs, step: int, *, forced: bool = False
    ) -> tuple[Ints, int]:
        """Finds or makes the rows of keys; those that were made begin anew, whatever had their numbers before.

        Returns:
            int32[U], where the rows are; and how many were there before.
        """
        rows, known = np.full(len(ids), layout.NO_ROW, np.int32), np.zeros(len(ids), np.int32)
        target = ReadTarget(np.empty((len(ids), 0), np.float32), None, rows, known)
        try:
            self.rows.read(ids, tables, counts, now, step, target, forced=forced)
        finally:
            self.forget(known, rows)
        return rows, int(np.count_nonzero(known >= 0))


def open_tiered_state(
    spec: GroupSpec, shard: int, num_shards: int, arena: Heap, clock: Clock, options: Tiers
) -> TieredState:
    """Lays out a shard with tiers and opens its memory and its file; errors are those of :class:`Store`.

    Raises:
        ConfigError: the directory cannot be written.
        StorageFullError: no memory, or no room on the disk, to begin with.
    """
    layout_of_rows = row_layout(spec, shard, num_shards)
    bare = without_values(layout_of_rows, tiers.ROW_WORDS)
    shape = ArenaShape(
        description=json.dumps(without_hyperparameters(layout_of_rows.description), sort_keys=True),
        num_words=bare.num_words,
        tables_bytes=8 * layout.TABLE_COLUMNS * len(spec.tables),
        cells_bytes=layout_of_rows.num_cells,
    )
    memory = ShardMemory(open_arena(arena, shape), 0, bare.num_words)
    values = TieredValues(memory, layout_of_rows, spec.dim, options)
    return TieredState(spec, layout_of_rows, memory, RowTable(memory, bare, clock), values)


def _write_addresses(out: Floats, addresses: Longs | None) -> None:
    """Rows are copied: their addresses are those in ``out``."""
    if addresses is not None:
        addresses[:] = out.ctypes.data + out.strides[0] * np.arange(len(out), dtype=np.int64)
