"""The time in which a process works. ``girih status``, Prometheus and the autoscaler use it.

A process is *busy* while it works. It is not busy while it waits for another process: for an answer, for a request,
for space at the receiver of its output, or for other members of a collective. A wait for a thread of the process, for
the disk, for the GPU or for a core counts as work. All times are wall-clock times, not CPU times (decision 67).
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
"""The lock for the seconds of all :class:`Busy` objects, because one :class:`Busy` may count the work of another.

It is reentrant, because a garbage collection while it is held may end another wait.
"""


class _ThreadState(threading.local):
    spell: tuple[Busy, float] | None = None


_OWN = _ThreadState()


class Busy:
    """Counts the seconds in which some threads work: all threads of a process, or helper threads. Thread-safe.

    A moment in which several threads work counts once.
    """

    def __init__(self) -> None:
        self._working = 0.0  # the sum of shares of the threads that work now
        self._counted_s, self._since_s = 0.0, time.perf_counter()
        self._waiting: list[tuple[Busy, float]] = []  # objects that also count this work, with shares

    def seconds(self) -> float:
        """Returns the seconds so far, including work in progress. The value never decreases."""
        with _LOCK:
            self._change(0.0)
            return self._counted_s

    @contextmanager
    def working(self, share: float = 1.0) -> Iterator[None]:
        """Counts the body of a ``with`` statement as work of this thread, except the parts within :func:`waiting`.

        Args:
            share: the weight of this thread's time. If several threads do the same work in parallel, use 1 divided by
                the number of these threads.
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
    """Counts the body of a ``with`` statement as a wait for another process, within :meth:`Busy.working`.

    Args:
        helper: the threads of this process for which the body waits. Their work during the wait still counts.
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
    """Returns the result of a future. Until then, this thread is :func:`waiting`."""
    if future.done():
        return future.result()
    with waiting(helper):
        return future.result()


@contextmanager
def holding(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock whose owner may wait for another process. Until the lock is free, this thread is :func:`waiting`."""
    with waiting():
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
