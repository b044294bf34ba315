"""The values of a shard's rows.

:class:`Values` keeps the values in the rows themselves. :class:`girih.store.tiers.tiered_values.TieredValues` keeps
them in several tiers. A tier above, for example GPU memory, takes rows from these classes and gives them back by the
methods ``forget``, ``choose``, ``copy`` and ``put``.

Call methods only while the shard's arrays may change (``ShardMemory.changing``). ``peek`` and ``fetch`` are exceptions:
call them outside.

Shapes: U unique keys, K rows of a chunk, W columns of a row that training sees, V 32-bit words of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import device_slots, index, update
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.layout import Shard
from girih.store.keys import Keys, RowUpdate
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout, hyper_rows
from girih.store.rows.row_table import ReadTarget, RowTable
from girih.store.spec import Floats, GroupSpec, Ints, Longs

LoadedColumn: TypeAlias = tuple[int, NDArray[Any]]
"""A column that is loaded: its first byte in a row, and its contents, [K, width]."""


class FrozenValues:
    """The values at the moment when a snapshot began. :meth:`Values.freeze` returns this object."""

    def whole(self, records: Ints, live: Ints) -> tuple[Ints, Ints]:
        """Returns records with their values, int32[·, V], and the indices of the live records in this result.

        Args:
            records: int32[K, ·], the content of memory when the snapshot began.
            live: the indices of the requested records.
        """
        return records, live

    def thaw(self) -> None:
        """Ends the freeze when the snapshot ends. The caller holds the lock."""


class Values:
    """Values that are in the rows themselves.

    Attributes:
        spec: the tables.
        layout: the layout of whole rows, and the rules of the tables.
        memory: the arrays, on one arena.
        rows: the keys that have rows.
        in_place: True if values are in ``memory``, so that a repair finds them.
    """

    in_place = True

    def __init__(self, spec: GroupSpec, row_layout: RowLayout, memory: ShardMemory, rows: RowTable) -> None:
        self.spec, self.layout, self.memory, self.rows = spec, row_layout, memory, rows

    def read(self, keys: Keys, now: Longs, step: int, out: Floats, addresses: Longs | None) -> Ints:
        """Reads rows for training; see :meth:`Store.lookup` and :meth:`RowTable.read`."""
        return self.rows.read(keys, now, step, ReadTarget(out, addresses))

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None) -> Ints:
        """Reads rows for evaluation; see :meth:`Store.peek`."""
        return self.rows.peek(keys, out, addresses)

    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows of keys from a lower tier; see :meth:`Store.fetch`."""

    def move(self, keys: Keys, change: RowUpdate, done: int = 0) -> int:
        """Updates rows by gradients, except the first ``done`` keys; see :meth:`Store.apply_gradients`."""
        step, terms, kernel, dropped = change.step, change.terms, self.layout.kernel, 0
        rows = self.find(keys) if keys.rows is None else keys.rows
        hyper, grads = hyper_rows(self.spec, change.lr_scale, step), sealed(change.grads)
        for part in self.parts(len(rows), done):
            some = keys.cut(part)
            shard, places = self.reach(some, rows[part], step)
            cut, summed = None, grads[part]
            if terms is not None:
                cut, summed = terms._replace(starts=terms.starts[part.start : part.stop + 1]), grads
            dropped += update.apply_gradients(
                shard, kernel, some.ids, some.tables, places, summed, hyper, step, cut, part.start
            )
        return dropped

    def assign(self, keys: Keys, values: Floats, now: Longs, step: int) -> Ints:
        """Sets rows; see :meth:`Store.assign`. Returns their numbers, int32[U], or -1 if a table is full."""
        rows = self.make(keys, now, step)
        for part in self.parts(len(rows)):
            shard, places = self.reach(keys.cut(part), rows[part], step)
            update.assign(shard, self.layout.kernel, places, values[part], self.layout.first_hyper, step)
        return rows

    def find(self, keys: Keys) -> Ints:
        """Returns the row number of each key, int32[U], or -1 if the key has no row."""
        rows = np.empty(len(keys.ids), np.int32)
        index.find_all(self.memory.arrays, keys.ids, keys.tables, rows)
        return rows

    def make(self, keys: Keys, now: Longs, step: int) -> Ints:
        """Finds the rows of keys. Makes missing rows, without an admission check."""
        out = np.empty((len(keys.ids), self.spec.dim), np.float32)
        return self.rows.read(keys, now, step, ReadTarget(out), forced=True)

    def parts(self, num_keys: int, first: int = 0) -> Iterable[slice]:
        """Splits the keys of a verb, starting at ``first``, into parts that are processed together."""
        return self.memory.stretches(num_keys, 1, first)

    def reach(self, keys: Keys, rows: Ints, step: int) -> tuple[Shard, Ints]:
        """Returns the arrays that kernels change at ``step`` for the keys of one part, and a hint for each key.

        The hints, int32[U], are row numbers in these arrays. Kernels check them.
        """
        return self.memory.arrays, rows

    def forget(self, known: Ints, rows: Ints) -> None:
        """Drops the values that earlier keys left under the numbers of new rows.

        Called after new rows were made. ``known`` is -1 for keys with a new row.
        """

    def choose(self, step: int) -> None:
        """Chooses the rows whose values stay in memory, if the interval between two choices has passed."""

    def copy(self, rows: Ints, out: Ints, *, reads: bool) -> None:
        """Copies rows, int32[K], without their meta.

        Args:
            out: int32[K, V - 8], output. reads: True if training reads these rows, for counters.
        """
        device_slots.copy_values(self.memory.arrays, rows, out)

    def put(self, rows: Ints, values: Ints) -> None:
        """Writes ``values``, int32[K, V - 8], to rows, int32[K], that have keys. Does not change their meta."""
        for part in self.memory.stretches(len(rows), 1):
            device_slots.put_values(self.memory.arrays, rows[part], values[part])

    def load(
        self,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        *,
        begins: bool,
        states: Sequence[LoadedColumn] = (),
    ) -> None:
        """Writes the values of rows, int32[K]. The meta of these rows is loaded already.

        Args:
            begins: True starts the optimizer state from its initial values. False loads the optimizer state too.
            states: columns of optimizer state that are loaded even if ``begins``.
        """
        self._fill(self.memory.arrays, rows, columns, states, begins=begins)

    def clear(self) -> None:
        """Removes all rows."""
        self.memory.clear()

    def freeze(self) -> FrozenValues:
        """Preserves the current values for a snapshot. The caller holds the lock."""
        return FrozenValues()

    def counters(self) -> dict[str, int]:
        """Returns counts of the reads and writes of each tier, or an empty dict with a single tier."""
        return {}

    def tier_bytes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes, used and reserved, of each part of the tiers' memory, or an empty dict."""
        return {}

    def close(self) -> None:
        """Releases memory."""
        self.memory.close()

    def _fill(
        self,
        shard: Shard,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        states: Sequence[LoadedColumn],
        *,
        begins: bool,
    ) -> None:
        _write_columns(shard.values, rows, columns)
        if begins:
            update.begin_states(shard, self.layout.kernel, rows, self.layout.first_hyper)
        _write_columns(shard.values, rows, states)


def _write_columns(values: Floats, rows: Ints, columns: Sequence[LoadedColumn]) -> None:
    """Writes columns to rows of ``values``, float32[·, V]."""
    for first_byte, column in columns:
        words = values.view(column.dtype)
        first = first_byte // column.itemsize
        words[rows, first : first + column.shape[1]] = column
