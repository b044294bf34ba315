"""Values of a shard's rows in slots of GPU memory, and their transfer from and to the host.

If a batch needs a row's values, the values are copied into a slot. They stay in the slot while the row is hot, or until
other rows need the slot. Other rows get the slot of a cold row at the earliest when the batch after the next is
prepared. Before a slot is reused, changed values are sent home, which means that they are copied to the host.

The calling thread reads and writes values on the host. A running step never does. The values of a row are valid in
exactly one place. If they are in a slot, kernels read and change them in the order of their stream. Otherwise they are
on the host.

Shapes: R rows, N slots, U keys, K rows in transit, V 32-bit words of a record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.errors import StorageFullError
from girih.kernels.cpu import device_slots, layout, tiers
from girih.kernels.cpu.device_slots import NUM_FREE, NUM_LEFT, DeviceSlots, EvictedSlots
from girih.kernels.cpu.tiers import (
    CALL,
    CHANGED,
    FETCHED,
    HAND,
    LEAST_COUNT,
    MISSING,
    MOST_HOT,
    NUM_HOT,
    NUM_SLOTS,
    USED_SINCE,
)
from girih.kernels.gpu import jit
from girih.store.gpu.gpu_memory import RecordChunks, to_device
from girih.store.gpu.options import GpuTier
from girih.store.memory import mapping
from girih.store.memory.shard_memory import ShardMemory
from girih.store.spec import Ints
from girih.store.tiers.slot_memory import NEVER, choose_hot
from girih.store.values import Values

_FIRST_STAGED = 1 << 10
_MOST_AT_ONCE = 1 << 18  # rows per transfer when all rows go home


class SlotTable:
    """Slots for ``most_hot`` hot rows, and additional slots for the rows of two batches.

    Args:
        memory: the memory of the shard that owns the rows.
        claim: claims memory for a number of slots, or raises StorageFullError.

    Attributes:
        slots: the arrays of the slots, for kernels.
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
        """The number of slots, N."""
        return int(self.slots.state[NUM_SLOTS])

    @property
    def num_used(self) -> int:
        """The number of slots that hold a row."""
        return self.num_slots - int(self.slots.state[NUM_FREE])

    def begin_verb(self) -> None:
        """Starts a new call. Slots that this call does not use may be emptied for it."""
        state = self.slots.state
        state[CALL] += 1
        state[USED_SINCE] = self._read_call = int(state[CALL])

    def begin_fetch(self) -> None:
        """Starts a call that fetches rows for the next verb. Slots that the last verb used stay."""
        self.slots.state[CALL] += 1
        self.slots.state[USED_SINCE] = self._read_call

    def take(self, rows: Ints, row_slots: Ints, missing: int, spare: int = 0) -> tuple[Ints, Ints]:
        """Gives a slot to each row that has none, and frees ``spare`` more slots.

        Args:
            row_slots: int32[U]. This call replaces the ``missing`` entries that equal ``MISSING`` by slots.

        Returns:
            The slots that were taken from other rows, and these rows, both int32[K]. Only rows whose newest values are
            only on the GPU are included. Send the values home before any write to a slot.

        Raises:
            StorageFullError: there is no memory for more slots. Some rows may have got a slot.
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
            with contextlib.suppress(StorageFullError):  # other rows leave their slots instead
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
        """Returns the slots that the last :meth:`take` took from rows, and these rows, even if the call failed."""
        count = int(self._leaving.ends[NUM_LEFT])
        return self._leaving.slots[:count], self._leaving.rows[:count]

    def add(self, count: int) -> None:
        """Makes ``count`` more slots.

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
        """Chooses the hot rows again. Call it only if there is at least one row."""
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


