"""One shard's rows with the hottest in GPU memory: HybridHash (PICASSO §III-D, Algorithm 1).

Which keys have rows, who is evicted and what is counted is decided on the host, by the code that decides it if all rows
are there; so it does not depend on tiers. Only values move: between slots of GPU memory and the host, which is a shard of its
own and may have an SSD below. Steps are those of rows in GPU memory, on slots in place of rows.

Shapes: U unique keys, n what there is room for, W columns of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from girih.kernels.cpu import device_slots
from girih.store.accounting import held_bytes
from girih.store.clock import Clock
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.gpu_slots import GpuSlots
from girih.store.gpu.group_state import DeviceUpdate, GroupState, RowNumbers
from girih.store.gpu.options import GpuTier
from girih.store.gpu.record_kernels import DeviceKeys, RecordKernels
from girih.store.keys import Keys
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import hyper_rows, without_values
from girih.store.rows.row_table import RowTable
from girih.store.snapshot.snapshot import Snapshot
from girih.store.spec import Ints, Longs
from girih.store.state import ShardState
from girih.store.values import Values


class GpuTieredState(GroupState):
    """The state of one shard, whose hottest rows are in GPU memory.

    Args:
        host: the shard on the host, with the values that are in no slot.

    Attributes:
        values: those of the host, whose rows' meta is this state's too.
        rows: which keys have rows.
        slots: the other values.
    """

    memory: ShardMemory

    def __init__(self, host: ShardState, options: GpuTier, clock: Clock) -> None:
        values, self.spec, self.layout, self.memory = host.values, host.spec, host.layout, host.memory
        if values.in_place:  # rows begin in slots: on the host only their meta is made
            values.rows = RowTable(host.memory, without_values(host.layout, host.layout.num_words), clock)
        self.values, self.rows = values, values.rows
        self.slots = GpuSlots(values, options)
        self.kernels = RecordKernels(self.slots.records, host.layout)

    def begin_read(self, keys: DeviceKeys) -> None:
        """Has values of the next batch's keys brought in, on the current stream; waits for the keys, and for what goes home."""
        with self.memory.changing():
            self.slots.fetch(self.values.find(brought_here(keys)))

    def read(self, keys: DeviceKeys, step: int) -> tuple[Ints, Tensor]:
        """Reads rows for training: int32[U], where they are; int64[U], where their columns lie until the next verb."""
        on_host = brought_here(keys)
        with self.memory.changing(step):
            now = self.rows.expire(step)
            self.values.choose(step)
            self.slots.choose(step)
            rows, _, addresses = self._read_keys(keys, on_host, now, step)
        return rows, addresses

    def look(self, keys: DeviceKeys) -> tuple[Ints, Tensor]:
        """Reads rows for evaluation; see :meth:`read`."""
        on_host = brought_here(keys)
        with self.memory.changing():
            rows = self.values.find(on_host)
            row_slots, made = self.slots.bring(rows)
            return rows, self._addresses(keys, row_slots, made)

    def peeked(self, keys: DeviceKeys) -> tuple[Ints, Tensor]:
        """:meth:`look`, which also counts the keys that have no row."""
        rows, addresses = self.look(keys)
        self.slots.num_peeks += len(rows)
        self.slots.num_absent += int(np.count_nonzero(rows < 0))
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Keys that groups :meth:`peeked` at."""
        return {"peeks": self.slots.num_peeks, "absent": self.slots.num_absent}

    def move(self, keys: DeviceKeys, rows: RowNumbers, change: DeviceUpdate) -> None:
        """One optimizer step on the row of each key; waits for ``refused``."""
        if int(change.refused) >= 0:
            return
        ids, tables, *_ = brought_here(keys)
        step, hints, moving = change.step, np.asarray(rows), np.empty(len(ids), np.int32)
        with self.memory.changing(step):
            for part in self.memory.stretches(len(ids), 1):
                arrays = self.memory.arrays
                device_slots.note_updates(arrays, ids[part], tables[part], hints[part], step, moving[part])
            row_slots, _ = self.slots.bring(moving)
            self.slots.mark_changed(row_slots)
            there, hyper = to_device(row_slots, self.device), hyper_rows(self.spec, change.lr_scale, step)
            self.kernels.move(_cut(keys, len(ids)), there, change.gradients, hyper, step, change.direct)

    def set_rows(self, keys: DeviceKeys, values: Tensor, step: int) -> Ints:
        """Sets rows, float32[n, W]."""
        on_host, now = brought_here(keys), self.rows.now(step)
        rows, row_slots, _ = self._read_keys(keys, on_host, now, step, forced=True)
        for part in self.memory.stretches(len(rows), 1):
            device_slots.note_versions(self.memory.arrays, rows[part], step)
        self.slots.mark_changed(row_slots)
        self.kernels.assign(keys, to_device(row_slots, self.device), values, step)
        return rows

    def snapshot(self, directory: str | os.PathLike[str] | None) -> Snapshot:
        """The whole shard as it is now: the host gets all values, which stay in their slots too."""
        self.memory.check_open()
        with self.memory.changing():
            self.slots.all_home()
        return Snapshot(self.values, directory)

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by those that ``fill`` puts into an empty shard."""
        with self.memory.replacing():
            self.slots.clear()
            fill(self.values)

    def tier_counters(self) -> dict[str, int]:
        """Reads that each tier answered."""
        slots = self.slots
        below = self.values.counters() or {"dram_reads": slots.num_cold}
        return {"gpu_reads": slots.num_reads - slots.num_cold, **below}

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part."""
        used, reserved = self.slots.used_bytes
        return held_bytes(self.values) | {"gpu_slots": {"used": used, "reserved": reserved}}

    def close(self) -> None:
        """Lets go of memory."""
        self.slots.close()
        self.values.close()

    def _read_keys(
        self, keys: DeviceKeys, on_host: Keys, now: Longs, step: int, *, forced: bool = False
    ) -> tuple[Ints, Ints, Tensor]:
        """Finds or makes the rows of keys and has them in slots: where the rows are, the slots, the columns' addresses."""
        made = self.rows.make(on_host, now, step, forced=forced)
        self.slots.forget(made.known, made.rows)
        self.values.forget(made.known, made.rows)
        row_slots, new = self.slots.bring(made.rows, made.known, reads=not forced)
        addresses = self._addresses(keys, row_slots, new)
        if made.full is not None:  # the keys before it are served
            raise made.full
        return made.rows, row_slots, addresses

    def _addresses(self, keys: DeviceKeys, row_slots: Ints, made: Ints) -> Tensor:
        """Addresses of the columns of keys, int64[U], once those of rows that were made are written."""
        there, takes = (to_device(array, self.device) for array in (row_slots, made))
        return self.kernels.begin(
            _cut(keys, len(row_slots)), there, takes, all_there=bool((row_slots >= 0).all())
        )


def brought_here(keys: DeviceKeys) -> Keys:
    """The keys on the host; waits for them where they are not there yet."""
    if keys.on_host is None:
        num = int(keys.num)
        on_host = [
            torch.empty(num, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for tensor in (keys.ids, keys.tables, keys.counts)
        ]
        for mine, theirs in zip(on_host, (keys.ids, keys.tables, keys.counts), strict=True):
            mine.copy_(theirs[:num], non_blocking=True)
        if keys.ids.is_cuda:
            torch.cuda.current_stream(keys.ids.device).synchronize()
        keys.on_host = Keys(*(tensor.numpy() for tensor in on_host))
    return keys.on_host


def _cut(keys: DeviceKeys, num: int) -> DeviceKeys:
    """The keys without the room behind them."""
    return DeviceKeys(keys.ids[:num], keys.tables[:num], keys.counts[:num], keys.num, keys.most, keys.on_host)
