"""Memory for the values of some rows. Each row has a slot. Hot rows keep it for long, other rows for a few calls.

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
_BYTES_BESIDE = 4 + 8 + 4 + 1  # bytes per slot without the record


class SlotMemory:
    """The slots of one shard: ``most_hot`` slots for hot rows, and additional slots for the rows of a few calls.

    Args:
        num_words: V. num_columns: W.
        tables: counters of the shard's tables, which kernels write.

    Attributes:
        slots: for kernels that find slots.
        shard: the same records, for kernels that move rows: a slot's number is its row.
        num_calls_kept: a slot stays if one of this number of last calls used it.
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
        """The memory of slots that were ever used, with their bookkeeping."""
        used = int(np.count_nonzero(self.slots.rows[: self.num_slots] >= 0))
        return used * (self.record_bytes + _BYTES_BESIDE)

    @property
    def num_bytes(self) -> int:
        """The memory of all slots."""
        return self.num_slots * (self.record_bytes + _BYTES_BESIDE)

    def begin_call(self) -> None:
        """Starts a new call. Its slots stay for the next few calls."""
        self.state[CALL] += 1
        self.state[USED_SINCE] = self.state[CALL] - self.num_calls_kept

    def keep_longer(self) -> None:
        """Keeps slots for more calls, because an update had to bring back rows of an earlier read."""
        self.num_calls_kept = min(2 * self.num_calls_kept, _MOST_CALLS_KEPT)

    def make_room(self, count: int) -> None:
        """Makes slots for a call that finds none.

        Gives up slots of earlier calls if there are as many slots as hot rows, or else adds slots.

        Raises:
            StorageFullError: see :meth:`add`.
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
            meta: int32[·, ·], of all rows that were ever made. num_rows: the number of rows with a key; at least one.
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

    Rows in slots become hot or not at once. Other rows become hot when they next come in. If there are far more rows
    than a sample, the limiting count is taken from a sample.

    Args:
        rows, flags: int32[N], uint8[N], of slots; the flags are written. state: int64[8], see :class:`Slots`.
        meta: int32[·, ·], of all rows that were ever made. num_rows: the number of rows with a key; at least one.
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
    """Wraps records, float32[N, V], as a shard without an index. Kernels get row numbers from their caller."""
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