class GpuSlots:
    """The values that are in GPU memory.

    Call methods only while the host's arrays may change (``ShardMemory.changing``). Kernels run on the current
    stream. :meth:`fetch` uses another stream than the verbs.

    Args:
        host: the rows, and the values that are not in a slot.

    Attributes:
        records: the slots' memory.
        table: the rows that the slots hold.
        num_reads: the number of existing rows that training has read. ``num_cold`` of them came from the host.
        num_peeks: the number of keys that groups have peeked at. ``num_absent`` of them had no row.
    """

    def __init__(self, host: Values, options: GpuTier) -> None:
        self._host, self._options = host, options
        num_words = host.layout.num_words
        self._num_words = num_words - layout.META_COLUMNS
        self.records = RecordChunks(num_words, options.chunk_bytes, None, jit.device(options.device))
        self.table = SlotTable(host.memory, options.hot_rows, self._claim)
        self.num_reads, self.num_cold = 0, 0
        self.num_peeks, self.num_absent = 0, 0
        self._chosen_at: int | None = None
        on_gpu = self.records.device.type == "cuda"
        self._free = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._fetched = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._record(self._free)

    def bring(self, rows: Ints, known: Ints | None = None, *, reads: bool = False) -> tuple[Ints, Ints]:
        """Copies the values of a verb's rows into slots.

        Args:
            rows: int32[U], -1 for keys without a row.
            known: int32[U], -1 for rows that were just made, whose values are not written yet. None means that no row
                was made.
            reads: True if training reads the rows, for counters.

        Returns:
            The slot of each row, int32[U], or -1 for -1. And int32[U]: 1 if the caller must write the row's values.

        Raises:
            StorageFullError: there is no memory for all rows together. Rows that were just made are removed.
        """
        self._wait(self._fetched)
        self.table.begin_verb()
        known = rows if known is None else known
        row_slots = np.empty(len(rows), np.int32)
        missing, num_cold = device_slots.find(self.table.slots, rows, known, reads, row_slots)
        if reads:
            self.num_reads += int(np.count_nonzero(known >= 0))
            self.num_cold += num_cold
        made = (known < 0) & (rows >= 0)
        if missing:
            lost = row_slots == MISSING
            try:
                left = self.table.take(rows, row_slots, missing)
            except StorageFullError:
                device_slots.give_up(self.table.slots, row_slots[lost & (row_slots >= 0)])
                self._host.rows.drop(rows[made])
                self._send_home(*self.table.left())
                raise
            self._exchange(*left, rows, row_slots, np.flatnonzero(lost & ~made), reads=reads)
        self.table.slots.flags[row_slots[made]] |= CHANGED
        self._record(self._free)
        return row_slots, made.astype(np.int32)

    def fetch(self, rows: Ints) -> None:
        """Copies the values of the next batch's rows, int32[U], into slots. Frees slots for keys without a row (-1)."""
        self._wait(self._free)
        self.table.begin_fetch()
        row_slots = np.empty(len(rows), np.int32)
        missing, _ = device_slots.find(self.table.slots, rows, rows, False, row_slots)
        cold = np.flatnonzero(row_slots == MISSING)
        try:
            left = self.table.take(rows, row_slots, missing, spare=int(np.count_nonzero(rows < 0)))
        except StorageFullError:  # the verb raises this error if it also finds no memory
            device_slots.give_up(self.table.slots, row_slots[cold][row_slots[cold] >= 0])
            self._send_home(*self.table.left())
        else:
            self._exchange(*left, rows, row_slots, cold, reads=True)
            self.table.slots.flags[row_slots[cold]] |= FETCHED
        self._record(self._fetched)

    def mark_changed(self, row_slots: Ints) -> None:
        """Marks rows in the slots that :meth:`bring` returned as changed. Call it before the rows change."""
        self.table.slots.flags[row_slots[row_slots >= 0]] |= CHANGED

    def forget(self, known: Ints, rows: Ints) -> None:
        """Discards old values under the row numbers that new keys got. ``known`` is -1 for new keys."""
        device_slots.forget(self.table.slots, known, rows)

    def choose(self, step: int) -> None:
        """Chooses the hot rows, if the interval between two choices has passed (PICASSO Alg. 1, lines 23 to 26)."""
        options, num_rows = self._options, self._host.memory.num_rows
        due = (
            options.warm_up_steps if self._chosen_at is None else self._chosen_at + options.flush_every_steps
        )
        if step >= due and num_rows:
            self._chosen_at = step
            self.table.choose(num_rows)

    def all_home(self) -> None:
        """Copies all changed values to the host. The values also stay in their slots."""
        self._wait(self._fetched)
        slots, meta = self.table.slots, self._host.memory.arrays.meta
        changed = np.flatnonzero(slots.flags[: self.table.num_slots] & CHANGED).astype(np.int32)
        changed = changed[meta[slots.rows[changed], layout.TABLE] >= 0]
        for start in range(0, len(changed), _MOST_AT_ONCE):
            part = changed[start : start + _MOST_AT_ONCE]
            self._send_home(part, slots.rows[part])
            slots.flags[part] &= ~CHANGED & 0xFF

    def clear(self) -> None:
        """Empties all slots."""
        self._wait(self._fetched)
        self.table.clear()
        self._chosen_at = None
        self._record(self._free)

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Returns the GPU memory of slots that hold a row, and of all slots, in bytes."""
        return (
            self.table.num_used * self.records.record_bytes,
            self.records.capacity * self.records.record_bytes,
        )

    def close(self) -> None:
        """Releases the memory."""
        self.records.close()

    def _exchange(
        self, left: Ints, left_rows: Ints, rows: Ints, row_slots: Ints, cold: NDArray[np.intp], *, reads: bool
    ) -> None:
        """Copies the values of leaving rows to the host, and loads the rows of keys ``cold`` into the free slots."""
        going = self._begin_sending_home(left) if len(left) else None
        if len(cold):
            values = self._staged(len(cold))
            self._host.copy(rows[cold], values.numpy(), reads=reads)
            there = values.to(self.records.device, non_blocking=True)
            self.records.copy(to_device(row_slots[cold], self.records.device), there, fills=True)
        if going is not None:
            self._finish_sending_home(left_rows, *going)

    def _send_home(self, slots: Ints, rows: Ints) -> None:
        if len(slots):
            self._finish_sending_home(rows, *self._begin_sending_home(slots))

    def _begin_sending_home(self, slots: Ints) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copies the values of slots to the host, in the order of the stream. The event marks the end of the copy."""
        device = self.records.device
        values = torch.empty((len(slots), self._num_words), dtype=torch.int32, device=device)
        self.records.copy(to_device(slots, device), values)
        if device.type == "cpu":
            return values, None
        copy = self._staged(len(slots))
        copy.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return copy, event

    def _finish_sending_home(self, rows: Ints, values: Tensor, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
        self._host.put(rows, values.numpy())

    def _staged(self, num_rows: int) -> Tensor:
        """Returns pinned host memory for transfers, int32[K, V - 8]."""
        pinned = self.records.device.type == "cuda"
        return torch.empty((num_rows, self._num_words), dtype=torch.int32, pin_memory=pinned)

    def _claim(self, num_slots: int) -> None:
        self.records.claim(num_slots)
        if self.records.capacity < num_slots:
            raise StorageFullError(
                f"GPU memory: no room for {num_slots:,} rows of {self.records.record_bytes} bytes, {self._options.hot_rows:,} hot"
                " rows and the rows of two batches; lower store.hot_rows, or data.batch_size"
            )

    def _wait(self, event: torch.cuda.Event | None) -> None:
        """Lets the current stream wait for an event of another stream."""
        if event is not None:
            event.wait(torch.cuda.current_stream(self.records.device))

    def _record(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.record(torch.cuda.current_stream(self.records.device))
