"""One shard whose hottest rows are in GPU memory: HybridHash (PICASSO §III-D, Algorithm 1).

The host decides which keys have rows, which rows are evicted, and which events are counted. It uses the same code as
for a shard that is only on the host, so these decisions do not depend on tiers. Only values are copied between slots of
GPU memory and the host. The host has a complete shard, which may have an SSD tier. Steps run like steps on rows in GPU
memory, but on slots instead of rows.

Shapes: U unique keys, n the capacity of the arrays, W columns of a row.
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
    """The state of one shard whose hottest rows are in GPU memory.

    Args:
        host: the shard on the host, with the values that are not in a slot.

    Attributes:
        values: the values on the host. This state shares the meta of their rows.
        rows: the keys that have rows.
        slots: the values in GPU memory.
    """

    memory: ShardMemory

    def __init__(self, host: ShardState, options: GpuTier, clock: Clock) -> None:
        values, self.spec, self.layout, self.memory = host.values, host.spec, host.layout, host.memory
        if values.in_place:  # new rows start in slots; the host makes only their meta
            values.rows = RowTable(host.memory, without_values(host.layout, host.layout.num_words), clock)
        self.values, self.rows = values, values.rows
        self.slots = GpuSlots(values, options)
        self.kernels = RecordKernels(self.slots.records, host.layout)

    def begin_read(self, keys: DeviceKeys) -> None:
        """Copies values of the next batch's keys to the GPU, on the current stream.

        Waits for the keys, and for values that are copied to the host to free slots.
        """
        with self.memory.changing():
            self.slots.fetch(self.values.find(brought_here(keys)))

    def read(self, keys: DeviceKeys, step: int) -> tuple[Ints, Tensor]:
        """Reads rows for training.

        Returns row numbers, int32[U], and the addresses of their columns, int64[U], valid until the next verb.
        """
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
        """Reads rows like :meth:`look`, and counts the keys without a row."""
        rows, addresses = self.look(keys)
        self.slots.num_peeks += len(rows)
        self.slots.num_absent += int(np.count_nonzero(rows < 0))
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Returns counts of keys that groups :meth:`peeked` at."""
        return {"peeks": self.slots.num_peeks, "absent": self.slots.num_absent}

    def move(self, keys: DeviceKeys, rows: RowNumbers, change: DeviceUpdate) -> None:
        """Makes one optimizer step on the row of each key. Waits for ``refused``."""
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
        """Returns a snapshot of the whole shard as it is now.

        Copies all values to the host. The values also stay in their slots.
        """
        self.memory.check_open()
        with self.memory.changing():
            self.slots.all_home()
        return Snapshot(self.values, directory)

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by the rows that ``fill`` puts into an empty shard."""
        with self.memory.replacing():
            self.slots.clear()
            fill(self.values)

    def tier_counters(self) -> dict[str, int]:
        """Returns the number of rows that were read from each tier."""
        slots = self.slots
        below = self.values.counters() or {"dram_reads": slots.num_cold}
        return {"gpu_reads": slots.num_reads - slots.num_cold, **below}

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part."""
        used, reserved = self.slots.used_bytes
        return held_bytes(self.values) | {"gpu_slots": {"used": used, "reserved": reserved}}

    def close(self) -> None:
        """Releases memory."""
        self.slots.close()
        self.values.close()

    def _read_keys(
        self, keys: DeviceKeys, on_host: Keys, now: Longs, step: int, *, forced: bool = False
    ) -> tuple[Ints, Ints, Tensor]:
        """Finds or makes the rows of keys, and copies them into slots. Returns rows, slots and addresses of columns."""
        made = self.rows.make(on_host, now, step, forced=forced)
        self.slots.forget(made.known, made.rows)
        self.values.forget(made.known, made.rows)
        row_slots, new = self.slots.bring(made.rows, made.known, reads=not forced)
        addresses = self._addresses(keys, row_slots, new)
        if made.full is not None:  # all keys before it were served
            raise made.full
        return made.rows, row_slots, addresses

    def _addresses(self, keys: DeviceKeys, row_slots: Ints, made: Ints) -> Tensor:
        """Returns addresses of the columns of keys, int64[U], after writing the values of new rows."""
        there, takes = (to_device(array, self.device) for array in (row_slots, made))
        return self.kernels.begin(
            _cut(keys, len(row_slots)), there, takes, all_there=bool((row_slots >= 0).all())
        )


def brought_here(keys: DeviceKeys) -> Keys:
    """Returns the keys on the host. Waits for their copy if necessary."""
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
    """Returns the first ``num`` keys, without the unused capacity of the arrays."""
    return DeviceKeys(keys.ids[:num], keys.tables[:num], keys.counts[:num], keys.num, keys.most, keys.on_host)
