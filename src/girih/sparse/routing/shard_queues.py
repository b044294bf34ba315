"""Queues of work for the shards of one process. Different shards work in parallel (Persia §4.2.2).

Each shard does its work in the order in which it was put. So its rows become the same as if the whole process did one
piece of work after the other. Work on one shard does not wait for other shards.

Shapes: S shards, P parts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from girih.telemetry.stats import Stats

_LOG = logging.getLogger(__name__)
Done: TypeAlias = Callable[[Exception | None], None]
"""Called when work has ended, with the first error of the parts that the caller waits for."""


@dataclass
class _Work:
    """Work on all parts, and the parts that must still end before its caller is called."""

    name: str
    do: Callable[[range], None]
    done: Done
    awaited: set[int]
    errors: dict[int, Exception] = field(default_factory=dict)
    start_s: float = 0.0


class ShardQueues:
    """A few threads, each with a queue, do the work of all shards. Call the methods from a single thread.

    Args:
        num_shards, num_threads: S, P. The shards are split into at most P parts of adjacent shards, one per thread.

    Attributes:
        parts: the shards of each part.
        num_waiting: the number of pieces of work whose callers wait.
    """

    def __init__(self, num_shards: int, num_threads: int, stats: Stats) -> None:
        num_parts = min(num_shards, num_threads)
        bounds = [num_shards * part // num_parts for part in range(num_parts + 1)]
        self.parts = list(map(range, bounds[:-1], bounds[1:]))
        self._stats, self._ending = stats, threading.Lock()
        self._threads = [ThreadPoolExecutor(1, "girih-shards") for _ in self.parts]
        self._last: list[Future[None]] = []  # of each thread
        self.num_waiting = 0

    @property
    def is_idle(self) -> bool:
        """True if all work has ended."""
        return all(last.done() for last in self._last)

    def put(
        self,
        name: str,
        do: Callable[[range], None],
        done: Done,
        awaited: Sequence[int],
        *,
        at_once: bool = False,
    ) -> None:
        """Puts work at the end of the queue of each part.

        Args:
            name: the name of the span that measures the work, without the time in queues.
            do: does the work of some shards.
            done: called by the thread that ends the last of the awaited parts.
            awaited: the parts that the caller waits for. The other parts do their work later, and only log errors.
            at_once: True does the work in this thread if the queues are empty, because waking threads would take longer.
        """
        work = _Work(name, do, done, set(awaited))
        if awaited:
            self._count_waiting(1)
        else:
            done(None)
        if at_once and self.is_idle:
            for part in range(len(self.parts)):
                self._run(work, part)
            return
        self._last = [
            thread.submit(partial(self._run_counted, work, part)) for part, thread in enumerate(self._threads)
        ]

    def drain(self) -> None:
        """Returns when all work has ended."""
        wait(self._last)

    def close(self) -> None:
        """Ends the threads after their work."""
        for thread in self._threads:
            thread.shutdown()

    def _count_waiting(self, change: int) -> None:
        with self._ending:
            self.num_waiting += change

    def _run_counted(self, work: _Work, part: int) -> None:
        with self._stats.busy.working(1 / len(self.parts)):
            self._run(work, part)

    def _run(self, work: _Work, part: int) -> None:
        work.start_s = work.start_s or time.perf_counter()
        try:
            work.do(self.parts[part])
        except Exception as error:
            if part in work.awaited:
                work.errors[part] = error
            else:
                _LOG.exception("shards %s: %s failed", self.parts[part], work.name)
        with self._ending:
            if part not in work.awaited:
                return
            work.awaited.remove(part)
            if work.awaited:
                return
        self._count_waiting(-1)
        self._stats.spans.add(work.name, time.perf_counter() - work.start_s, work.start_s)
        first = min(work.errors, default=None)
        work.done(None if first is None else work.errors[first])
