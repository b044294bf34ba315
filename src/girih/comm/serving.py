"""The service of a role: its requests are done one after the other, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from girih.comm.endpoints import listen
from girih.comm.rpc import Request
from girih.runs.stats import Stats


class Address(Protocol):
    """Interface of a role to its service: where it listens, the secret that callers prove to know, and how often the role was restarted: see :func:`listen`."""

    address: str
    secret: bytes
    incarnation: int


class Service:
    """Answers requests; an exception is the answer too.

    Args:
        stats: of this process; they have how long requests took, how many wait, and how long the thread worked.
    """

    def __init__(self, verbs: Mapping[Any, Callable[[Request], None]], stats: Stats) -> None:
        self._verbs = verbs
        self._timers = timers(verbs, stats)
        self._pool = ThreadPoolExecutor(1, "girih-serve")
        self._num_asked, self._asking = 0, threading.Lock()
        self._num_done = 0  # by the one thread
        self._watch, self._busy = stats.watch, stats.busy

    def serve(self, at: Address, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Answers until ``stop`` is set; says where it listens by ``ready``."""
        self._watch(self._live)
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
        request.answered = self._timers.get(request.frame.kind)
        self.later(request, lambda: self._verbs[request.frame.kind](request))

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back. Called by the server's thread: be quick."""

    def later(self, request: Request, work: Callable[[], None]) -> None:
        """Does work for a request after all that waits."""
        self._submit(partial(attempt, request, work))

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does work that nobody waits for after all that waits; whoever asks for what it failed to do is told."""
        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        with self._asking:
            self._num_asked += 1
        self._pool.submit(self._do, work)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            with self._busy.working():
                work()
        finally:
            self._num_done += 1

    def _live(self) -> dict[str, Any]:
        return {"queues": {"requests": max(0, self._num_asked - self._num_done)}}


def timers(verbs: Mapping[Any, Any], stats: Stats) -> dict[int, Callable[[float], None]]:
    """Counts the seconds of requests: a function for each verb."""
    named = {verb: verb.name.lower() for verb in verbs if isinstance(verb, IntEnum)}
    return {int(verb): partial(stats.requests.add, name) for verb, name in named.items()}


def attempt(request: Request, work: Callable[[], None]) -> None:
    """Does work for a request; answers it by what goes wrong."""
    try:
        work()
    except Exception as error:
        request.fail(error)
