"""An epoch as batches: units are gathered into windows, whose rows are permuted and cut.

Units are row groups or blocks of lines. All windows one after the other are cut into batches, so that a batch
may end in a later window than it began in; the next window is decoded little by little while one is used up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.data.decode.batches import batch_of, cut
from girih.data.decode.decoder import decode
from girih.data.decode.rows import DecodedRows
from girih.data.position import Cursor, Position, permutation
from girih.data.read_plan import ReadPlan
from girih.data.unit import Source
from girih.errors import DataError
from girih.kernels.buffers import Buffers

_LEAST_BYTES = 1 << 20  # windows are held in memory: what is small beside them is not to be kept too


@dataclass(slots=True)
class SkippedRows:
    """Bad rows dropped in the pass begun last: their number, also by reason, and the first one in words."""

    count: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    first: str | None = None


class EpochSpec(NamedTuple):
    """One epoch of some files.

    Attributes:
        seed: of the order, together with the epoch's number; None keeps the order of the files.
        least_rows: fewest rows of a window.
        stops: whether a bad row is an error; else it is noted in ``skipped``.
    """

    source: Source
    plan: ReadPlan
    batch_size: int
    seed: int | None
    least_rows: int
    stops: bool
    skipped: SkippedRows


class _Window(NamedTuple):
    """Rows that were permuted together, and the batches that end among them.

    Each batch comes with the number of the window's rows that are taken by then.
    """

    start: Position
    num_rows: int
    batches: deque[tuple[Batch, int]]


def read_epoch(spec: EpochSpec, start: Position) -> Iterator[tuple[Batch, Position]]:
    """Yields the batches of an epoch from a position on, each with the position of the next one.

    Raises:
        DataError: a bad row, a damaged file, or a position that the files do not have, while iterating.
    """
    windows = _Windows(spec, start)
    window = windows.next(start.row)
    if window is None and start.cursor == Cursor():
        first = spec.skipped.first
        raise DataError("no rows in the files" if first is None else f"every row is bad; the first: {first}")
    end = Position(epoch=start.epoch + 1, order=start.order)
    while window is not None:
        last = None
        while window.batches:
            batch, row = window.batches.popleft()
            if row == window.num_rows:
                last = batch  # only the next window tells whether the epoch goes on
            else:
                windows.fill(row / window.num_rows)
                yield batch, replace(window.start, row=row)
        window = windows.next()
        if last is not None:
            yield last, end if window is None else window.start
    rest = windows.rest()
    if rest is not None:
        yield rest, end


class _Windows:
    """The windows of an epoch, one after the other."""

    def __init__(self, spec: EpochSpec, start: Position) -> None:
        self._spec = spec
        self._epoch = start.epoch
        self._num_skipped = start.skipped
        parts = self._order(spec.source.num_parts, "parts")
        self._units = spec.source.read(spec.plan, parts, start.cursor)
        self._next = replace(start, row=0)  # where the window that is being filled begins
        self._cursor = start.cursor
        self._rows: list[DecodedRows] = []
        self._num_rows = 0
        self._buffers = Buffers(_LEAST_BYTES)
        self._open: list[DecodedRows] = []  # of a batch that ends in a later window
        skipped = spec.skipped
        skipped.count, skipped.by_reason, skipped.first = start.skipped, {}, None

    def _order(self, size: int, key: int | str) -> NDArray[np.int64]:
        if self._spec.seed is None:
            return np.arange(size)
        return permutation(size, self._spec.seed, self._epoch, key)

    def fill(self, share: float) -> None:
        """Decodes units until the next window has this share of its rows, or there are no more units."""
        while self._num_rows < share * self._spec.least_rows and self._decode_unit():
            pass

    def next(self, row: int = 0) -> _Window | None:
        """The next window, from one of its rows on, or None at the end of the epoch."""
        self.fill(1.0)
        if row and row >= self._num_rows:
            raise DataError(f"position: row {row} is beyond its window; have the files changed?")
        if not self._rows:
            return None
        parts, num_rows, start = self._rows, self._num_rows, self._next
        self._rows, self._num_rows = [], 0
        part, byte, line = self._cursor
        self._next = replace(
            start, window=start.window + 1, part=part, byte=byte, line=line, skipped=self._num_skipped
        )
        return _Window(start, num_rows, self._cut(parts, self._order(num_rows, start.window), row))

    def rest(self) -> Batch | None:
        """The rows after the last whole batch of the epoch."""
        return batch_of(self._open, self._buffers) if self._open else None

    def _cut(self, parts: list[DecodedRows], order: NDArray[np.int64], row: int) -> deque[tuple[Batch, int]]:
        size = self._spec.batch_size
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

    def _decode_unit(self) -> bool:
        """Adds a unit to the next window; False when there are no more."""
        unit = next(self._units, None)
        if unit is None:
            return False
        rows, bad = decode(unit, self._spec.plan, self._buffers)
        if bad and self._spec.stops:
            raise DataError(unit.locate(min(bad, key=lambda row: row.number)))
        skipped = self._spec.skipped
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
