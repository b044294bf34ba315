"""One shard's rows in GPU memory.

Saving copies all records to the host while verbs go on (:mod:`girih.store.gpu.gpu_save`), and writes that copy; loading takes
the other way. So files are the same wherever rows were, and are read by the same code.

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
    """The state of one shard in GPU memory; arguments and errors are those of :class:`girih.store.Store`.

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
        """Reads rows for training: int32[n], where they are; int64[n], where their columns lie until the next verb."""
        with self.memory.changing(step):
            return self.rows.read(keys, step)

    def look(self, keys: DeviceKeys) -> tuple[Tensor, Tensor]:
        """Reads rows for evaluation; see :meth:`read`."""
        return self.rows.peek(keys)

    def peeked(self, keys: DeviceKeys) -> tuple[Tensor, Tensor]:
        """:meth:`look`, which also counts the keys that have no row. Waits for nothing."""
        rows, addresses = self.rows.peek(keys)
        there = torch.arange(len(rows), device=self.device) < keys.num
        self.memory.peeks += torch.stack([there, there & (rows < 0)]).sum(dim=1)
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Keys that groups :meth:`peeked` at; waits for the GPU."""
        peeks, absent = self.memory.peeks.tolist()
        return {"peeks": peeks, "absent": absent}

    def begin_read(self, keys: DeviceKeys) -> None:
        """Begins to bring in the rows of keys; they are here already."""

    def move(self, keys: DeviceKeys, rows: RowNumbers, change: DeviceUpdate) -> None:
        """One optimizer step on the row of each key."""
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
        """The shard as it is now, on its way to the host.

        Raises:
            ConfigError: another save is under way.
            StorageFullError: no memory for what a save keeps.
        """
        memory = self.memory
        memory.check_open()
        with memory.lock:
            if memory.saving is not None:
                raise ConfigError("GPU memory: is being saved already; wait for that save to end")
            memory.saving = GpuSave(memory, self._on_host())
        return memory.saving

    def snapshot(self, directory: str | os.PathLike[str] | None) -> ArrivingSnapshot:
        """The whole shard as it is now, on its way to the host."""
        return ArrivingSnapshot(self.at_rest(), directory)

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part."""
        return self.memory.held_bytes()

    def replace(self, fill: Callable[[Values], None]) -> None:
        """Replaces all rows by those that ``fill`` puts into an empty shard on the host."""
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
        """Lets go of memory."""
        self.memory.close()

    def _on_host(self) -> Values:
        shard, num_shards = (self.layout.description[name] for name in ("shard", "num_shards"))
        return open_state(self.spec, shard, num_shards, Heap(), self._clock).values
