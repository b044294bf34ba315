"""The windows of an epoch: units put together, their rows permuted and cut into batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from girih.data.batch import Batch
from girih.data.decode.batches import batch_of, cut
from girih.data.decode.decoder import decode
from girih.data.decode.rows import DecodedRows
from girih.data.position import Position, permutation
from girih.errors import DataError
from girih.kernels.buffers import Buffers

if TYPE_CHECKING:
    from girih.data.dataset import Dataset

_LEAST_BYTES = 1 << 20  # windows are held in memory: what is small beside them is not to be kept too


@dataclass(frozen=True, slots=True)
class Window:
    """DecodedRows that were permuted together.

    Attributes:
        start: the position of its first row. num_rows: R.
        batches: those that end in the window, each with the number of its rows that are taken by then.
    """

    start: Position
    num_rows: int
    batches: deque[tuple[Batch, int]]


class Windows:
    """The windows of an epoch; the next one is decoded little by little while one is used up."""

    def __init__(self, dataset: Dataset, start: Position) -> None:
        self._dataset = dataset
        source, plan = dataset._source, dataset._plan
        parts = np.arange(source.num_parts)
        if dataset.shuffle:
            parts = permutation(source.num_parts, dataset.seed, start.epoch, "parts")
        self._units = source.read(plan, parts, start.cursor)
        self._least_rows = dataset.shuffle_rows if dataset.shuffle else 1
        self._next = replace(start, row=0)  # where the window that is being filled begins
        self._cursor = start.cursor
        self._rows: list[DecodedRows] = []
        self._num_rows = 0
        self._exhausted = False
        self._buffers = Buffers(_LEAST_BYTES)
        self._num_skipped = start.skipped
        self._open: list[DecodedRows] = []  # of a batch that ends in a later window
        skipped = dataset._skipped
        skipped.count, skipped.by_reason, skipped.first = start.skipped, {}, None

    def next(self, row: int = 0) -> Window | None:
        """The next window that has rows, from one of them on, or None at the end of the epoch.

        Raises:
            DataError: the window does not have that row, or one of its rows is bad.
        """
        while self._num_rows < self._least_rows and self._pull():
            pass
        if row and row >= self._num_rows:
            raise DataError(f"position: row {row} is beyond its window; have the files changed?")
        if not self._rows:
            return None
        parts, num_rows, start = self._rows, self._num_rows, self._next
        self._rows, self._num_rows = [], 0
        ordinal = self._next.window
        part, byte, line = self._cursor
        self._next = replace(
            start, window=ordinal + 1, part=part, byte=byte, line=line, skipped=self._num_skipped
        )
        order = np.arange(num_rows)
        if self._dataset.shuffle:
            order = permutation(num_rows, self._dataset.seed, start.epoch, ordinal)
        return Window(start, num_rows, self._cut(parts, order, row))

    def prepare(self, share: float) -> None:
        """Decodes as much of the next window as was used of the current one."""
        while self._num_rows < share * self._least_rows and self._pull():
            pass

    def rest(self) -> Batch | None:
        """The rows after the last whole batch of the epoch."""
        return batch_of(self._open, self._buffers) if self._open else None

    def position(self, window: Window | None, row: int = 0) -> Position:
        """The position of a row of a window; past the last window, the start of the next epoch."""
        if window is None:
            return Position(epoch=self._next.epoch + 1, order=self._next.order)
        return replace(window.start, row=row)

    def _cut(self, parts: list[DecodedRows], order: np.ndarray, row: int) -> deque[tuple[Batch, int]]:
        size = self._dataset.batch_size
        missing = size - sum(rows.num_rows for rows in self._open) if self._open else 0
        before, batches, after = cut(parts, order[row:], min(missing, len(order) - row), size, self._buffers)
        ready: deque[tuple[Batch, int]] = deque()
        if before is not None:
            self._open.append(before)
            row += before.num_rows
            if before.num_rows == missing:
                ready.append((batch_of(self._open, self._buffers), row))
                self._open = []
        for batch in batches:
            row += size
            ready.append((batch, row))
        if after is not None:
            self._open.append(after)
        return ready

    def _pull(self) -> bool:
        """Decodes one unit; False when there are no more."""
        unit = None if self._exhausted else next(self._units, None)
        if unit is None:
            self._exhausted = True
            return False
        rows, bad = decode(unit, self._dataset._plan, self._buffers)
        if bad and self._dataset.on_bad_row == "error":
            raise DataError(unit.locate(min(bad, key=lambda row: row.number)))
        skipped = self._dataset._skipped
        self._num_skipped += len(bad)
        skipped.count = self._num_skipped
        for row in bad:
            skipped.by_reason[row.reason] = skipped.by_reason.get(row.reason, 0) + 1
            skipped.first = skipped.first or unit.locate(row)
        if rows.num_rows:
            self._rows.append(rows)
            self._num_rows += rows.num_rows
        self._cursor = unit.after
        return True
