"""Memory for the values of some rows. Each of these rows has a slot: hot rows for long, other rows for a few calls.

Shapes: N slots, W columns of a row that training sees, V 32-bit words of a record.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import StorageFullError
from girih.kernels.cpu import layout, tiers
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.tiers import (
    CALL,
    HAND,
    HOT,
    LEAST_COUNT,
    MOST_HOT,
    NUM_HOT,
    NUM_SLOTS,
    USED_SINCE,
    Slots,
)
from girih.store.memory import mapping
from girih.store.memory.shard_memory import NO_NOTES, NO_SAVE
from girih.store.spec import Bytes, Floats, Ints, Longs

_FIRST_STAGED = 1 << 10
_CALLS_KEPT = 3  # a read, the fetch for the next read, and the update
_MOST_CALLS_KEPT = 1 << 8
_MOST_STAGED = 1 << 15  # the limit if fewer rows are hot
_MOST_SLOTS = (1 << 31) - 2
NEVER = 1 << 31  # a count that no row has
_SAMPLE = 1 << 20
_BYTES_BESIDE = 4 + 8 + 4 + 1  # bytes of a slot besides the record


class SlotMemory:
    """The slots of one shard: ``most_hot`` slots for hot rows, and additional slots for the rows of a few calls.

    Args:
        num_words: the 32-bit words of a record, V. num_columns: the columns of a row that training sees, W.
        tables: counters of the shard's tables, which kernels update.

    Attributes:
        slots: the arrays for kernels that find slots.
        shard: the same records, for kernels that update rows. These kernels get slot numbers as row numbers.
        num_calls_kept: the number of calls for which a slot stays after its last use.
    """

    def __init__(self, most_hot: int, num_words: int, num_columns: int, tables: Longs) -> None:
        self.most_hot, self.record_bytes = most_hot, 4 * num_words
        self.num_calls_kept = _CALLS_KEPT
        room = mapping.room_bytes(None) // (self.record_bytes + _BYTES_BESIDE)
        self._reserved = min(max(room, 2 * most_hot, 4 * _FIRST_STAGED), _MOST_SLOTS)
        values = self._reserve(np.float32, num_words)
        self.slots = Slots(
            records=values.view(np.int32),
            rows=self._reserve(np.int32),
            places=self._reserve(np.int64),
            calls=self._reserve(np.int32),
            flags=self._reserve(np.uint8),
            state=np.zeros(tiers.STATE_WORDS, np.int64),
        )
        self.shard = shard_of_records(values, tables, num_columns)
        self.state[MOST_HOT], self.state[LEAST_COUNT] = most_hot, NEVER
        self.add(most_hot + _FIRST_STAGED)

    @property
    def state(self) -> Longs:
        """Numbers that kernels share."""
        return self.slots.state

    @property
    def num_slots(self) -> int:
        """The number of slots, N."""
        return int(self.state[NUM_SLOTS])

    @property
    def used_bytes(self) -> int:
        """The memory of all slots that were ever used, with their bookkeeping, in bytes."""
        used = int(np.count_nonzero(self.slots.rows[: self.num_slots] >= 0))
        return used * (self.record_bytes + _BYTES_BESIDE)

    @property
    def num_bytes(self) -> int:
        """The memory of all slots, in bytes."""
        return self.num_slots * (self.record_bytes + _BYTES_BESIDE)

    def begin_call(self) -> None:
        """Starts a new call. Its slots stay for the next few calls."""
        self.state[CALL] += 1
        self.state[USED_SINCE] = self.state[CALL] - self.num_calls_kept

    def keep_longer(self) -> None:
        """Doubles the number of calls for which slots stay.

        Called after an update that had to read rows of an earlier read again, because their slots had been reused.
        """
        self.num_calls_kept = min(2 * self.num_calls_kept, _MOST_CALLS_KEPT)

    def make_room(self, count: int) -> None:
        """Makes ``count`` slots available to a call that finds no free slot.

        If the additional slots would outnumber the slots for hot rows, slots of earlier calls are given up. Otherwise
        slots are added.

        Raises:
            StorageFullError: the reserved address space is full.
        """
        staged = self.num_slots - self.most_hot
        if staged + count > max(self.most_hot, _MOST_STAGED) and self.state[USED_SINCE] < self.state[CALL]:
            self.num_calls_kept //= 2
            self.state[USED_SINCE] = self.state[CALL] - self.num_calls_kept
        else:
            self.add(count)

    def add(self, count: int) -> None:
        """Makes at least ``count`` more slots for rows that are not hot.

        Raises:
            StorageFullError: the reserved address space is full.
        """
        first = self.num_slots
        last = min(first + max(count, (first - self.most_hot) // 2), self._reserved)
        if last < first + count:
            raise StorageFullError(
                f"memory for {first + count:,} rows of {self.record_bytes:,} bytes in the dram tier: this machine has"
                " no more; lower store.hot_rows, or data.batch_size"
            )
        self.slots.rows[first:last] = layout.NO_ROW
        self.state[NUM_SLOTS], self.state[HAND] = last, first

    def choose(self, meta: Ints, num_rows: int) -> None:
        """Chooses the hot rows again: the rows with the highest counts (PICASSO Alg. 1, line 24).

        Args:
            meta: int32[·, ·], of all rows that were ever made. num_rows: the number of rows with a key, at least 1.
        """
        count = self.num_slots
        choose_hot(self.slots.rows[:count], self.slots.flags[:count], self.state, meta, num_rows)

    def clear(self) -> None:
        """Empties all slots."""
        count = self.num_slots
        self.slots.rows[:count] = layout.NO_ROW
        self.slots.places[:count] = 0
        self.slots.flags[:count] = 0
        self.state[[NUM_HOT, HAND]], self.state[LEAST_COUNT] = 0, NEVER

    def _reserve(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """Reserves memory for the maximum number of slots. It is filled at the first access."""
        width = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        while True:
            try:
                memory = mapping.map_memory(None, max(1, self._reserved * width))
                break
            except (OSError, OverflowError, ValueError) as error:
                if self._reserved <= 2 * (self.most_hot + _FIRST_STAGED):
                    raise StorageFullError(
                        f"the system does not reserve {self._reserved * width:,} bytes for the dram tier ({error});"
                        " lower store.hot_rows"
                    ) from None
                self._reserved //= 2
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        array: NDArray[Any] = np.frombuffer(memory, dtype, self._reserved * width // np.dtype(dtype).itemsize)
        return array.reshape(-1, *shape)


def choose_hot(rows: Ints, flags: Bytes, state: Longs, meta: Ints, num_rows: int) -> None:
    """Chooses the hot rows again: the rows with the highest counts.

    Rows in slots become hot or cold immediately. Other rows become hot when they are next read into a slot. If there
    are many rows, the lowest count of a hot row is estimated from a sample.

    Args:
        rows, flags: int32[N], uint8[N], the row and the flags of each slot. The flags are changed.
        state: int64[8], see :class:`Slots`.
        meta: int32[·, ·], of all rows that were ever made. num_rows: the number of rows with a key, at least 1.
    """
    most_hot = int(state[MOST_HOT])
    stride = -(-len(meta) // _SAMPLE)
    sample = meta[::stride]
    counts = sample[:, layout.COUNT][sample[:, layout.TABLE] >= 0]
    if num_rows <= most_hot:
        above, ties = 0, 0
    else:
        last = len(counts) - 1 - int(most_hot / num_rows * len(counts))
        above = int(np.partition(counts, last)[last])
        ties = max(0, most_hot - int(np.count_nonzero(counts > above) / len(counts) * num_rows))
    held = np.maximum(rows, 0)
    lives = (rows >= 0) & (meta[held, layout.TABLE] >= 0)
    in_slots = meta[held, layout.COUNT]
    hot = np.flatnonzero(lives & (in_slots > above))[:most_hot]
    tied = np.flatnonzero(lives & (in_slots == above))[: min(ties, most_hot - len(hot))]
    flags &= ~HOT & 0xFF
    flags[hot] |= HOT
    flags[tied] |= HOT
    state[NUM_HOT], state[LEAST_COUNT] = len(hot) + len(tied), above + 1


def shard_of_records(values: Floats, tables: Longs, num_columns: int) -> Shard:
    """Wraps records, float32[N, V], as a shard without an index. Callers of kernels must give them row numbers."""
    state = np.zeros(layout.STATE_WORDS, np.int64)
    state[layout.ROWS_EVER] = len(values)
    state[layout.INDEX_SHIFT] = layout.TAG_BITS - 4
    return Shard(
        slots=np.zeros(16, np.int64),
        next_slots=np.zeros(0, np.int64),
        meta=values.view(np.int32),
        keys=values.view(np.int64),
        values=values,
        halves=values.view(np.uint16),
        state=state,
        tables=tables,
        cells=np.zeros(0, np.uint8),
        scratch=np.zeros((2, num_columns), np.float32),
        scratch_halves=np.zeros(num_columns, np.uint16),
        **NO_SAVE,
        **NO_NOTES,
    )
