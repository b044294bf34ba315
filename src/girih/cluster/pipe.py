"""Frames through the private pipe between the launcher and a trainer that it started: JSON, and bytes behind it.

No other process can reach it. Pickled roles pass through it as bytes that the launcher does not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from typing import Any

CONTROL = "GIRIH_CONTROL"
"""The environment's name for a trainer's ends of the pipe, as ``3,4``."""
_HEAD = struct.Struct("!IQ")


class Pipe:
    """One end: a descriptor to read, one to write."""

    def __init__(self, readable: int, writable: int) -> None:
        self._readable: int | None = readable
        self._writable: int | None = writable
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Pipe, tuple[int, int]]:
        """This process's end, and the descriptors of the other one."""
        (theirs_read, ours_write), (ours_read, theirs_write) = os.pipe(), os.pipe()
        return cls(ours_read, ours_write), (theirs_read, theirs_write)

    @classmethod
    def inherited(cls) -> Pipe | None:
        """The end that this process was started with, which nobody else takes then; None where there is none."""
        named = os.environ.pop(CONTROL, None)
        if named is None:
            return None
        readable, writable = (int(each) for each in named.split(","))
        for descriptor in (readable, writable):
            os.set_inheritable(descriptor, False)
        return cls(readable, writable)

    def send(self, message: dict[str, Any], content: bytes = b"") -> None:
        """Sends a frame; silently where nobody reads any more."""
        text = json.dumps(message).encode()
        frame = memoryview(_HEAD.pack(len(text), len(content)) + text + content)
        with self._lock, contextlib.suppress(OSError):
            while frame and self._writable is not None:
                frame = frame[os.write(self._writable, frame) :]

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            text_bytes, content_bytes = _HEAD.unpack(self._read(_HEAD.size))
            return json.loads(self._read(text_bytes)), self._read(content_bytes)
        except (OSError, ValueError) as error:
            raise EOFError(str(error)) from None

    def close(self) -> None:
        """Closes this end; no thread may be reading from it, unless the other side is gone."""
        with self._lock:
            for descriptor in (self._readable, self._writable):
                if descriptor is not None:
                    os.close(descriptor)
            self._readable = self._writable = None

    def _read(self, num_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            part = b"" if self._readable is None else os.read(self._readable, num_bytes - len(content))
            if not part:
                raise EOFError("the other side is gone")
            content += part
        return bytes(content)
