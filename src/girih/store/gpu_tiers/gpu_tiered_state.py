"""One shard's rows with the hottest in GPU memory: HybridHash (PICASSO §III-D, Algorithm 1).

Which keys have rows, who is evicted and what is counted is decided on the host, by the code that decides it where all rows
are there; so it does not depend on tiers. Only values move: between slots of GPU memory and the host, which is a shard of its
own and may have an SSD below. Steps are those of rows in GPU memory, on slots in place of rows.

Shapes: U unique keys, n what there is room for, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu import device_slots, layout
from girih.kernels.gpu.gradients import FusedInputs
from girih.store.clock import Clock
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.options import GpuTier
from girih.store.gpu.record_kernels import HostKeys, Keys, RecordKernels, check_unique
from girih.store.gpu_tiers.gpu_slots import GpuSlots
from girih.store.memory.mapping import Heap
from girih.store.rows.record import hyper_rows, without_values
from girih.store.rows.row_table import ONCE, ReadTarget, RowTable
from girih.store.spec import Floats, GroupSpec, Ints, Longs
from girih.store.state import LAST_STEP, GradientTerms, LoadedColumn, ShardState, open_state
from girih.store.tiers.tiered_state import open_tiered_state
from girih.store.tiers.tiered_values import Tiers


@dataclass(frozen=True, slots=True)
class GpuTieredState(ShardState):
    """The state of one shard; made by :func:`open_gpu_tiered_state`. For the verbs see :class:`Store`.

    Attributes:
        host: the rows' meta, which is this state's too, and the values that are in no slot.
        slots: the other values.
        kernels: those of slots.
    """

    host: ShardState
    slots: GpuSlots
    kernels: RecordKernels

    @property
    def device(self) -> torch.device:
        """The device on which embeddings are read."""
        return self.slots.records.device

    def begin_read(self, keys: Keys) -> None:
        """Has values of the next batch's keys brought in, on the current stream; waits for the keys, and for what goes home."""
        on_host = brought_here(keys)
        self.fetch(on_host.ids, on_host.tables)

    def read(self, keys: Keys, step: int) -> tuple[Ints, Tensor]:
        """Reads rows for training: int32[U], where they are; int64[U], where their columns lie until the next verb."""
        ids, tables, counts = brought_here(keys)
        now = self.rows.now(step)
        with self.memory.changing(step):
            self.rows.expire(now)
            self.host.choose(step)
            self.slots.choose(step)
            rows, _, addresses = self._read_keys(keys, ids, tables, counts, now, step)
        return rows, addresses

    def peeked(self, keys: Keys) -> tuple[Ints, Tensor]:
        """Reads rows for evaluation, and counts which there are not; see :meth:`read`."""
        rows, addresses = self._peeked(keys)
        self.slots.num_peeks += len(rows)
        self.slots.num_absent += int(np.count_nonzero(rows < 0))
        return rows, addresses

    def peek_counters(self) -> dict[str, int]:
        """Keys that groups :meth:`peeked` at."""
        return {"peeks": self.slots.num_peeks, "absent": self.slots.num_absent}

    def move(
        self,
        keys: Keys,
        rows: Ints,
        gradients: Tensor,
        refused: Tensor,
        step: int,
        lr_scale: float,
        direct: FusedInputs | None = None,
    ) -> int:
        """One optimizer step on the row of each key.

        Args:
            rows: int32[U], hints.
            gradients: float32[·, W], at least U; direct: see :meth:`RecordKernels.move`.
            refused: int32[1], for which it waits: where it is not negative, no row moves.

        Returns:
            How many keys have no row.
        """
        if int(refused) >= 0:
            return 0
        ids, tables, _ = brought_here(keys)
        moving = np.empty(len(ids), np.int32)
        with self.memory.changing(step):
            for part in self.memory.stretches(len(ids), 1):
                arrays = self.memory.arrays
                device_slots.note_updates(arrays, ids[part], tables[part], rows[part], step, moving[part])
            row_slots, _ = self.slots.bring(moving)
            self.slots.mark_changed(row_slots)
            there = to_device(row_slots, self.device)
            self.kernels.move(
                _cut(keys, len(ids)), there, gradients, hyper_rows(self.spec, lr_scale, step), step, direct
            )
        return int(np.count_nonzero(moving < 0))

    def lookup(
        self,
        ids: Longs,
        tables: Ints,
        counts: Ints,
        step: int,
        out: Floats,
        addresses: Longs | None = None,
    ) -> Ints:
        """Reads rows for training."""
        _refuse_addresses(addresses)
        keys = self._keys(ids, tables, counts)
        rows, places = self.read(keys, step)
        out[:] = self.kernels.columns(keys, places).cpu().numpy()
        return rows

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation."""
        _refuse_addresses(addresses)
        keys = self._keys(ids, tables, ONCE)
        rows, places = self._peeked(keys)
        out[:] = self.kernels.columns(keys, places).cpu().numpy()
        return rows

    def fetch(self, ids: Longs, tables: Ints) -> None:
        """Brings in what the next batch will want."""
        with self.memory.changing():
            self.slots.fetch(self._find(ids, tables))

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float,
    ) -> int:
        """Moves rows by gradients."""
        if isinstance(grads, GradientTerms):
            raise ConfigError("a store with rows in GPU memory takes sums of gradients; leave terms out")
        keys = self._keys(ids, tables, ONCE)
        hints = np.full(len(ids), layout.NO_ROW, np.int32) if rows is None else rows
        return self.move(keys, hints, to_device(grads, self.device), torch.tensor(-1), step, lr_scale)

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> Ints:
        """Sets rows."""
        keys, memory = self._keys(ids, tables, ONCE), self.memory
        step = min(memory.last_step + 1, LAST_STEP)
        reads = [layout.LOOKUPS, layout.HITS, layout.FULL]
        with memory.changing():
            before = memory.arrays.tables[:, reads]
            now = self.rows.now(step)
            rows, row_slots, _ = self._read_keys(keys, ids, tables, ONCE, now, step, forced=True)
            memory.arrays.tables[:, reads] = before
            for part in memory.stretches(len(ids), 1):
                device_slots.note_versions(memory.arrays, rows[part], step)
            self.slots.mark_changed(row_slots)
            there = to_device(row_slots, self.device)
            self.kernels.assign(keys, there, to_device(values, self.device), step)
        return rows

    def forget(self, known: Ints, rows: Ints) -> None:
        """See :class:`ShardState`."""
        self.slots.forget(known, rows)
        self.host.forget(known, rows)

    def load_values(
        self,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        *,
        begins: bool,
        states: Sequence[LoadedColumn] = (),
    ) -> None:
        """Writes the values of rows, int32[K], whose meta was loaded."""
        self.host.load_values(rows, columns, begins=begins, states=states)

    def clear(self) -> None:
        """Forgets all rows."""
        self.slots.clear()
        self.host.clear()

    def at_rest(self) -> ShardState:
        """Has all values with the host, of which a save is then taken; they stay in their slots too."""
        self.memory.check_open()
        with self.memory.changing():
            self.slots.all_home()
        return self

    def freeze(self) -> None:
        """See :class:`ShardState`."""
        self.host.freeze()

    def whole(self, records: Ints, live: Ints) -> tuple[Ints, Ints]:
        """See :class:`ShardState`."""
        return self.host.whole(records, live)

    def thaw(self) -> None:
        """See :class:`ShardState`."""
        self.host.thaw()

    def tier_counters(self) -> dict[str, int]:
        """Reads that each tier answered."""
        slots = self.slots
        below = self.host.tier_counters() or {"dram_reads": slots.num_cold}
        return {"gpu_reads": slots.num_reads - slots.num_cold, **below}

    def tier_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes of GPU memory, and of what tiers below take."""
        return {"gpu_slots": self.slots.used_bytes, **self.host.tier_bytes()}

    def close(self) -> None:
        """Lets go of memory."""
        self.slots.close()
        self.host.close()

    def _peeked(self, keys: Keys) -> tuple[Ints, Tensor]:
        ids, tables, _ = brought_here(keys)
        with self.memory.changing():
            rows = self._find(ids, tables)
            row_slots, made = self.slots.bring(rows)
            return rows, self._addresses(keys, row_slots, made)

    def _read_keys(
        self,
        keys: Keys,
        ids: Longs,
        tables: Ints,
        counts: Ints,
        now: Longs,
        step: int,
        *,
        forced: bool = False,
    ) -> tuple[Ints, Ints, Tensor]:
        """Finds or makes the rows of keys and has them in slots: where the rows are, the slots, the columns' addresses."""
        rows, known = np.full(len(ids), layout.NO_ROW, np.int32), np.zeros(len(ids), np.int32)
        target, full = ReadTarget(np.empty((len(ids), 0), np.float32), None, rows, known), None
        try:
            self.rows.read(ids, tables, counts, now, step, target, forced=forced)
        except StorageFullError as error:
            full = error  # the keys before it are served
        self.forget(known, rows)
        row_slots, made = self.slots.bring(rows, known, reads=not forced)
        addresses = self._addresses(keys, row_slots, made)
        if full is not None:
            raise full
        return rows, row_slots, addresses

    def _addresses(self, keys: Keys, row_slots: Ints, made: Ints) -> Tensor:
        """Addresses of the columns of keys, int64[U], once those of rows that were made are written."""
        there, takes = (to_device(array, self.device) for array in (row_slots, made))
        return self.kernels.begin(
            _cut(keys, len(row_slots)), there, takes, all_there=bool((row_slots >= 0).all())
        )

    def _keys(self, ids: Longs, tables: Ints, counts: Ints) -> Keys:
        check_unique(ids, tables)
        ones = np.ones(len(ids), np.int32)
        gpu_ids, gpu_tables, gpu_counts = (to_device(array, self.device) for array in (ids, tables, ones))
        num = torch.full((1,), len(ids), dtype=torch.int32, device=self.device)
        return Keys(
            gpu_ids, gpu_tables, gpu_counts, num, np.empty(0, np.int64), HostKeys(ids, tables, counts)
        )


