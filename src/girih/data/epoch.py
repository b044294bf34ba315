"""Reads an epoch as batches: gathers units into windows, permutes the rows of each window, and cuts batches.

A unit is a row group or a block of lines. A batch may begin in one window and end in a later window. While the batches
of one window are used, the next window is decoded in small pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from girih.data.batch import Batch
from girih.data.decode.batches import DecodedRows, cut, good_rows, joined
from girih.data.decode.decoder import decode
from girih.data.position import Cursor, Position, permutation
from girih.errors import DataError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu.arrays import I64

if TYPE_CHECKING:
    from girih.data.dataset import Dataset

_LEAST_BYTES = 1 << 20  # windows are held in memory, so smaller arrays are not worth keeping


@dataclass(slots=True)
class SkippedRows:
    """The bad rows that the latest pass has dropped: their number, their number by reason, and a description of the
    first.
    """

    count: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    first: str | None = None


class _Window(NamedTuple):
    """Rows that were permuted together, and the batches that end among these rows.

    Each batch comes with the number of the window's rows that are used after it.
    """

    start: Position
    num_rows: int
    batches: deque[tuple[Batch, int]]


def read_epoch(data: Dataset, start: Position) -> Iterator[tuple[Batch, Position]]:
    """Yields the batches of an epoch from a position on, each with the position of the next batch.

    Raises:
        DataError: a bad row, a damaged file, or a position that the files do not have, while iterating.
    """
    windows = _Windows(data, start)
    window = windows.next(start.row)
    if window is None and start.cursor == Cursor() and not data.source.stopped():
        first, where = data.skipped.first, "files" if data.source.bounds is None else "topic"
        if first is None and data.plan.where is not None:
            raise DataError(f"{data.source.files[0].address}: no row meets {data.plan.where.text}")
        raise DataError(
            f"no rows in the {where}" if first is None else f"every row is bad; the first: {first}"
        )
    while window is not None:
        last = None
        while window.batches:
            batch, row = window.batches.popleft()
            if row == window.num_rows and not data.source.endless:
                last = batch  # only the next window shows if the epoch continues
            elif row == window.num_rows:
                yield batch, windows.position
            else:
                if not data.source.endless:  # filling a stream would wait for future rows
                    windows.fill(row / window.num_rows)
                yield batch, replace(window.start, row=row)
        window = windows.next()
        if window is None and data.source.stopped():
            return  # the remaining rows are read again later, from the position of the batch before them
        if last is not None:
            yield last, windows.end if window is None else window.start
    remainder = windows.take_remainder()
    if remainder is not None and not data.source.stopped():
        yield remainder, windows.end


class _Windows:
    """The consecutive windows of an epoch."""

    def __init__(self, data: Dataset, start: Position) -> None:
        self._data = data
        self._least_rows = data.shuffle_rows if data.shuffle else 1
        self._num_skipped = start.skipped
        self._next = replace(start, row=0)  # start of the window that is being filled
        self._cursor = start.cursor
        parts = self._order(data.source.num_parts, "parts")
        self._plan = replace(data.plan, until_bad=data.on_bad_row == "error")
        self._units = data.source.read(self._plan, parts, start.cursor)
        self._rows: list[DecodedRows] = []
        self._num_rows = 0  # usable rows
        self._buffers = Buffers(_LEAST_BYTES)
        self._open: list[Batch] = []  # the parts of a batch that ends in a later window
        data.skipped.count, data.skipped.by_reason, data.skipped.first = start.skipped, {}, None

    @property
    def position(self) -> Position:
        """The start of the next window."""
        return self._next

    @property
    def end(self) -> Position:
        """The start of the next epoch. In a stream, the end of this epoch."""
        start, cursor = self._next, self._cursor
        if not cursor.offsets:
            return Position(epoch=start.epoch + 1, order=start.order)
        return Position(epoch=start.epoch + 1, order=start.order, part=cursor.part, offsets=cursor.offsets)

    def _order(self, size: int, key: int | str) -> I64:
        if not self._data.shuffle:
            return np.arange(size)
        return permutation(size, self._data.seed, self._next.epoch, key)

    def fill(self, share: float) -> None:
        """Decodes units until the next window has this share of its rows, or until there are no more units."""
        while self._num_rows < share * self._least_rows and self._decode_unit():
            pass

    def next(self, row: int = 0) -> _Window | None:
        """Returns the next window, without its first ``row`` rows, or None at the end of the epoch."""
        self.fill(1.0)
        if row and row >= self._num_rows:
            raise DataError(f"position: row {row} is beyond its window; have the files changed?")
        if not self._rows:
            return None
        parts, num_rows, start = self._rows, self._num_rows, self._next
        self._rows, self._num_rows = [], 0
        self._next = replace(
            start, window=start.window + 1, skipped=self._num_skipped, **self._cursor._asdict()
        )
        order, good = self._order(num_rows, start.window)[row:], good_rows(parts)
        return _Window(start, num_rows, self._cut(parts, order if good is None else good[order], row))

    def take_remainder(self) -> Batch | None:
        """Returns the rows after the last whole batch of the epoch."""
        return joined(self._open, self._buffers) if self._open else None

    def _cut(self, parts: list[DecodedRows], order: I64, row: int) -> deque[tuple[Batch, int]]:
        size = self._data.batch_size
        num_open = sum(batch.num_examples for batch in self._open)
        first = min(size - num_open, len(order)) if num_open else 0
        ready: deque[tuple[Batch, int]] = deque()
        for batch in cut(parts, order, first, size, self._buffers):
            self._open.append(batch)
            row += batch.num_examples
            num_open += batch.num_examples
            if num_open == size:
                ready.append((joined(self._open, self._buffers), row))
                self._open, num_open = [], 0
        return ready

    def _decode_unit(self) -> bool:
        """Adds a unit to the next window. Returns False if there are no more units."""
        unit = next(self._units, None)
        if unit is None:
            return False
        rows, bad = decode(unit, self._plan, self._buffers)
        if bad and self._data.on_bad_row == "error":
            raise DataError(unit.locate(bad[0]))
        skipped = self._data.skipped
        self._num_skipped += len(bad)
        skipped.count = self._num_skipped
        for row in bad:
            skipped.by_reason[row.reason] = skipped.by_reason.get(row.reason, 0) + 1
            skipped.first = skipped.first or unit.locate(row)
        if rows.num_good:
            self._rows.append(rows)
            self._num_rows += rows.num_good
        self._cursor = unit.after
        return True
