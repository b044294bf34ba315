"""Options of a server, and the limits on the clients of one process.

The limits concern the number of clients, the bytes that they hold, and their time.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Annotated

from girih.config.bounds import Bounds, Count, Positive
from girih.config.options import Options
from girih.errors import ConfigError

if TYPE_CHECKING:
    from girih.serving.direct import ClientConnection

HOST, PORT = "127.0.0.1", 8000
Notify = Callable[[str], None]
"""Receives a line about an event."""


class ServeOptions(Options):
    """Options of ``girih serve``.

    Attributes:
        host, port: the address; port 0 takes any free port. The server does not authenticate clients.
        workers: processes that share the port and the memory of the tables.
        threads: computing threads of each worker.
        max_batch: largest number of examples in a request; larger requests get status 413.
        max_bytes: largest body of a request in bytes; larger requests get status 413.
        max_header_bytes: largest request line and headers together; larger requests get status 431.
        max_unfinished_bytes: largest sum of the unfinished requests and unread answers of a process. Above it, the
            largest of them get status 503.
        request_timeout: seconds from a request's first byte to its last (else status 408), and for reading an answer.
        max_connections: connections of a process; further connections get status 503.
        model: the user's class, as ``file.py:Class``, that a follower serves.
    """

    owner = "serve: "

    host: str = HOST
    port: Annotated[int, Bounds(0, 65_535)] = PORT
    workers: Annotated[int, Bounds(1, 256)] = 1
    threads: Annotated[int, Bounds(1, 256)] = 1
    max_batch: Count = 8192
    max_bytes: Count = 16 << 20
    max_header_bytes: Annotated[int, Bounds(256, 1 << 24)] = 64 << 10
    max_unfinished_bytes: Count = 24 << 20
    request_timeout: Positive = 30.0
    max_connections: Annotated[int, Bounds(1, 1 << 20)] = 1024
    model: str | None = None

    def _check(self) -> None:
        if (most := self.max_unfinished_bytes) < self.max_bytes:
            raise ConfigError(
                f"serve: max_unfinished_bytes = {most:,}: expected at least max_bytes, {self.max_bytes:,}"
            )


DRAIN_S = 5
"""Seconds for requests in progress when a server ends."""
_SWEEP_S, _LOOK_S = 0.5, 0.02
_TRIM_BYTES = 4 << 20
_FRESH_S = 0.1
"""Seconds that girih adds to the age of all requests. So the bytes of a new request count too."""
_SPARE_FILES = 512
_READ_BYTES = 1 << 18


class Clients:
    """The connections of one process, their limits, and the shared read buffer.

    Attributes:
        date: the date header of answers, at most half a second old.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self._open: set[ClientConnection] = set()
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._held, self._has_burst, self._next_sweep = 0, False, 0.0

    def add(self, client: ClientConnection) -> bool:
        """Adds a connection, unless there are too many."""
        if not self._next_sweep:
            self._sweep()
        if len(self._open) >= self.options.max_connections:
            return False
        self._open.add(client)
        return True

    def remove(self, client: ClientConnection) -> None:
        """Removes a closed connection."""
        self._open.discard(client)
        self._has_burst = True
        self.hold(client, 0)

    def hold(self, client: ClientConnection, num_bytes: int) -> None:
        """Records the bytes that a connection holds.

        If all connections together hold too many bytes, one is refused. This is the connection with the largest product
        of bytes and seconds. So many slow requests cannot keep out requests that arrive at once.
        """
        self._held += num_bytes - client.held
        client.held = num_bytes
        self._has_burst |= self._held >= _TRIM_BYTES
        most = self.options.max_unfinished_bytes
        while self._held > most:
            now = time.monotonic() + _FRESH_S
            greediest = max(self._open, key=lambda each: each.held * (now - each.begun))
            greediest.refuse("bytes", f"unfinished requests hold more than {most:,} bytes; try again later")

    async def end(self) -> None:
        """Ends all connections, when the requests in progress are answered."""
        for client in list(self._open):
            client.shutdown()
        deadline = time.monotonic() + DRAIN_S
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)

    def _sweep(self) -> None:
        """Ends connections whose deadline has passed, and returns free memory to the system after a burst."""
        now, self.date = time.monotonic(), b"date: " + formatdate(usegmt=True).encode()
        delay = now - self._next_sweep
        for client in list(self._open):
            if delay > _SWEEP_S:  # this process was busy and did not read what clients sent
                client.deadline += delay
            if client.deadline <= now:
                client.expire()
        if self._has_burst and self._held < _TRIM_BYTES:
            self._has_burst = False
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # only glibc has it, and needs it
        self._next_sweep = time.monotonic() + _SWEEP_S
        asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


def allow_files(num_connections: int) -> None:
    """Raises the limit on open files of this process and its later workers, up to the system's limit."""
    num_files = num_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < num_files:
        most = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
