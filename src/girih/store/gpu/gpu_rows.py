"""The keys that have rows in GPU memory. Keys get rows when training reads them, and lose rows by expiry or eviction.

A call makes its decisions in the order of its keys, like :class:`girih.store.rows.row_table.RowTable`. If no table can
be full and no row can have expired, no method waits for the GPU. Queues (:mod:`girih.store.gpu.eviction`) select the
rows that leave.

Shapes: U unique keys, R rows ever made, T tables.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from girih.kernels.cpu import layout as at
from girih.kernels.gpu import counting, index, jit, lookup
from girih.store.clock import Clock
from girih.store.gpu.eviction import LeastUsed, Oldest
from girih.store.gpu.gpu_memory import GpuMemory, to_device
from girih.store.gpu.record_kernels import DeviceKeys, RecordKernels
from girih.store.rows.record import RowLayout
from girih.store.rows.row_table import LFU_SHARE, moments
from girih.store.spec import Ints, Longs

_KEYS_AT_ONCE = 256
_AT_ONCE = 64  # rows at the head that are first checked for expiry


class GpuRows:
    """The rows of a shard's keys.

    Args:
        kernels: the kernels for the shard's records.
        clock: returns seconds since 1970, for tables whose rows expire after some seconds.
    """

    def __init__(self, memory: GpuMemory, layout: RowLayout, kernels: RecordKernels, clock: Clock) -> None:
        self._memory, self._kernels, self._clock = memory, kernels, clock
        self._rules = layout.kernel.rules
        device = memory.device
        self._rules_there = to_device(self._rules, device)
        self._bloom = to_device(layout.kernel.bloom, device)
        chances = [math.log1p(-p) if p < 1 else -math.inf for p in layout.kernel.chance]
        self._chances = torch.tensor(chances, dtype=torch.float64, device=device)
        eviction = self._rules[:, at.EVICTION]
        listed = np.isin(eviction, (at.EVICT_LRU, at.EVICT_TTL))
        self._listed = to_device(listed.astype(np.int32), device)
        self._in_seconds = bool(self._rules[:, at.IN_SECONDS].any())
        self._expiring = np.flatnonzero(eviction == at.EVICT_TTL).tolist()
        self._bounded = np.flatnonzero(self._rules[:, at.MAX_ROWS] < at.UNLIMITED).tolist()
        self._oldest = {table: Oldest(memory, table) for table in np.flatnonzero(listed).tolist()}
        least = np.flatnonzero(eviction == at.EVICT_LFU).tolist()
        self._least_used = {table: LeastUsed(memory, table) for table in least}
        # no row of a table was last used before this moment
        self._none_before = np.full(len(self._rules), np.iinfo(np.int64).min)
        self._admits_all = bool((self._rules[:, at.ADMISSION] == at.ADMIT_ALL).all())
        self._most_rows = np.zeros(len(self._rules), np.int64)  # upper bound for each table

    def read(self, keys: DeviceKeys, step: int, *, forced: bool = False) -> tuple[Tensor, Tensor]:
        """Marks rows as used. Makes rows for new keys that are admitted, or for all new keys if ``forced``.

        Returns:
            The row number of each key, int32[n], or -1 if the key has no row. And the address of each key's columns,
                int64[n], which is valid until the next call.

        Raises:
            StorageFullError: there is no memory for more rows. All keys before this point were served.
        """
        memory = self._memory
        now = moments(self._rules, step, self._clock)
        if not forced:
            self._expire(now)
        room = memory.make_room(len(keys))
        memory.calls += 1
        moment = torch.full((len(now),), step, dtype=torch.int64, device=memory.device)
        if self._in_seconds:
            moment = to_device(now, memory.device)
        if memory.is_copied:
            memory.keep(self.find(keys))
        rows, is_new = self._find(keys, moment, marks=True)
        admitted = is_new
        if not (self._admits_all or forced):
            admitted = self._admitted(keys, is_new, step)
        takes = admitted
        if self._bounded:
            takes, left = self._bounded_by_rows(keys, takes, step)
            room += left
        short = room < len(keys) and int(takes.sum()) > room
        if short:
            takes = takes * (torch.cumsum(takes, 0, dtype=torch.int32) <= room)
        jit.launch(
            counting.count_read, len(keys), jit.block_of(1024, len(keys)), keys.tables, is_new, admitted, takes, keys.num,
            memory.tables,
        )  # fmt: skip
        counting.number_rows(takes, memory.free, memory.words, rows)
        memory.keep(rows)  # free rows that are used again
        self._launch(
            lookup.make_rows, len(keys), memory.slots, memory.num_slots, memory.chunks, keys.ids, keys.tables,
            keys.counts, keys.num, moment, memory.calls, step, rows, takes=takes,
        )  # fmt: skip
        # every key has a row now, unless some keys were refused
        addresses = self._kernels.begin(keys, rows, takes, all_there=takes is is_new)
        memory.report_counts()
        if short:
            raise memory.full()
        return rows, addresses

    def peek(self, keys: DeviceKeys) -> tuple[Tensor, Tensor]:
        """Reads rows for evaluation and changes nothing; see :meth:`read`."""
        rows = self.find(keys)
        return rows, self._kernels.begin(keys, rows, torch.zeros_like(rows))

    def find(self, keys: DeviceKeys) -> Tensor:
        """Returns the row number of each key, int32[n], or -1 if the key has no row."""
        return self._find(keys, None, marks=False)[0]

    def drop(self, rows: Ints | Tensor) -> int:
        """Removes rows and returns their number. Each row occurs once, and -1 stands for no row."""
        memory = self._memory
        there = rows if isinstance(rows, Tensor) else to_device(rows, memory.device)
        there = there[there >= 0].contiguous()
        if len(there):
            self._take_out(there, at.EVICTED, self._memory.meta_of(there).tables)
        return len(there)

    def _launch(self, kernel: object, num_items: int, *arguments: object, **options: object) -> None:
        memory = self._memory
        jit.launch(
            kernel, num_items, jit.block_of(_KEYS_AT_ONCE, num_items), *arguments, CHUNK_BITS=memory.chunk_bits,
            STRIDE=memory.stride, **options,
        )  # fmt: skip

    def _find(self, keys: DeviceKeys, moment: Tensor | None, *, marks: bool) -> tuple[Tensor, Tensor]:
        memory, n = self._memory, len(keys)
        rows = torch.full((n,), at.NO_ROW, dtype=torch.int32, device=memory.device)
        is_new = torch.zeros(n, dtype=torch.int32, device=memory.device)
        self._launch(
            lookup.read_known, n, memory.slots, memory.num_slots, memory.chunks, keys.ids, keys.tables, keys.counts,
            keys.num, memory.words if moment is None else moment, self._listed, memory.calls, rows, is_new,
            MARKS=marks,
        )  # fmt: skip
        return rows, is_new

    def _admitted(self, keys: DeviceKeys, is_new: Tensor, step: int) -> Tensor:
        memory, block = self._memory, jit.block_of(_KEYS_AT_ONCE, len(keys))
        admitted = torch.zeros_like(is_new)
        asked = keys.ids, keys.tables, keys.counts, keys.num, is_new
        jit.launch(
            lookup.ask_admission, len(keys), block, *asked, self._rules_there, self._bloom, memory.cells, self._chances,
            self._kernels.segments.table_seeds, step, admitted,
        )  # fmt: skip
        jit.launch(
            lookup.add_sightings,
            len(keys),
            block,
            *asked,
            admitted,
            self._rules_there,
            self._bloom,
            memory.cells,
        )
        return admitted

    def forget(self) -> None:
        """Forgets all bounds and queues of tables, because their rows were replaced."""
        self._most_rows[:] = at.UNLIMITED
        self._none_before[:] = np.iinfo(np.int64).min
        for oldest in self._oldest.values():
            oldest.forget()
        for queue in self._least_used.values():
            queue.forget()

    def _bounded_by_rows(self, keys: DeviceKeys, admitted: Tensor, step: int) -> tuple[Tensor, int]:
        """Returns the admitted keys that tables with a maximum number of rows have room for.

        Also returns the number of rows that left to make room.
        """
        memory, most = self._memory, self._rules[:, at.MAX_ROWS]
        if (self._most_rows + keys.most <= most)[self._bounded].all():
            self._most_rows += keys.most
            return admitted, 0
        left = 0
        num_keys = int(keys.num)
        wanted = admitted[:num_keys].cpu().numpy() != 0
        tables = keys.tables[:num_keys].cpu().numpy()
        counters = memory.tables.cpu().numpy().copy()
        full = np.zeros(len(self._rules), np.int64)
        for table in self._bounded:
            mine = np.flatnonzero(wanted & (tables == table))
            free = int(self._rules[table, at.MAX_ROWS] - counters[table, at.TABLE_ROWS])
            if len(mine) <= free:
                continue
            if self._rules[table, at.EVICTION] != at.EVICT_NONE:
                leaving = self._leaving(table, len(mine) - free, step)
                if len(leaving):
                    self._take_out(leaving, at.EVICTED, torch.full_like(leaving, table))
                free, left = free + len(leaving), left + len(leaving)
            wanted[mine[max(0, free) :]] = False
            full[table] = max(0, len(mine) - max(0, free))
        if full.any():
            memory.tables[:, at.FULL] += to_device(full, memory.device)
            admitted = torch.zeros_like(admitted)
            admitted[:num_keys] = to_device(wanted.astype(np.int32), memory.device)
        self._most_rows = memory.tables[:, at.TABLE_ROWS].cpu().numpy().copy()
        self._most_rows += np.bincount(tables[wanted], minlength=len(self._rules))
        return admitted, left

    def _leaving(self, table: int, surplus: int, step: int) -> Tensor:
        """Returns the rows that leave a full table for ``surplus`` keys, int32[·].

        Never includes a row that this call uses.
        """
        rule = self._rules[table]
        if rule[at.EVICTION] == at.EVICT_LFU:
            share = max(1, int(rule[at.MAX_ROWS]) // LFU_SHARE)
            return self._least_used[table].first(-(-surplus // share) * share, step)
        rows, meta = self._oldest[table].first(surplus, surplus)
        this_call = meta.stamps >> 32 >= self._memory.calls
        allowed = ~this_call if rule[at.IN_SECONDS] else meta.last_used < step
        # rows leave from the oldest on, up to the first row that may not leave
        return rows[: int(torch.cumprod(allowed.long(), 0).sum())]

    def _expire(self, now: Longs) -> None:
        """Removes rows that were not used for too long, oldest first. Skips tables where no row can have expired."""
        for table in self._expiring:
            latest, count = int(now[table]) - int(self._rules[table, at.TTL]), _AT_ONCE
            while latest > self._none_before[table]:
                rows, meta = self._oldest[table].first(count, 1)
                num = int(torch.cumprod((meta.last_used < latest).long(), 0).sum())
                if num:
                    self._take_out(rows[:num], at.EXPIRED, meta.tables[:num])
                if num < len(rows):
                    self._none_before[table] = int(meta.last_used[num])
                elif not len(rows):  # no row is left, and new rows are used from now on
                    self._none_before[table] = int(now[table])
                count *= 4

    def _take_out(self, rows: Tensor, column: int, tables: Tensor) -> None:
        """Removes rows, int32[·], from their keys, and counts them by their tables, int32[·]."""
        memory = self._memory
        memory.keep(rows)
        index.remove(memory.slots, memory.chunks, rows, memory.chunk_bits, memory.stride)
        gone = torch.bincount(tables, minlength=len(memory.tables))
        memory.tables[:, at.TABLE_ROWS] -= gone
        memory.tables[:, column] += gone
        num_free = int(memory.words[counting.NUM_FREE])
        for queue in self._least_used.values():
            queue.note(num_free)
        memory.free = torch.cat([memory.free[:num_free], rows])
        memory.words[counting.NUM_FREE] += len(rows)
        memory.words[counting.NUM_ROWS] -= len(rows)
