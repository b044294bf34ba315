"""The private pipe between a launcher and each process that it started: JSON, one message per line.

No other process can reach it. Pickled roles pass through it as text that the launcher does not read.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

CONTROL = "GIRIH_CONTROL"
"""The environment variable with the pipe end of a started process; see :func:`describe_end`."""


def describe_end(readable: int, writable: int) -> str:
    """Returns the descriptors of an end, and the device and number of its pipe, which no other file has."""
    facts = os.fstat(writable)
    return f"{readable},{writable},{facts.st_dev},{facts.st_ino}"


def _find_end() -> tuple[int, int] | None:
    """Returns the end that this process was started with. None for a process that inherited only the environment."""
    described = os.environ.get(CONTROL, "")
    with contextlib.suppress(ValueError, OSError):
        readable, writable = (int(number) for number in described.split(",")[:2])
        if describe_end(readable, writable) == described:
            return readable, writable
    return None


def bind_life() -> None:
    """Makes the kernel kill this process when its launcher is gone. For the start, while imports block Python's threads.

    The launcher does not read from this end before a message is sent. So the only event of the descriptor is the end of
    the launcher. :meth:`Pipe.unbind_life` ends this mode.
    """
    end = _find_end()
    if end is None:
        return
    _, descriptor = end
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(descriptor, 0)  # only errors
    if poll.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher was already gone


class Pipe:
    """One end: a descriptor to read, and a descriptor to write."""

    def __init__(self, readable: int, writable: int) -> None:
        self._readable, self._writable = open(readable, "rb"), open(writable, "wb")  # noqa: SIM115
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Pipe, tuple[int, int]]:
        """Returns this process's end, and the descriptors of the other end."""
        (theirs_read, ours_write), (ours_read, theirs_write) = os.pipe(), os.pipe()
        return cls(ours_read, ours_write), (theirs_read, theirs_write)

    @classmethod
    def inherited(cls) -> Pipe | None:
        """Takes over the end that this process was started with; None if there is none."""
        end = _find_end()
        os.environ.pop(CONTROL, None)
        if end is None:
            return None
        for descriptor in end:
            os.set_inheritable(descriptor, False)
        return cls(*end)

    def unbind_life(self) -> None:
        """Ends :func:`bind_life`. From here on a thread notices the launcher's end, for a clean exit."""
        fcntl.fcntl(self._writable, fcntl.F_SETFL, fcntl.fcntl(self._writable, fcntl.F_GETFL) & ~os.O_ASYNC)

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message. Does nothing if nobody reads any more."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._writable.write(json.dumps(message).encode() + b"\n")
            self._writable.flush()

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            EOFError: the other side is gone, or has closed its end.
        """
        line = self._readable.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        """Closes the sending direction, which the other side notices."""
        with self._lock, contextlib.suppress(OSError):
            self._writable.close()

    def close(self) -> None:
        """Closes this end. No thread may be reading from it, unless the other side is gone."""
        self.end()
        self._readable.close()


def as_text(content: bytes) -> str:
    """Encodes bytes as text for a message."""
    return base64.b64encode(content).decode()


def from_text(text: str) -> bytes:
    """Reverses :func:`as_text`."""
    return base64.b64decode(text)


def module_command(module: str, *words: str) -> list[str]:
    """Returns a command that runs a module as ``python -m`` does, but never a file of the working directory instead.

    ``-P`` keeps the working directory off the import path. Otherwise a user's file ``http.py`` or ``queue.py`` would be
    imported instead of the standard module. Classes that a config names are still found, see
    :func:`girih.config.user_code.load_object`. ``-u`` writes what is printed at once, so that a kill loses nothing.
    """
    return [sys.executable, "-Pu", "-m", module, *words]