def brought_here(keys: Keys) -> HostKeys:
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
        keys.on_host = HostKeys(*(tensor.numpy() for tensor in on_host))
    return keys.on_host


def _cut(keys: Keys, num: int) -> Keys:
    """The keys without the room behind them."""
    return Keys(keys.ids[:num], keys.tables[:num], keys.counts[:num], keys.num, keys.most, keys.on_host)


def _refuse_addresses(addresses: Longs | None) -> None:
    if addresses is not None:
        raise ConfigError("addresses: rows are in GPU memory, where the host cannot read them; leave it out")


def open_gpu_tiered_state(
    spec: GroupSpec,
    shard: int,
    num_shards: int,
    arena: Heap,
    clock: Clock,
    tier: GpuTier,
    below: Tiers | None,
) -> GpuTieredState:
    """Opens a shard on the host, with a file below it where ``below`` says so, and GPU memory above.

    Raises:
        ConfigError: there is no GPU that torch can use, or the directory cannot be written.
        StorageFullError: no memory, or no room on the disk, to begin with.
    """
    if below is None:
        opened = open_state(spec, shard, num_shards, arena, clock)
        host_layout = opened.layout
        # rows begin in slots: on the host only their meta is made
        bare = RowTable(opened.memory, without_values(host_layout, host_layout.num_words), clock)
        host = replace(opened, rows=bare)
    else:
        host = open_tiered_state(spec, shard, num_shards, arena, clock, below)
    slots = GpuSlots(host, tier)
    kernels = RecordKernels(slots.records, host.layout)
    return GpuTieredState(spec, host.layout, host.memory, host.rows, host, slots, kernels)
