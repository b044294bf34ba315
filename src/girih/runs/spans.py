"""Spans: how long each phase of a step took, and when."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Spans:
    """Times named phases; keeps the first ``max_events`` as a timeline, and all as totals in seconds."""

    def __init__(self, max_events: int = 4000) -> None:
        self.totals_s: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, float, float]] = []
        self._max_events = max_events
        self._origin = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the body."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter() - start)

    def add(self, name: str, start: float, seconds: float) -> None:
        """Counts a phase that began at ``start`` (of ``time.perf_counter``); from any thread."""
        self.totals_s[name] += seconds
        if len(self._events) < self._max_events:
            self._events.append((name, start - self._origin, seconds))

    def events(self) -> list[tuple[str, float, float]]:
        """(name, start in seconds of ``time.perf_counter``, which processes of a machine share, seconds)."""
        return [(name, self._origin + start, seconds) for name, start, seconds in self._events]

    def each(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Passes items through, timing how long each took to come."""
        while True:
            with self(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
