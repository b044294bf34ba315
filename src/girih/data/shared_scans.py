"""Shares readings of the same data among readers that are close to each other.

A reading keeps the last batches that it decoded, for readers that are further back. If a reader needs an earlier batch,
it starts another reading there. So data is decoded once while readers stay together. It is decoded at most once per
reader. Batches and positions are the same as in ``Dataset.batches``, for any reading.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from girih.data.batch import Batch
from girih.data.dataset import Dataset
from girih.data.epoch import SkippedRows
from girih.data.position import Position


class SharedScans:
    """The shared readings of some data. There are never more readings than readers.

    Args:
        most_kept: decoded batches that each reading keeps, at least 1.
    """

    def __init__(self, data: Dataset, most_kept: int) -> None:
        self._data, self._most_kept = data, most_kept
        self._lock = threading.Lock()
        self._readings: list[_Reading] = []

    def reader(self, epoch: int, position: Position | None) -> ScanCursor:
        """Reads an epoch from a position on: see :meth:`Dataset.batches`."""
        return ScanCursor(self, position or Position(epoch=epoch))

    def join(self, at: Position, skipped: SkippedRows | None) -> _Reading:
        """Returns the reading that has the batch at a position.

        A new reading takes over the rows that were ``skipped`` before.
        """
        with self._lock:
            found = next((r for r in self._readings if at == r.head or at in r.kept), None)
            if found is None:
                found = _Reading(self._data, at, self._most_kept, skipped)
                self._readings.append(found)
            found.num_readers += 1
        return found

    def leave(self, reading: _Reading) -> None:
        """Removes one reader. The last reader closes the reading."""
        with self._lock:
            reading.num_readers -= 1
            if reading.num_readers:
                return
            self._readings.remove(reading)
        reading.close()


class ScanCursor(Iterator[tuple[Batch, Position]]):
    """Iterates over the rest of an epoch, in one thread.

    Attributes:
        skipped: the dropped bad rows, complete after the last batch.
    """

    def __init__(self, readings: SharedScans, at: Position) -> None:
        self._readings, self._at, self._epoch = readings, at, at.epoch
        self._reading: _Reading | None = None
        self.skipped: SkippedRows | None = None

    def __next__(self) -> tuple[Batch, Position]:
        while self._at.epoch == self._epoch:
            self._reading = self._reading or self._readings.join(self._at, self.skipped)
            taken = self._reading.take(self._at)
            self.skipped = self._reading.skipped()
            if taken is not None:
                self._at = taken[1]
                return taken
            self.close()  # the reading no longer keeps this batch
        raise StopIteration

    def close(self) -> None:
        """Leaves the reading."""
        if self._reading is not None:
            self._readings.leave(self._reading)
            self._reading = None


class _Reading:
    """One reading of an epoch, in its own thread.

    Attributes:
        kept: the last batches, by their positions, each with the position of the next batch.
        head: position of the batch that the reading decodes next.
        num_readers: number of readers that take batches from this reading.
    """

    def __init__(self, data: Dataset, at: Position, most_kept: int, skipped: SkippedRows | None) -> None:
        self._data = replace(data)  # with its own count of skipped rows
        self._ahead = self._data.ahead(at.epoch, at)
        self._most_kept, self._first_skipped = most_kept, skipped and skipped.first
        self._lock = threading.Lock()
        self._end: Exception | None = None
        self.kept: dict[Position, tuple[Batch, Position]] = {}
        self.head, self.num_readers = at, 0

    def take(self, at: Position) -> tuple[Batch, Position] | None:
        """Returns the batch at a position. Returns None if the reading no longer keeps this batch.

        If the position is the head, decodes the batch first.
        """
        kept = self.kept.get(at)
        if kept is not None:  # without the lock: the thread that decodes may wait for a stream
            return kept
        with self._lock:
            if at == self.head:
                self._decode()
            return self.kept.get(at)

    def _decode(self) -> None:
        try:
            if self._end is not None:
                raise self._end
            self.kept[self.head] = decoded = next(self._ahead)
        except Exception as error:  # also the end of the data; every reader must see it
            self._end = error
            raise
        self.head = decoded[1]
        if len(self.kept) > self._most_kept:
            del self.kept[next(iter(self.kept))]

    def skipped(self) -> SkippedRows:
        found = self._data.skipped
        return replace(found, first=self._first_skipped or found.first)

    def close(self) -> None:
        self._ahead.close()
