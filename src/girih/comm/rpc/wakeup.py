"""A way out of a wait for files."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Wakeup:
    """A file that becomes readable when another thread asks for it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._open = True
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._read

    def ask(self) -> None:
        """From any thread."""
        with self._lock, suppress(BlockingIOError):
            if self._open:
                os.write(self._write, b"!")

    def heard(self) -> None:
        """Clears what was asked: what is asked from here on makes it readable again."""
        with suppress(BlockingIOError):
            os.read(self._read, 1 << 12)

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self._read)
            os.close(self._write)
