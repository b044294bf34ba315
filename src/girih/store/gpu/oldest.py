"""The rows of a table in the order of their last use, without a look at all of them for each that leaves.

All rows are looked at once, and an eighth of them, the oldest, are kept in a queue. One that is used meanwhile has another stamp
by then, and no row outside has an older one than those inside; so whoever is at the head, unchanged, is the oldest of all.

Shapes: K rows of the queue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from girih.kernels.gpu import counting
from girih.store.gpu.gpu_memory import GpuMemory

_SHARE = 8
_LEAST = 4096


class Oldest:
    """The oldest rows of one table.

    Args:
        table: its number.
    """

    def __init__(self, memory: GpuMemory, table: int) -> None:
        self._memory, self._table = memory, table
        self.forget()

    def forget(self) -> None:
        """Lets go of the queue: rows were replaced."""
        self._rows = torch.empty(0, dtype=torch.int32, device=self._memory.device)
        self._stamps = torch.empty(0, dtype=torch.int64, device=self._memory.device)

    def first(self, count: int, least: int) -> tuple[Tensor, counting.Meta]:
        """The oldest rows and their meta: waits for the GPU.

        Returns:
            int32[·], at most ``count`` rows, and at least ``least`` where there are so many.
        """
        rows, meta = self._unchanged(count)
        if len(rows) < least:
            self._look(count)
            rows, meta = self._unchanged(count)
        return rows, meta

    def _unchanged(self, count: int) -> tuple[Tensor, counting.Meta]:
        """As :meth:`first`, of the queue; drops what is behind the head and was used or left."""
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
