"""One shard's rows in GPU memory: the verbs of :class:`girih.store.state.ShardState`, for arrays and for tensors.

Arrays of the host are copied over and back, and waited for; so evaluation by hand, loading and tests do. An embedding group on a
GPU calls :meth:`GpuState.read` and :meth:`GpuState.move` with tensors, and waits for nothing.

Saving copies all records to the host while verbs go on (:mod:`girih.store.gpu.gpu_save`), and writes that copy; loading takes
the other way. So files are the same wherever rows were, and are read by the same code.

Shapes: U unique keys, W columns of a row, R rows ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import counting, jit, update
from girih.kernels.gpu.gradients import FusedInputs
from girih.kernels.gpu.layout import STAMP
from girih.store.clock import Clock
from girih.store.gpu.gpu_memory import GpuMemory, to_device
from girih.store.gpu.gpu_rows import GpuRows
from girih.store.gpu.gpu_save import GpuSave
from girih.store.gpu.options import Gpu
from girih.store.gpu.record_kernels import Keys, RecordKernels, check_unique
from girih.store.memory.mapping import Heap
from girih.store.rows.record import RowLayout, hyper_rows, row_layout
from girih.store.spec import Floats, GroupSpec, Ints, Longs
from girih.store.state import LAST_STEP, GradientTerms, ShardState, open_state


class GpuState:
    """The state of one shard in GPU memory; made by :func:`open_gpu_state`.

    Attributes:
        spec: its tables.
        layout: how their rows lie, and their rules.
        memory: the arrays.
        kernels: those of its records.
        rows: which keys have rows.
    """

    def __init__(self, spec: GroupSpec, layout: RowLayout, options: Gpu, clock: Clock) -> None:
        self.spec, self.layout, self._clock = spec, layout, clock
        self.memory = GpuMemory(layout, len(spec.tables), options)
        self.kernels = RecordKernels(self.memory.rows, layout)
        self.rows = GpuRows(self.memory, layout, self.kernels, clock)

    @property
    def device(self) -> torch.device:
        """The device of rows."""
        return self.memory.device

    def read(self, keys: Keys, step: int) -> tuple[Tensor, Tensor]:
        """Reads rows for training: int32[n], where they are; int64[n], where their columns lie until the next verb."""
        with self.memory.changing(step):
            return self.rows.read(keys, step)

    def peeked(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """Reads rows for evaluation, and counts which there are not; see :meth:`read`. Waits for nothing."""
        rows, addresses = self.rows.peek(keys)
        there = torch.arange(len(rows), device=self.device) < keys.num
        self.memory.peeks += torch.stack([there, there & (rows < 0)]).sum(dim=1)
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Keys that groups :meth:`peeked` at; waits for the GPU."""
        peeks, absent = self.memory.peeks.tolist()
        return {"peeks": peeks, "absent": absent}

    def begin_read(self, keys: Keys) -> None:
        """Begins to bring in the rows of keys; they are here already."""

    def move(
        self,
        keys: Keys,
        rows: Tensor,
        gradients: Tensor,
        refused: Tensor,
        step: int,
        lr_scale: float,
        direct: FusedInputs | None = None,
    ) -> None:
        """One optimizer step on the row of each key.

        Args:
            rows: int32[n], hints.
            gradients: float32[n, W]; direct: see :meth:`RecordKernels.move`.
            refused: int32[1]: where it is not negative, no row moves.
        """
        memory = self.memory
        with memory.changing(step):
            if memory.is_copied:
                memory.keep(self.rows.find(keys))
            moving = torch.full_like(rows, at.NO_ROW)
            self._launch(
                update.rows_to_move, len(keys), memory.slots, memory.num_slots, memory.chunks, keys.ids, keys.tables,
                keys.num, rows, memory.words, refused, step, moving,
            )  # fmt: skip
            jit.launch(
                counting.count_moved, len(keys), jit.block_of(1024, len(keys)), keys.tables, moving, refused, keys.num,
                memory.tables,
            )  # fmt: skip
            self.kernels.move(keys, moving, gradients, hyper_rows(self.spec, lr_scale, step), step, direct)

    def lookup(
        self, ids: Longs, tables: Ints, counts: Ints, step: int, out: Floats, addresses: Longs | None = None
    ) -> Ints:
        """Reads rows for training; see :meth:`girih.store.Store.lookup`."""
        self._refuse_addresses(addresses)
        order, keys = self._keys(ids, tables, counts)
        rows, places = self.read(keys, step)
        return self._brought(order, keys, rows, places, out)

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation; see :meth:`girih.store.Store.lookup`."""
        self._refuse_addresses(addresses)
        order, keys = self._keys(ids, tables)
        return self._brought(order, keys, *self.rows.peek(keys), out)

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
    ) -> int:
        """Moves rows by gradients; see :meth:`girih.store.Store.apply_gradients`."""
        if isinstance(grads, GradientTerms):
            raise ConfigError("a store in GPU memory takes sums of gradients; leave terms out")
        memory, device = self.memory, self.memory.device
        order, keys = self._keys(ids, tables)
        on_device = to_device(grads[order], device)
        there = torch.full((len(ids),), at.NO_ROW, dtype=torch.int32, device=device)
        if rows is not None:
            there = to_device(rows[order], device)
        before = memory.tables[:, at.DROPPED].sum()
        self.move(keys, there, on_device, there.new_full((1,), -1), step, lr_scale)
        return int(memory.tables[:, at.DROPPED].sum() - before)

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> Ints:
        """Sets rows; see :meth:`girih.store.Store.assign`. Returns int32[U]: where they are, -1 where a table is full."""
        memory = self.memory
        step = min(memory.last_step + 1, LAST_STEP)
        order, keys = self._keys(ids, tables)
        on_device = to_device(values[order], memory.device)
        with memory.changing():
            before = memory.tables[:, [at.LOOKUPS, at.HITS, at.FULL]]
            rows, _ = self.rows.read(keys, step, forced=True)
            memory.tables[:, [at.LOOKUPS, at.HITS, at.FULL]] = before
            self.kernels.assign(keys, rows, on_device, step)
        out = np.empty(len(ids), np.int32)
        out[order] = rows.cpu().numpy()
        return out

    def fetch(self, ids: Longs, tables: Ints) -> None:
        """Begins to bring in the rows of keys; they are here already."""

    def tier_counters(self) -> dict[str, int]:
        """Counts of what each tier did; empty where there is one."""
        return {}

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

    def replace(self, fill: Callable[[ShardState], None]) -> None:
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

    def _on_host(self) -> ShardState:
        shard, num_shards = (self.layout.description[name] for name in ("shard", "num_shards"))
        return open_state(self.spec, shard, num_shards, Heap(), self._clock)

    def _launch(self, kernel: object, num_items: int, *arguments: Any) -> None:
        memory = self.memory
        jit.launch(
            kernel,
            num_items,
            jit.block_of(256, num_items),
            *arguments,
            CHUNK_BITS=memory.chunk_bits,
            STRIDE=memory.stride,
        )

    def _keys(self, ids: Longs, tables: Ints, counts: Ints | None = None) -> tuple[Longs, Keys]:
        """Keys on the device, by tables, and the place of each among the given ones."""
        device = self.memory.device
        order = np.argsort(tables, kind="stable")
        check_unique(ids, tables)
        if counts is None or not len(counts):
            counts = np.ones(len(ids), np.int32)
        gpu_ids, gpu_tables, gpu_counts = (to_device(array[order], device) for array in (ids, tables, counts))
        num = torch.full((1,), len(ids), dtype=torch.int32, device=device)
        return order, Keys(
            gpu_ids, gpu_tables, gpu_counts, num, np.bincount(tables, minlength=len(self.spec.tables))
        )

    def _brought(self, order: Longs, keys: Keys, rows: Tensor, addresses: Tensor, out: Floats) -> Ints:
        """Copies columns to ``out``, float32[U, W], and rows, as keys were given."""
        values = self.kernels.columns(keys, addresses)
        out[order] = values.cpu().numpy()
        in_order = np.empty(len(order), np.int32)
        in_order[order] = rows.cpu().numpy()
        return in_order

    def _refuse_addresses(self, addresses: Longs | None) -> None:
        if addresses is not None:
            raise ConfigError(
                "addresses: rows are in GPU memory, where the host cannot read them; leave it out"
            )


def open_gpu_state(spec: GroupSpec, shard: int, num_shards: int, options: Gpu, clock: Clock) -> GpuState:
    """Lays out a shard in GPU memory; arguments and errors are those of :class:`girih.store.Store`."""
    return GpuState(spec, row_layout(spec, shard, num_shards), options, clock)
