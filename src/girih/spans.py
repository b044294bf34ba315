"""Spans: how long each phase of a step took, as a Chrome trace and as shares."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from girih.files import write_whole

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
            seconds = time.perf_counter() - start
            self.totals_s[name] += seconds
            if len(self._events) < self._max_events:
                self._events.append((name, start - self._origin, seconds))

    def each(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Passes items through, timing how long each took to come."""
        while True:
            with self(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def write(self, path: Path) -> None:
        """Writes the timeline in Chrome's trace format: open it in Perfetto, or see it in the report."""
        events = [
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": round(start * 1e6),
                "dur": round(seconds * 1e6),
            }
            for name, start, seconds in self._events
        ]
        totals = {name: round(seconds, 6) for name, seconds in self.totals_s.items()}
        write_whole(path, json.dumps({"traceEvents": events, "totals_s": totals}))
