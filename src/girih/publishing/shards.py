"""The shards of one process in a segment: taken between two steps, written while training goes on.

What changed is copied when the segment begins: by then it is few rows, and nothing holds the store up. All rows are copied as a
checkpoint's are, on write; where they go to another machine, to a file without a name first, so that a slow address holds up
neither a checkpoint nor the next segment.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Protocol

from girih.checkpoint.manifest import PartFacts, Parts
from girih.checkpoint.storage import Storage
from girih.publishing.part import write_changes, write_snapshot
from girih.store import DiskFile, LiveSnapshot, Sink, Store
from girih.store.changes import Changes

_PIECE = 16 << 20


class SegmentRows(Protocol):
    """Rows of a segment as they were when it began; written once, by any thread."""

    def write(self) -> Parts:
        """Writes the parts that this process answers for; returns their facts by name."""

    def wait_copied(self) -> None:
        """Returns once the shards are as free as if the segment had not begun: a checkpoint may begin."""

    def close(self) -> None:
        """Ends the segment, written or not."""


def know_changes(files: Iterable[tuple[str, Store]], since: int) -> bool:
    """Whether all shards know what changed since then."""
    return all(store.knows_changes(since) for _, store in files)


class ChangedRows:
    """The changes of some shards since a version; notes of what changes begin anew.

    Args:
        files: the name of each part, and its shard.
        pool: copies the changes of several shards side by side.
        number: of the version that the segment leads to; since: of the one that it is to be applied to.
    """

    def __init__(
        self,
        writer: Storage,
        files: Sequence[tuple[str, Store]],
        pool: ThreadPoolExecutor | None,
        number: int,
        since: int,
    ) -> None:
        def take(file: tuple[str, Store]) -> tuple[str, Store, Changes]:
            name, store = file
            changes = store.changes_since(since)
            store.note_changes(number)
            return name, store, changes

        self._writer = writer
        self._taken = list(map(take, files) if pool is None else pool.map(take, files))

    def write(self) -> Parts:
        """See :class:`SegmentRows`."""
        parts = {}
        for name, store, changes in self._taken:
            with self._writer.create(name) as sink:
                parts[name] = write_changes(store, changes, sink, f"{self._writer}/{name}")
        self.close()
        return parts

    def wait_copied(self) -> None:
        """See :class:`SegmentRows`."""

    def close(self) -> None:
        """See :class:`SegmentRows`."""
        self._taken = []


class AllRows:
    """All rows of some shards; notes of what changes begin anew.

    Args:
        files: the name of each part, and its shard.
        number: of the version.
    """

    def __init__(self, writer: Storage, files: Iterable[tuple[str, Store]], number: int) -> None:
        self._writer = writer
        self._copied = threading.Event()
        self._taken: list[tuple[str, Store, LiveSnapshot]] = []
        try:
            for name, store in files:
                self._taken.append((name, store, store.snapshot(writer.scratch)))
                store.note_changes(number)
        except BaseException:
            self.close()
            raise

    def write(self) -> Parts:
        """See :class:`SegmentRows`."""
        try:
            if self._writer.local is not None:
                return {name: self._part(name, store, taken) for name, store, taken in self._taken}
            spools: list[tuple[str, IO[bytes], PartFacts]] = []
            try:
                for name, store, taken in self._taken:
                    spools.append((name, *self._spooled(name, store, taken)))
                self._copied.set()
                return {name: self._sent(name, file, facts) for name, file, facts in spools}
            finally:
                for _, file, _ in spools:
                    file.close()
        finally:
            self.close()

    def wait_copied(self) -> None:
        """See :class:`SegmentRows`."""
        self._copied.wait()

    def close(self) -> None:
        """See :class:`SegmentRows`."""
        for _, _, snapshot in self._taken:
            snapshot.close()
        self._copied.set()

    def _part(self, name: str, store: Store, snapshot: LiveSnapshot) -> PartFacts:
        with self._writer.create(name) as sink:
            return self._write(name, store, snapshot, sink)

    def _spooled(self, name: str, store: Store, snapshot: LiveSnapshot) -> tuple[IO[bytes], PartFacts]:
        file = tempfile.TemporaryFile(dir=self._writer.scratch)  # noqa: SIM115
        try:
            return file, self._write(name, store, snapshot, DiskFile(file))
        except BaseException:
            file.close()
            raise

    def _write(self, name: str, store: Store, snapshot: LiveSnapshot, sink: Sink) -> PartFacts:
        with snapshot:
            return write_snapshot(store, snapshot, sink, f"{self._writer}/{name}")

    def _sent(self, name: str, file: IO[bytes], facts: PartFacts) -> PartFacts:
        with self._writer.create(name) as sink:
            sink.begin(facts["bytes"])
            file.seek(0)
            position = 0
            while piece := file.read(_PIECE):
                sink.write_at(memoryview(piece), position)
                position += len(piece)
            sink.finish()
        return facts


def begin_rows(
    writer: Storage,
    files: Callable[[], Iterable[tuple[str, Store]]],
    pool: ThreadPoolExecutor | None,
    number: int,
    since: int | None,
) -> SegmentRows:
    """Takes what changed since a version, or all rows where it is None.

    Raises:
        ConfigError: it is not known what changed; or rows lie in GPU memory.
    """
    if since is None:
        return AllRows(writer, files(), number)
    return ChangedRows(writer, list(files()), pool, number, since)
