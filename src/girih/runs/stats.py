"""Statistics of one process: counters, gauges, histograms and spans, read by one verb."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
WIRE = "wire."
"""Prefix of counters of bytes sent, by kind."""
UPDATES_SINCE_READ = "updates since read"
"""Histogram of an embedding server, over batches: updates of all trainers between the read of rows and their own."""
DENSE_STALENESS = "dense staleness"
"""Histogram of a process that holds dense parameters, over the writes of nets: writes of others since the net began to read."""
ASKED_KEYS, SERVED_ROWS = "asked_keys", "served_rows"
"""Counters of a trainer that holds rows, in training steps: keys that all trainers asked it for, and those without
repeats within a step."""
PACED_KEYS = "paced_keys"
"""Counter, the same on all trainers: over steps, the most keys that any trainer was asked for, times the number of trainers."""
COMPILE = "compile"
"""The phase in which torch compiles the dense half: of steps, but counted in no rate."""
EXCHANGE_NS = "exchange_ns"
"""Counter of a trainer: nanoseconds of its training steps in exchanges with the others."""


class Stats:
    """Statistics of one process; spans and bytes from any thread, the others from one thread each, or under a lock.

    Attributes:
        counters: name → how often, or how many bytes; ``wire.<kind>`` for bytes sent.
        gauges: name → the latest value.
        histograms: name → value → how often.
        spans: phases, timed.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.histograms: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.spans = Spans()
        self._adding = threading.Lock()

    def sent(self, kind: str, num_bytes: int) -> None:
        """Counts bytes that this process sent to others; from any thread."""
        with self._adding:
            self.counters[WIRE + kind] += num_bytes

    def wire_bytes(self) -> dict[str, int]:
        """Bytes sent by this process, by kind."""
        return wire_bytes(self.counters)

    def snapshot(self, *, spans: bool = True) -> dict[str, Any]:
        """Everything, as plain values for JSON; ``spans`` may be many."""
        return {
            "counters": dict(self.counters),
            "gauges": dict(self.gauges),
            "histograms": {n: {str(v): c for v, c in h.items()} for n, h in self.histograms.items()},
            "spans": self.spans.events() if spans else [],
        }


def wire_bytes(counters: Any) -> dict[str, int]:
    """Bytes by kind, from counters."""
    return {name.removeprefix(WIRE): n for name, n in counters.items() if name.startswith(WIRE)}


class Spans:
    """Named phases; the first ``max_events`` are kept as a timeline, all of them as totals in seconds."""

    def __init__(self, max_events: int = 4000) -> None:
        self.totals_s: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, float, float]] = []
        self._max_events = max_events
        self._adding = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the body."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter() - start)

    def add(self, name: str, start: float, seconds: float) -> None:
        """Adds a phase that began at ``start`` (of ``time.perf_counter``)."""
        with self._adding:
            self.totals_s[name] += seconds
        if len(self._events) < self._max_events:
            self._events.append((name, start, seconds))

    def events(self) -> list[tuple[str, float, float]]:
        """(name, start in seconds of ``time.perf_counter``, which processes of a machine share, seconds)."""
        return list(self._events)

    def each(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Passes items through, timing how long each took to come."""
        while True:
            with self(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
