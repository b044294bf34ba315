"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from girih.config.bounds import Bounds, Count
from girih.config.options import Options

HOST, PORT = "127.0.0.1", 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Options):
    """Options of ``girih serve``.

    Attributes:
        host, port: where it listens; port 0 takes any that is free. Whoever reaches it is answered: nothing is asked of callers.
        workers: processes that share the port and the memory of the tables.
        threads: computing threads of each.
        max_batch: examples of a request; more is refused with status 413.
        max_bytes: of a request's body, likewise.
        model: the user's class, as ``file.py:Class``, that a follower serves.
    """

    host: str = HOST
    port: Annotated[int, Bounds(0, 65_535)] = PORT
    workers: Annotated[int, Bounds(1, 256)] = 1
    threads: Annotated[int, Bounds(1, 256)] = 1
    max_batch: Count = 8192
    max_bytes: Count = 64 << 20
    model: str | None = None

    def _owner(self) -> str:
        return "serve: "
