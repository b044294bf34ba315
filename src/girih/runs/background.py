"""Results that are computed beside training and told between two steps, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_WAITING = 4  # each holds what it computes from


class BackgroundTasks:
    """One thread, called ``name``, that computes, and a queue of what is to be told of it."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, name)
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._waiting)

    def submit(self, compute: Callable[[], Any], tell: Callable[[Any], None]) -> None:
        """Computes in the thread; ``tell`` gets the result in :meth:`settle`, by the caller's thread."""
        while len(self._waiting) >= MOST_WAITING:
            self._tell_next()
        self._waiting.append((self._worker.submit(compute), tell))

    def settle(self, *, wait: bool = False) -> None:
        """Tells what is ready, or with ``wait`` everything; what a computation raised is raised here."""
        while self._waiting and (wait or self._waiting[0][0].done()):
            self._tell_next()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being computed."""
        return all(future.done() for future, _ in self._waiting)

    def close(self) -> None:
        """Settles everything and ends the thread."""
        try:
            self.settle(wait=True)
        finally:
            self._worker.shutdown()

    def _tell_next(self) -> None:
        future, tell = self._waiting.popleft()
        tell(future.result())
