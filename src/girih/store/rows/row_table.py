"""The keys that have rows. Keys get rows when training reads them, and lose rows by expiry or eviction.

Shapes: U unique keys, W columns of a row that training sees, T tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import layout, lookup, recency, update
from girih.store.clock import EPOCH_S, Clock
from girih.store.keys import Keys
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout
from girih.store.spec import Floats, Ints, Longs

LFU_SHARE = 16
# The number of records per key that a save must have room for. A drop changes a row and its neighbours. A read also
# changes the newest row and the new row, or the Bloom cells of a key.
_RECORDS_PER_DROP, _RECORDS_PER_READ = 3, 8
_UNBOUNDED = 1 << 31


def moments(rules: NDArray[np.int64], step: int, clock: Clock) -> Longs:
    """Returns the current time of each table, int64[T]: the step, or the second if the table counts seconds.

    See :class:`girih.kernels.cpu.layout.Layout`.
    """
    now = np.full(len(rules), step, np.int64)
    in_seconds = rules[:, layout.IN_SECONDS] != 0
    if in_seconds.any():
        now[in_seconds] = int(clock()) - EPOCH_S
    return now


class ReadTarget(NamedTuple):
    """Memory that a read writes.

    Attributes:
        out: float32[U, W]. If addresses are requested, rows that are in the shard are not copied to ``out``.
        addresses: int64[U]: see :meth:`Store.lookup`.
        rows: int32[U], the result, incomplete if an error is raised. None allocates new memory.
        known: int32[U]: the row numbers before the read made new rows.
    """

    out: Floats
    addresses: Longs | None = None
    rows: Ints | None = None
    known: Ints | None = None


class MadeRows(NamedTuple):
    """The rows of keys that :meth:`RowTable.make` found or made.

    Attributes:
        rows: int32[U], -1 for keys without a row. known: int32[U], the rows that existed before.
        full: the error that ended the call. All keys before this point were served.
    """

    rows: Ints
    known: Ints
    full: BaseException | None


class RowTable:
    """The rows of a shard's keys. :class:`Store` checks the arguments.

    Args:
        clock: returns seconds since 1970, for tables whose rows expire after some seconds.
    """

    def __init__(self, memory: ShardMemory, row_layout: RowLayout, clock: Clock) -> None:
        self._memory, self._kernel, self._first_hyper = memory, row_layout.kernel, row_layout.first_hyper
        self._clock = clock
        self._rules = row_layout.kernel.rules
        self._any_expire = bool((row_layout.kernel.rules[:, layout.EVICTION] == layout.EVICT_TTL).any())
        self._tags: Ints = np.empty(0, np.int32)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the memory that is kept between calls."""
        return self._tags.nbytes

    def now(self, step: int) -> Longs:
        """Returns the current time of each table, int64[T]: the step, or the second if the table counts seconds."""
        return moments(self._rules, step, self._clock)

    def read(self, keys: Keys, now: Longs, step: int, target: ReadTarget, *, forced: bool = False) -> Ints:
        """Marks rows as used. Makes rows for new keys that are admitted, or for all new keys if ``forced``.

        Args:
            now: int64[T], see :meth:`now`.

        Returns:
            int32[U]: the row number of each key, or -1 if the key has no row.

        Raises:
            StorageFullError: there is no memory for more rows. All keys before this point were served.
        """
        memory, kernel = self._memory, self._kernel
        ids, tables, counts, _ = keys
        out, addresses, rows, known = target
        rows = np.empty(len(ids), np.int32) if rows is None else rows
        touched = np.zeros(len(now), np.int64)
        stuck = np.zeros(len(now), np.uint8)
        tags = self._scratch(len(ids))
        in_place = addresses is not None
        if addresses is None:
            addresses = np.empty(len(ids), np.int64)
        num_rows = int(memory.arrays.state[layout.NUM_ROWS])
        for part in memory.stretches(len(ids), _RECORDS_PER_READ):
            lookup.read_known(
                memory.arrays, kernel, ids[part], tables[part], counts[part], now, tags, touched, in_place, rows[part],
                out[part], addresses[part],
            )  # fmt: skip
        if known is not None:
            known[:] = rows
        for part in memory.stretches(len(ids), _RECORDS_PER_READ):
            of_part = ids[part], tables[part], counts[part]
            written = rows[part], out[part], addresses[part]
            start, need = 0, lookup.NEED_ROWS
            while need != lookup.DONE:
                start, need = lookup.read_new(
                    memory.arrays, kernel, *of_part, now, step, start, forced, touched, stuck, self._first_hyper,
                    in_place, *written,
                )  # fmt: skip
                if need == lookup.NEED_ROWS:
                    memory.grow_rows()
                elif need == lookup.NEED_INDEX:
                    memory.grow_index()
                elif need == lookup.NEED_LFU:
                    table = int(of_part[1][start])
                    wanted = max(1, int(kernel.rules[table, layout.MAX_ROWS]) // LFU_SHARE)
                    stuck[table] = self.evict_least_used(table, step, wanted) == 0
                    memory.make_room(_RECORDS_PER_READ * (len(of_part[0]) - start))
        if memory.arrays.state[layout.NUM_ROWS] == num_rows:
            memory.grow_on(len(ids))
        memory.give_back()
        return rows

    def make(self, keys: Keys, now: Longs, step: int, *, forced: bool = False) -> MadeRows:
        """Finds or makes rows like :meth:`read`, without values. Stores with several tiers use this method."""
        num_keys = len(keys.ids)
        full: BaseException | None = None
        rows, known = np.full(num_keys, layout.NO_ROW, np.int32), np.zeros(num_keys, np.int32)
        target = ReadTarget(np.empty((num_keys, 0), np.float32), None, rows, known)
        try:
            self.read(keys, now, step, target, forced=forced)
        except BaseException as error:  # the new rows must first forget the values of earlier keys
            full = error
        return MadeRows(rows, known, full)

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation and changes nothing; see :meth:`read`."""
        ids, tables = keys.ids, keys.tables
        rows = np.empty(len(ids), np.int32)
        tags = self._scratch(len(ids))
        in_place = addresses is not None
        if addresses is None:
            addresses = np.empty(len(ids), np.int64)
        lookup.peek(self._memory.arrays, self._kernel, ids, tables, tags, in_place, rows, out, addresses)
        return rows

    def expire(self, step: int) -> Longs:
        """Removes rows that were not used for too long. Returns the current times of the tables; see :meth:`now`."""
        now = moments(self._rules, step, self._clock)
        for part in self._memory.stretches(_UNBOUNDED, _RECORDS_PER_DROP) if self._any_expire else ():
            most = part.stop - part.start
            if lookup.expire(self._memory.arrays, self._kernel, now, most) < most:
                break
        return now

    def drop(self, rows: Ints) -> int:
        """Removes rows and returns their number. Each row occurs once, and -1 stands for no row."""
        dropped = 0
        for part in self._memory.stretches(len(rows), _RECORDS_PER_DROP):
            dropped += update.drop_rows(self._memory.arrays, self._kernel, rows[part])
        return dropped

    def oldest_first(self, table: int) -> Ints:
        """Returns the rows of a table that keeps a list, oldest first."""
        arrays = self._memory.arrays
        rows = np.empty(int(arrays.tables[table, layout.TABLE_ROWS]), np.int32)
        recency.oldest_first(arrays.meta, arrays.tables, table, rows)
        return rows

    def evict_least_used(self, table: int, step: int, wanted: int) -> int:
        """Removes up to ``wanted`` rows with the lowest counts, and returns their number.

        Among equal counts, the row with the earlier last use leaves first. Rows used at ``step`` stay.
        """
        rows = self.oldest_first(table)
        meta = self._memory.arrays.meta
        counts, last_used = meta[rows, layout.COUNT], meta[rows, layout.LAST_USED]
        may_leave = np.flatnonzero(last_used < step)
        order = np.lexsort((last_used[may_leave], counts[may_leave]))[:wanted]
        return self.drop(rows[may_leave[order]])

    def _scratch(self, num_keys: int) -> Ints:
        if len(self._tags) < num_keys:
            self._tags = np.empty(num_keys, np.int32)
        return self._tags
