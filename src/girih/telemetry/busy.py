"""Time in which a process works: ``girih status``, Prometheus and the autoscaler go by it.

A process is *busy* while it does work of its own. It is not while it waits for another process: for an answer, for a request, for room
at whoever takes what it makes, for the others of a collective. A wait for its own threads, its disk, its GPU or a core is work. Seconds
are those of the clock, not of a processor (decision 67).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_LOCK = threading.RLock()
"""Held while the seconds of any :class:`Busy` are counted: one may count what another one does. Whoever collects garbage meanwhile may
end another wait."""


class _ThreadState(threading.local):
    spell: tuple[Busy, float] | None = None


_OWN = _ThreadState()


class Busy:
    """Seconds in which some threads work: all those of a process, or a helper of one of them; from any thread.

    A moment counts once, however many threads work in it.
    """

    def __init__(self) -> None:
        self._working = 0.0  # shares of the threads that work now
        self._counted_s, self._since_s = 0.0, time.perf_counter()
        self._waiting: list[tuple[Busy, float]] = []  # who counts what this one does, and by which share

    def seconds(self) -> float:
        """Seconds so far, those of work under way included; never falls."""
        with _LOCK:
            self._change(0.0)
            return self._counted_s

    @contextmanager
    def working(self, share: float = 1.0) -> Iterator[None]:
        """Counts the body as work of this thread, but for its :func:`waiting`.

        Args:
            share: of the moments of a process where several threads do the same side by side: 1 divided by their number.
        """
        before = _OWN.spell
        self._add(share)
        _OWN.spell = self, share
        try:
            yield
        finally:
            _OWN.spell = before
            self._add(-share)

    def _add(self, share: float) -> None:
        with _LOCK:
            self._change(share)

    def _change(self, share: float) -> None:
        now = time.perf_counter()
        self._counted_s += min(1.0, max(0.0, self._working)) * (now - self._since_s)
        self._since_s = now
        self._working += share
        for other, of_other in tuple(self._waiting):
            other._change(share * of_other)

    def _leave(self, share: float, helper: Busy | None) -> None:
        with _LOCK:
            self._change(-share)
            if helper is not None:
                helper._waiting.append((self, share))
                self._change(share * helper._working)

    def _return(self, share: float, helper: Busy | None) -> None:
        with _LOCK:
            if helper is not None:
                helper._waiting.remove((self, share))
                self._change(-share * helper._working)
            self._change(share)


@contextmanager
def waiting(helper: Busy | None = None) -> Iterator[None]:
    """Counts the body as no work of this thread, where it is within some: another process has to do something first.

    Args:
        helper: threads of this process that are waited for; what they work meanwhile is work all the same.
    """
    spell = _OWN.spell
    if spell is None:
        yield
        return
    busy, share = spell
    busy._leave(share, helper)
    _OWN.spell = None
    try:
        yield
    finally:
        _OWN.spell = spell
        busy._return(share, helper)


def awaited(future: Future[T], helper: Busy | None = None) -> T:
    """The result of a future; until it is there, this thread is :func:`waiting`."""
    if future.done():
        return future.result()
    with waiting(helper):
        return future.result()


@contextmanager
def holding(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock that another thread may hold while it waits for a process; until it is free, this thread is :func:`waiting`."""
    with waiting():
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
