"""Which keys have rows: they come when they are read for training, and go when they expire or are evicted.

Shapes: U unique keys, W columns of a row that training sees, T tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import layout as at
from girih.kernels.cpu import lookup, recency, update
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout

_LFU_SHARE = 16
# What a save must have room to keep: a row and its neighbours; besides, the newest row and one to be taken, or
# the Bloom cells of a key.
_RECORDS_OF_A_DROP, _RECORDS_OF_A_READ = 3, 8
_AT_ONCE = 1 << 31


class RowTable:
    """The rows of a store's keys; arguments are checked by :class:`Store`.

    Args:
        first_hyper: hyperparameters with which the state of a new row begins.
    """

    def __init__(self, space: ShardMemory, layout: RowLayout, first_hyper: NDArray[np.float64]) -> None:
        self._space, self._layout, self._first_hyper = space, layout, first_hyper
        self._tags: NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def scratch_bytes(self) -> int:
        """Memory kept from call to call."""
        return self._tags.nbytes

    def read(
        self,
        ids: NDArray[np.int64],
        tables: NDArray[np.int32],
        counts: NDArray[np.int32],
        now: NDArray[np.int64],
        step: int,
        out: NDArray[np.float32],
        *,
        forced: bool,
    ) -> NDArray[np.int32]:
        """Marks rows as used, makes rows for new keys that are admitted, or for all if ``forced``.

        Args:
            counts: int32[U], or none where all occur once.
            now: int64[T], the step or the second of each table.
            out: float32[U, W], written.

        Returns:
            int32[U]: where the rows are, -1 for none.

        Raises:
            StorageFullError: no memory for more rows; the keys before were served.
        """
        kernel, out_bits = self._layout.kernel, out.view(np.uint32)
        rows = np.empty(len(ids), np.int32)
        touched = np.zeros(len(now), np.int64)
        stuck = np.zeros(len(now), np.uint8)
        tags = self._scratch(len(ids))
        num_rows = int(self._space.arrays.state[at.NUM_ROWS])
        for part in self._space.stretches(len(ids), _RECORDS_OF_A_READ):
            lookup.read_known(
                self._space.arrays, kernel, ids[part], tables[part], counts[part], now, tags, touched, rows[part],
                out[part], out_bits[part],
            )  # fmt: skip
        for part in self._space.stretches(len(ids), _RECORDS_OF_A_READ):
            self._read_new(
                ids[part],
                tables[part],
                counts[part],
                now,
                step,
                forced,
                touched,
                stuck,
                rows[part],
                out[part],
            )
        if self._space.arrays.state[at.NUM_ROWS] == num_rows:
            self._space.grow_on(len(ids))
        self._space.give_back()
        return rows

    def peek(
        self, ids: NDArray[np.int64], tables: NDArray[np.int32], out: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """As :meth:`read`, but changes nothing."""
        rows = np.empty(len(ids), np.int32)
        tags = self._scratch(len(ids))
        lookup.peek(
            self._space.arrays, self._layout.kernel, ids, tables, tags, rows, out, out.view(np.uint32)
        )
        return rows

    def expire(self, now: NDArray[np.int64]) -> None:
        """Removes rows that were not used for long enough."""
        for part in self._space.stretches(_AT_ONCE, _RECORDS_OF_A_DROP):
            most = part.stop - part.start
            if lookup.expire(self._space.arrays, self._layout.kernel, now, most) < most:
                return

    def drop(self, rows: NDArray[np.int32]) -> int:
        """Removes rows, each named once, none where -1; returns how many there were."""
        dropped = 0
        for part in self._space.stretches(len(rows), _RECORDS_OF_A_DROP):
            dropped += update.drop_rows(self._space.arrays, self._layout.kernel, rows[part])
        return dropped

    def evict_least_used(self, table: int, step: int, wanted: int) -> int:
        """Removes the least counted rows, ties by last use, none used at ``step``; returns how many."""
        arrays = self._space.arrays
        rows = np.empty(int(arrays.tables[table, at.TABLE_ROWS]), np.int32)
        counts, last_used = np.empty_like(rows), np.empty_like(rows)
        recency.oldest_first(arrays.meta, arrays.tables, table, rows)
        update.usage(arrays.meta, rows, counts, last_used)
        may_leave = np.flatnonzero(last_used < step)
        order = np.lexsort((last_used[may_leave], counts[may_leave]))[:wanted]
        return self.drop(rows[may_leave[order]])

    # Inside.

    def _read_new(
        self,
        ids: NDArray[np.int64],
        tables: NDArray[np.int32],
        counts: NDArray[np.int32],
        now: NDArray[np.int64],
        step: int,
        forced: bool,
        touched: NDArray[np.int64],
        stuck: NDArray[np.uint8],
        rows: NDArray[np.int32],
        out: NDArray[np.float32],
    ) -> None:
        start, need = 0, lookup.NEED_ROWS
        while need != lookup.DONE:
            start, need = lookup.read_new(
                self._space.arrays,
                self._layout.kernel,
                ids,
                tables,
                counts,
                now,
                step,
                start,
                forced,
                touched,
                stuck,
                self._first_hyper,
                rows,
                out,
                out.view(np.uint32),
            )
            if need == lookup.NEED_ROWS:
                self._space.grow_rows()
            elif need == lookup.NEED_INDEX:
                self._space.grow_index()
            elif need == lookup.NEED_LFU:
                table = int(tables[start])
                wanted = max(1, int(self._layout.kernel.rules[table, at.MAX_ROWS]) // _LFU_SHARE)
                stuck[table] = self.evict_least_used(table, step, wanted) == 0
                self._space.make_room(_RECORDS_OF_A_READ * (len(ids) - start))

    def _scratch(self, num_keys: int) -> NDArray[np.int32]:
        if len(self._tags) < num_keys:
            self._tags = np.empty(num_keys, np.int32)
        return self._tags
