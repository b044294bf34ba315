"""Options of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from girih.config.bounds import Bounds, Count, Positive
from girih.config.options import Options
from girih.errors import ConfigError

HOST, PORT = "127.0.0.1", 8000
Notify = Callable[[str], None]
"""Receives a line about an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Options):
    """Options of ``girih serve``.

    Attributes:
        host, port: where it listens; port 0 takes any that is free. Whoever reaches it is answered: nothing is asked of callers.
        workers: processes that share the port and the memory of the tables.
        threads: computing threads of each.
        max_batch: examples of a request; more is refused with status 413.
        max_bytes: of a request's body, likewise.
        max_header_bytes: of a request's line and headers together; more is refused with status 431.
        max_unfinished_bytes: of all unfinished requests and unread answers of a process; beyond, the greediest get status 503.
        request_timeout: seconds from a request's first byte to its last (else status 408), and for reading an answer.
        max_connections: of a process; more are refused with status 503.
        model: the user's class, as ``file.py:Class``, that a follower serves.
    """

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

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if (most := self.max_unfinished_bytes) < self.max_bytes:
            raise ConfigError(
                f"serve: max_unfinished_bytes = {most:,}: expected at least max_bytes, {self.max_bytes:,}"
            )

    def _owner(self) -> str:
        return "serve: "
