"""The host's account of slots in GPU memory: which rows they hold, which are hot, which are free.

Shapes: R rows, N slots, U keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from girih.errors import StorageFullError
from girih.kernels.cpu import device_slots, layout, tiers
from girih.kernels.cpu.device_slots import NUM_FREE, NUM_LEFT, DeviceSlots, EvictedSlots
from girih.kernels.cpu.tiers import CALL, HAND, LEAST_COUNT, MISSING, MOST_HOT, NUM_HOT, NUM_SLOTS, USED_SINCE
from girih.store.memory import mapping
from girih.store.memory.shard_memory import ShardMemory
from girih.store.spec import Ints
from girih.store.tiers.slot_memory import NEVER, choose_hot

_FIRST_STAGED = 1 << 10


class SlotTable:
    """Slots for ``most_hot`` hot rows, and as many more as the rows of two batches take.

    Args:
        memory: of the shard whose rows they hold.
        claim: has memory for so many slots ready, or raises StorageFullError.

    Attributes:
        slots: for kernels.
    """

    def __init__(self, memory: ShardMemory, most_hot: int, claim: Callable[[int], None]) -> None:
        self._memory, self._claim = memory, claim
        self._most_hot = most_hot
        mapped = mapping.map_memory(None, 4 * max(1, memory.arena.reserve_rows))
        none = np.empty(0, np.int32)
        self.slots = DeviceSlots(
            slot_of=np.frombuffer(mapped, np.int32),
            rows=none,
            calls=none,
            flags=np.empty(0, np.uint8),
            free=none,
            state=np.zeros(tiers.STATE_WORDS, np.int64),
        )
        self.slots.state[MOST_HOT], self.slots.state[LEAST_COUNT] = most_hot, NEVER
        self._read_call = 0

    @property
    def num_slots(self) -> int:
        """N."""
        return int(self.slots.state[NUM_SLOTS])

    @property
    def num_used(self) -> int:
        """Slots that hold a row."""
        return self.num_slots - int(self.slots.state[NUM_FREE])

    def begin_verb(self) -> None:
        """Counts a call: slots that it does not use itself may be emptied for it."""
        state = self.slots.state
        state[CALL] += 1
        state[USED_SINCE] = self._read_call = int(state[CALL])

    def begin_fetch(self) -> None:
        """Counts a call that works ahead: what the last verb used stays."""
        self.slots.state[CALL] += 1
        self.slots.state[USED_SINCE] = self._read_call

    def find(self, rows: Ints, known: Ints, row_slots: Ints, *, reads: bool) -> tuple[int, int]:
        """See :func:`girih.kernels.cpu.device_slots.find`."""
        num_missing, num_cold = device_slots.find(self.slots, rows, known, reads, row_slots)
        return int(num_missing), int(num_cold)

    def take(self, rows: Ints, row_slots: Ints, missing: int, spare: int = 0) -> tuple[Ints, Ints]:
        """Gives slots to rows that miss one, and has ``spare`` more free.

        Args:
            row_slots: int32[U], written where it is ``MISSING``, of which there are so many.

        Returns:
            The slots and rows that leave for them and that only the GPU has, both int32[K]. They are to be sent home before
            anything is written to a slot.

        Raises:
            StorageFullError: there is no memory for more slots; as many rows have one as there was room for.
        """
        wanted = missing + spare
        leaving = EvictedSlots(
            slots=np.empty(self.num_used, np.int32),
            rows=np.empty(self.num_used, np.int32),
            ends=np.zeros(1, np.int64),
        )
        self._leaving = leaving
        floor = self._most_hot + _FIRST_STAGED - self.num_slots
        if floor > 0 and wanted > self.slots.state[NUM_FREE]:
            with contextlib.suppress(StorageFullError):  # others leave instead
                self.add(min(floor, wanted - int(self.slots.state[NUM_FREE])))
        start = 0
        while missing:
            start = int(device_slots.take(self._memory.arrays, self.slots, rows, start, row_slots, leaving))
            if start == len(rows):
                break
            self.add(max(1, int(np.count_nonzero(row_slots[start:] == MISSING)) + spare))
        if spare and (lacking := device_slots.free_some(self._memory.arrays, self.slots, spare, leaving)):
            self.add(int(lacking))
        return self.left()

    def left(self) -> tuple[Ints, Ints]:
        """The slots and rows that the last :meth:`take` had leave, as far as it came."""
        count = int(self._leaving.ends[NUM_LEFT])
        return self._leaving.slots[:count], self._leaving.rows[:count]

    def add(self, count: int) -> None:
        """Makes so many slots more.

        Raises:
            StorageFullError: there is no memory for them.
        """
        first, last = self.num_slots, self.num_slots + count
        self._claim(last)
        slots, state = self.slots, self.slots.state
        if last > len(slots.rows):
            capacity = max(last, 2 * len(slots.rows))
            larger = {}
            for name in ("rows", "calls", "flags", "free"):
                before = getattr(slots, name)
                larger[name] = np.zeros(capacity, before.dtype)
                larger[name][: len(before)] = before
            self.slots = slots = slots._replace(**larger)
        slots.rows[first:last] = layout.NO_ROW
        num_free = int(state[NUM_FREE])
        slots.free[num_free : num_free + count] = np.arange(last - 1, first - 1, -1)
        state[NUM_SLOTS], state[NUM_FREE] = last, num_free + count

    def choose(self, num_rows: int) -> None:
        """Chooses the hot rows anew; there is at least one row."""
        arrays, count = self._memory.arrays, self.num_slots
        meta = arrays.meta[: arrays.state[layout.ROWS_EVER]]
        choose_hot(self.slots.rows[:count], self.slots.flags[:count], self.slots.state, meta, num_rows)

    def clear(self) -> None:
        """Empties all slots."""
        slots, state, count = self.slots, self.slots.state, self.num_slots
        rows = slots.rows[:count]
        slots.slot_of[rows[rows >= 0]] = 0
        rows[:], slots.flags[:count], slots.calls[:count] = layout.NO_ROW, 0, 0
        slots.free[:count] = np.arange(count - 1, -1, -1)
        state[[NUM_HOT, HAND]], state[NUM_FREE], state[LEAST_COUNT] = 0, count, NEVER
