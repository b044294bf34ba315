"""Files that are written at any offset, each byte once."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Protocol

_PIECE = 64 << 20


class Sink(Protocol):
    """A file that is written side by side in several places."""

    def begin(self, num_bytes: int) -> None:
        """Takes the size of the whole, before anything is written."""

    def write_at(self, data: memoryview, position: int) -> None:
        """Writes bytes, uint8[·], from a position on."""

    def finish(self) -> None:
        """Returns once all of it is where it stays."""

    def abandon(self) -> None:
        """Ends what is under way, since the rest does not come."""


class DiskFile:
    """A file of this machine.

    Args:
        file: empty, and left open.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file.fileno()
        self._flusher: ThreadPoolExecutor | None = None
        self._flushed: Future[None] | None = None
        self._unflushed_bytes = 0

    def begin(self, num_bytes: int) -> None:
        """No-op."""

    def write_at(self, data: memoryview, position: int) -> None:
        """See :class:`Sink`."""
        while len(data):
            written = os.pwrite(self._file, data[:_PIECE], position)
            data, position = data[written:], position + written
            self._flush_early(written)

    def finish(self) -> None:
        """See :class:`Sink`."""
        self.abandon()
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file)

    def abandon(self) -> None:
        """See :class:`Sink`; the file may be closed then."""
        if self._flusher is not None:
            self._flusher.shutdown()

    def _flush_early(self, num_bytes: int) -> None:
        """Has the disk begin with what is written, so that little is left for the end."""
        self._unflushed_bytes += num_bytes
        if self._unflushed_bytes >= _PIECE and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flusher = self._flusher or ThreadPoolExecutor(1, "girih-flush")
            self._flushed = self._flusher.submit(_sync_data, self._file)
            self._unflushed_bytes = 0


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter
