"""The shards of one process in a segment. girih takes their state between two steps, and writes it while training goes
on.

When a segment begins, changed rows are copied at once. They are few, so the store is not blocked. All rows of a
snapshot are copied on write, as for a checkpoint. If the target is remote, they first go to a temporary file without a
name. So a slow target blocks neither a checkpoint nor the next segment.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Protocol

from girih.checkpoint.manifest import PartFacts, Parts
from girih.checkpoint.parts import SparseSave
from girih.checkpoint.storage import Storage
from girih.publishing.part import write_changes, write_snapshot
from girih.store import DiskFile, LiveSnapshot, Sink, Store
from girih.store.changes import Changes

_PIECE = 16 << 20


class SegmentRows(SparseSave, Protocol):
    """Rows of a segment, from the moment when it began."""

    def wait_copied(self) -> None:
        """Returns when the shards have copied their rows, so that a checkpoint may begin."""


class SegmentShards:
    """The content of some shards for a segment: the changes since a version, or all rows.

    Creating it begins a new record of changes.

    Args:
        files: the name of each part, and its shard.
        number: the version that the segment leads to.
        since: the version that the segment applies to; None takes all rows.
        pool: copies the changes of several shards at the same time.

    Raises:
        ConfigError: the changes are not known, or rows are in GPU memory.
    """

    def __init__(
        self,
        writer: Storage,
        files: Iterable[tuple[str, Store]],
        number: int,
        since: int | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._writer, self._copied = writer, threading.Event()
        self._parts: list[tuple[str, Store, Changes | LiveSnapshot]] = []

        def take(file: tuple[str, Store]) -> None:
            name, store = file
            taken = store.snapshot(writer.scratch) if since is None else store.changes_since(since)
            self._parts.append((name, store, taken))
            store.note_changes(number)

        files = list(files)
        try:
            for _ in map(take, files) if since is None or pool is None else pool.map(take, files):
                pass
            order = [name for name, _ in files]
            self._parts.sort(key=lambda part: order.index(part[0]))  # threads finished in another order
        except BaseException:
            self.close()
            raise
        if since is not None:
            self._copied.set()

    def write(self) -> Parts:
        """See :class:`SegmentRows`."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.close)
            if self._copied.is_set() or self._writer.local is not None:
                return {name: self._create(name, store, taken) for name, store, taken in self._parts}
            spools = []
            for name, store, taken in self._parts:
                file = closing.enter_context(tempfile.TemporaryFile(dir=self._writer.scratch))
                spools.append((name, file, self._write(name, store, taken, DiskFile(file))))
            self._copied.set()
            return {name: self._send(name, file, facts) for name, file, facts in spools}

    def wait_copied(self) -> None:
        """See :class:`SegmentRows`."""
        self._copied.wait()

    def close(self) -> None:
        """See :class:`SegmentRows`."""
        for _, _, taken in self._parts:
            if not isinstance(taken, Changes):
                taken.close()
        self._parts = []
        self._copied.set()

    def _create(self, name: str, store: Store, taken: Changes | LiveSnapshot) -> PartFacts:
        with self._writer.create(name) as sink:
            return self._write(name, store, taken, sink)

    def _write(self, name: str, store: Store, taken: Changes | LiveSnapshot, sink: Sink) -> PartFacts:
        where = f"{self._writer}/{name}"
        if isinstance(taken, Changes):
            return write_changes(store, taken, sink, where)
        with taken:
            return write_snapshot(store, taken, sink, where)

    def _send(self, name: str, file: IO[bytes], facts: PartFacts) -> PartFacts:
        with self._writer.create(name) as sink:
            sink.begin(facts["bytes"])
            file.seek(0)
            position = 0
            while piece := file.read(_PIECE):
                sink.write_at(memoryview(piece), position)
                position += len(piece)
            sink.finish()
        return facts
