"""One shard's rows in GPU memory.

A save copies all records to the host while verbs run (:mod:`girih.store.gpu.gpu_save`), and writes this copy to a file.
Loading reads a file into a shard on the host, and copies its records to the GPU. So files have the same format for rows
in GPU memory and on the host.

Shapes: U unique keys, W columns of a row, R rows ever made.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import counting, jit, update
from girih.kernels.gpu.layout import STAMP
from girih.store.clock import Clock
from girih.store.gpu.gpu_memory import GpuMemory, to_device
from girih.store.gpu.gpu_rows import GpuRows
from girih.store.gpu.gpu_save import GpuSave
from girih.store.gpu.group_state import DeviceUpdate, GroupState, RowNumbers
from girih.store.gpu.options import Gpu
from girih.store.gpu.record_kernels import DeviceKeys, RecordKernels
from girih.store.memory.mapping import Heap
from girih.store.rows.record import hyper_rows, row_layout
from girih.store.snapshot.snapshot import ArrivingSnapshot
from girih.store.spec import GroupSpec
from girih.store.state import open_state
from girih.store.values import Values


class GpuState(GroupState):
    """The state of one shard in GPU memory. Arguments and errors are the same as in :class:`girih.store.Store`.

    Attributes:
        rows: the keys that have rows.
    """

    memory: GpuMemory

    def __init__(self, spec: GroupSpec, shard: int, num_shards: int, options: Gpu, clock: Clock) -> None:
        self.spec, self.layout, self._clock = spec, row_layout(spec, shard, num_shards), clock
        self.memory = GpuMemory(self.layout, len(spec.tables), options)
        self.kernels = RecordKernels(self.memory.rows, self.layout)
        self.rows = GpuRows(self.memory, self.layout, self.kernels, clock)

    def read(self, keys: DeviceKeys, step: int) -> tuple[Tensor, Tensor]:
        """Reads rows for training.

        Returns row numbers, int32[n], and the addresses of their columns, int64[n], valid until the next verb.
        """
        with self.memory.changing(step):
            return self.rows.read(keys, step)

    def look(self, keys: DeviceKeys) -> tuple[Tensor, Tensor]:
        """Reads rows for evaluation; see :meth:`read`."""
        return self.rows.peek(keys)

    def peeked(self, keys: DeviceKeys) -> tuple[Tensor, Tensor]:
        """Reads rows like :meth:`look`, and counts the keys without a row. Does not wait for the GPU."""
        rows, addresses = self.rows.peek(keys)
        there = torch.arange(len(rows), device=self.device) < keys.num
        self.memory.peeks += torch.stack([there, there & (rows < 0)]).sum(dim=1)
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Returns counts of keys that groups :meth:`peeked` at. Waits for the GPU."""
        peeks, absent = self.memory.peeks.tolist()
        return {"peeks": peeks, "absent": absent}

    def begin_read(self, keys: DeviceKeys) -> None:
        """Does nothing, because the rows are in GPU memory already."""

    def move(self, keys: DeviceKeys, rows: RowNumbers, change: DeviceUpdate) -> None:
        """Makes one optimizer step on the row of each key."""
        memory, step = self.memory, change.step
        hints = rows if isinstance(rows, Tensor) else to_device(rows, self.device)
        with memory.changing(step):
            if memory.is_copied:
                memory.keep(self.rows.find(keys))
            moving = torch.full_like(hints, at.NO_ROW)
            jit.launch(
                update.rows_to_move, len(keys), jit.block_of(256, len(keys)), memory.slots, memory.num_slots, memory.chunks,
                keys.ids, keys.tables, keys.num, hints, memory.words, change.refused, step, moving,
                CHUNK_BITS=memory.chunk_bits, STRIDE=memory.stride,
            )  # fmt: skip
            jit.launch(
                counting.count_moved, len(keys), jit.block_of(1024, len(keys)), keys.tables, moving, change.refused, keys.num,
                memory.tables,
            )  # fmt: skip
            hyper = hyper_rows(self.spec, change.lr_scale, step)
            self.kernels.move(keys, moving, change.gradients, hyper, step, change.direct)

    def set_rows(self, keys: DeviceKeys, values: Tensor, step: int) -> Tensor:
        """Sets rows, float32[n, W]."""
        rows, _ = self.rows.read(keys, step, forced=True)
        self.kernels.assign(keys, rows, values, step)
        return rows

    def at_rest(self) -> GpuSave:
        """Starts to copy the current state of the shard to the host, and returns the copy.

        Raises:
            ConfigError: another save is running.
            StorageFullError: there is no memory for the records that a save keeps.
        """
        memory = self.memory
        memory.check_open()
        with memory.lock:
            if memory.saving is not None:
                raise ConfigError("GPU memory: is being saved already; wait for that save to end")
            memory.saving = GpuSave(memory, self._on_host())
        return memory.saving

    def snapshot(self, directory: str | os.PathLike[str] | None) -> ArrivingSnapshot:
        """Returns a snapshot of the whole shard as it is now. The snapshot is still being copied to the host."""
        return ArrivingSnapshot(self.at_rest(), directory)

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Returns bytes ``used`` and ``reserved`` by part."""
        return self.memory.held_bytes()

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by the rows that ``fill`` puts into an empty shard on the host."""
        host, memory = self._on_host(), self.memory
        try:
            fill(host)
            arrays = host.memory.arrays
            rows_ever = int(arrays.state[at.ROWS_EVER])
            stamps = arrays.keys[:rows_ever, STAMP.value // 2]
            for table in np.flatnonzero(self.layout.listed):
                rows = host.rows.oldest_first(int(table))
                stamps[rows] = np.arange(len(rows))
            free = np.flatnonzero(arrays.meta[:rows_ever, at.TABLE] < 0).astype(np.int32)
            memory.clear()
            self.rows.forget()
            memory.tables.copy_(torch.from_numpy(arrays.tables))
            if len(arrays.cells):
                memory.cells.copy_(torch.from_numpy(arrays.cells))
            memory.fill(arrays.meta[:rows_ever], to_device(free, memory.device), host.memory.num_rows)
            memory.last_step = host.memory.last_step
        finally:
            host.memory.close()

    def close(self) -> None:
        """Releases memory."""
        self.memory.close()

    def _on_host(self) -> Values:
        shard, num_shards = (self.layout.description[name] for name in ("shard", "num_shards"))
        return open_state(self.spec, shard, num_shards, Heap(), self._clock).values
