"""The service of a role: its requests are done one after the other, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from girih.comm.endpoints import listen
from girih.comm.rpc import Request


class Address(Protocol):
    """Interface of a role to its service: where it listens, the secret that callers prove to know, and how often the role was restarted: see :func:`listen`."""

    address: str
    secret: bytes
    incarnation: int


class Service:
    """Answers requests; an exception is the answer too."""

    def __init__(self, verbs: Mapping[int, Callable[[Request], None]]) -> None:
        self._verbs = verbs
        self._pool = ThreadPoolExecutor(1, "girih-serve")

    def serve(self, at: Address, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Answers until ``stop`` is set; says where it listens by ``ready``."""
        with (
            self._pool,
            listen(
                self.handle,
                address=at.address,
                secret=at.secret,
                incarnation=at.incarnation,
                gone=self.forget,
            ) as server,
        ):
            ready(server.address)
            stop.wait()

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        self.later(request, lambda: self._verbs[request.frame.kind](request))

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back. Called by the server's thread: be quick."""

    def later(self, request: Request, work: Callable[[], None]) -> None:
        """Does work for a request after all that waits."""
        self._pool.submit(attempt, request, work)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does work that nobody waits for after all that waits; whoever asks for what it failed to do is told."""
        self._pool.submit(work)


def attempt(request: Request, work: Callable[[], None]) -> None:
    """Does work for a request; answers it by what goes wrong."""
    try:
        work()
    except Exception as error:
        request.fail(error)
