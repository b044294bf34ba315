"""Queues of the rows that leave a table in GPU memory next: the least used or the oldest rows.

Without a queue, each eviction would search all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from girih.kernels.gpu import counting
from girih.store.gpu.gpu_memory import GpuMemory

_SHARE = 8
_LEAST = 4096
_NEVER = 2**63 - 1


class LeastUsed:
    """The rows of one table in the order in which they leave: lowest count first, ties by last use, then by age.

    Args:
        table: the table's number.
    """

    def __init__(self, memory: GpuMemory, table: int) -> None:
        self._memory, self._table = memory, table
        self._free, self._num_free = memory.free, 0
        self._made: list[Tensor] = []
        self._num_made = self._ever = 0
        self.forget()

    def forget(self) -> None:
        """Empties the queue, because rows were replaced."""
        self._rows: Tensor | None = None
        self._bound: Tensor | None = None

    def note(self, num_free: int) -> None:
        """Records the row numbers that were taken off the free list since the last call.

        The list has ``num_free`` numbers left. Call this method before other numbers are put on the list.
        """
        if self._rows is None:
            return
        free = self._memory.free
        before = self._num_free if free is self._free else len(free)
        self._made.append(free[num_free:before])
        self._num_made += before - num_free
        self._free, self._num_free = free, num_free
        if self._num_made > max(_LEAST, self._ever):  # a search of all rows costs no more
            self.forget()

    def first(self, wanted: int, step: int) -> Tensor:
        """Returns the least used rows that were not used in ``step``, int32[·], at most ``wanted``.

        Waits for the GPU.
        """
        words = self._memory.words.tolist()
        num_free, ever = words[counting.NUM_FREE], words[counting.ROWS_EVER]
        self.note(num_free)
        looked = self._rows is None
        if looked:
            self._look(wanted, step, num_free, ever)
        rows = self._below(step, ever)
        if len(rows) < wanted and self._bound is not None and not looked:
            self._look(wanted, step, num_free, ever)
            rows = self._below(step, ever)
        return rows[:wanted]

    def _look(self, wanted: int, step: int, num_free: int, ever: int) -> None:
        """Fills the queue from all rows, and sets the bound, which is None if the queue has all rows of the table."""
        meta = self._memory.meta_of(None)
        rows = torch.nonzero(meta.tables == self._table).squeeze(1)
        row_meta = meta.taken(rows)
        kept, uses = max(_LEAST, len(rows) // _SHARE, 4 * wanted), _uses(row_meta)
        self._bound = None
        if kept < len(rows):
            may_leave = torch.where(row_meta.last_used < step, uses, torch.full_like(uses, _NEVER))
            self._bound = torch.topk(may_leave, kept, largest=False, sorted=False).values.max()
            rows = rows[uses <= self._bound]
        self._rows = rows.to(torch.int32)
        self._made, self._num_made, self._ever = [], 0, ever
        self._free, self._num_free = self._memory.free, num_free

    def _below(self, step: int, ever: int) -> Tensor:
        """Returns the rows below the bound that may leave, in order.

        From now on, the queue has all rows below the bound, including rows that may not leave.
        """
        device = self._memory.device
        new = torch.arange(self._ever, ever, dtype=torch.int32, device=device)
        queue = [] if self._rows is None else [self._rows]
        rows = torch.unique(torch.cat([*queue, *self._made, new]))
        meta = self._memory.meta_of(rows)
        uses, below = _uses(meta), meta.tables == self._table
        if self._bound is not None:
            below &= uses <= self._bound
        self._rows, self._made, self._num_made, self._ever = rows[below], [], 0, ever
        leaving = torch.nonzero(below & (meta.last_used < step)).squeeze(1)
        leaving = leaving[torch.argsort(meta.stamps[leaving], stable=True)]
        leaving = leaving[torch.argsort(uses[leaving], stable=True)]
        leaving_rows: Tensor = rows[leaving]
        return leaving_rows


def _uses(meta: counting.Meta) -> Tensor:
    """Returns the numbers that order the rows for eviction, int64[·]. Rows with equal numbers are ordered by age."""
    return meta.counts.long() * (1 << 31) + meta.last_used.long()


class Oldest:
    """The oldest rows of one table.

    Args:
        table: the table's number.
    """

    def __init__(self, memory: GpuMemory, table: int) -> None:
        self._memory, self._table = memory, table
        self.forget()

    def forget(self) -> None:
        """Empties the queue, because rows were replaced."""
        self._rows = torch.empty(0, dtype=torch.int32, device=self._memory.device)
        self._stamps = torch.empty(0, dtype=torch.int64, device=self._memory.device)

    def first(self, count: int, least: int) -> tuple[Tensor, counting.Meta]:
        """Returns the oldest rows and their meta. Waits for the GPU.

        Returns:
            int32[·], at most ``count`` rows. At least ``least`` rows, or all rows if the table has fewer.
        """
        rows, meta = self._unchanged(count)
        if len(rows) < least:
            self._look(count)
            rows, meta = self._unchanged(count)
        return rows, meta

    def _unchanged(self, count: int) -> tuple[Tensor, counting.Meta]:
        """Returns the result of :meth:`first` from the queue alone. First drops used or removed rows from its head."""
        asked, end = 2 * count, len(self._rows)
        while True:
            rows = self._rows[:asked]
            meta = self._memory.meta_of(rows)
            same = (meta.tables == self._table) & (meta.stamps == self._stamps[:asked])
            kept = torch.nonzero(same).squeeze(1)
            if len(kept) >= count or asked >= end:
                break
            asked *= 4
        head = int(kept[0]) if len(kept) else len(rows)
        self._rows, self._stamps = self._rows[head:], self._stamps[head:]
        kept = kept[:count]
        return rows[kept], meta.taken(kept)

    def _look(self, count: int) -> None:
        """Fills the queue from all rows."""
        meta = self._memory.meta_of(None)
        rows = torch.nonzero(meta.tables == self._table).squeeze(1)
        stamps, order = torch.sort(meta.stamps[rows])
        kept = max(_LEAST, len(rows) // _SHARE, 4 * count)
        self._rows = rows[order[:kept]].to(torch.int32)
        self._stamps = stamps[:kept].clone()
