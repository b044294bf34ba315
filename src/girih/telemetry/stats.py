"""Statistics of one process: counters, gauges, histograms and spans. Other processes read them by one verb."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar

from girih.telemetry.busy import Busy

T = TypeVar("T")
LiveNumber = float | Mapping[str, float]
StatsSource = Callable[[], Mapping[str, LiveNumber]]
"""A function that returns plain numbers by name, or by kind and name. Other threads call it."""
WIRE = "wire."
"""The prefix of counters of sent bytes, by kind."""
UPDATES_SINCE_READ = "updates since read"
"""A histogram of an embedding server: for each batch, the updates between the read of its rows and its own update."""
DENSE_STALENESS = "dense staleness"
"""A histogram of a process with dense parameters: for each write, other nets' writes since its net began to read."""
ASKED_KEYS, SERVED_ROWS = "asked_keys", "served_rows"
"""Counters of a trainer with rows, in training steps.

They count the keys that all trainers requested from it, and the same keys without repetitions within a step.
"""
PACED_KEYS = "paced_keys"
"""A counter with the same value on all trainers.

Each step adds the largest number of keys requested from a trainer, times the number of trainers.
"""
COMPILE = "compile"
"""The phase in which torch compiles the dense half. It is part of steps, but no rate counts it."""
EXCHANGE_NS = "exchange_ns"
"""A counter of a trainer: the nanoseconds of its training steps in exchanges with other trainers."""
STALENESS = "staleness"
"""A histogram of a trainer: the staleness of batches."""
BOUNDS_S = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations, in seconds. One more bucket counts longer durations."""


class StatsSnapshot(TypedDict):
    """The statistics of a process as plain values; see :class:`Stats`."""

    counters: dict[str, int]
    gauges: dict[str, float]
    histograms: dict[str, dict[str, int]]
    spans: list[tuple[str, float, float]]


class Stats:
    """Statistics of one process. Any thread may add spans and bytes. Each other number needs one thread, or a lock.

    Attributes:
        counters: counts and numbers of bytes, by name. ``wire.<kind>`` has the sent bytes.
        gauges: the latest values, by name.
        histograms: the count of each value, by name.
        spans: the timed phases.
        requests: the times from the arrival of requests to the replies, by verb.
        busy: the time in which the process worked.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.histograms: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.spans = Spans()
        self.requests = Spans()
        self.busy = Busy()
        self._adding = threading.Lock()
        self._sources: list[StatsSource] = []
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[type[Stats], tuple[()]]:
        """Pickles as an empty object, because each process has separate statistics."""
        return Stats, ()

    def watch(self, source: StatsSource) -> None:
        """Adds a source of numbers to :meth:`reading` until :meth:`unwatch`. Other threads call the source."""
        with self._reading:
            self._sources.append(source)

    def unwatch(self) -> None:
        """Removes the sources. Waits until no source is being read, so that their data may be released."""
        with self._reading:
            self._sources.clear()

    def reading(self) -> dict[str, object]:
        """Returns the current numbers, as plain values for JSON. Any thread may call it while other threads count.

        Returns:
            ``counters``, ``histograms``, ``phases`` and ``requests`` (see :meth:`Spans.read`), ``busy_s``, and
            ``live``. ``live`` has the numbers of the sources. Numbers of several sources with the same name are added.
        """
        live: dict[str, LiveNumber] = {}
        with self._reading:
            for source in self._sources:
                for name, value in source().items():
                    live[name] = _sum(live[name], value) if name in live else value
        return {
            "counters": dict(self.counters),
            "histograms": self._plain_histograms(),
            "phases": self.spans.read(),
            "requests": self.requests.read(),
            "busy_s": self.busy.seconds(),
            "live": live,
        }

    def sent(self, kind: str, num_bytes: int) -> None:
        """Counts bytes that this process sent to other processes. Thread-safe."""
        with self._adding:
            self.counters[WIRE + kind] += num_bytes

    def wire_bytes(self) -> dict[str, int]:
        """Returns the bytes that this process sent, by kind."""
        return wire_bytes(self.counters)

    def snapshot(self, *, spans: bool = True) -> StatsSnapshot:
        """Returns all statistics as plain values for JSON. ``spans`` includes the timeline, which may be large."""
        return {
            "counters": dict(self.counters),
            "gauges": dict(self.gauges),
            "histograms": self._plain_histograms(),
            "spans": self.spans.events() if spans else [],
        }

    def _plain_histograms(self) -> dict[str, dict[str, int]]:
        # Copying a dict is one operation, which no other thread interrupts.
        histograms = {name: dict(self.histograms[name]) for name in list(self.histograms)}
        return {name: {str(v): n for v, n in each.items()} for name, each in histograms.items()}


def wire_bytes(counters: Mapping[str, int]) -> dict[str, int]:
    """Returns the sent bytes by kind, from counters."""
    return {name.removeprefix(WIRE): n for name, n in counters.items() if name.startswith(WIRE)}


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, Mapping):
        return one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


class Spans:
    """Durations by name, counted in fixed buckets. Thread-safe.

    The first ``max_events`` spans with a known start form a timeline.

    Attributes:
        totals_s: the total seconds of each name.
    """

    def __init__(self, max_events: int = 4000) -> None:
        self.totals_s: defaultdict[str, float] = defaultdict(float)
        self._counts: dict[str, list[int]] = {}
        self._events: list[tuple[str, float, float]] = []
        self._max_events = max_events
        self._adding = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the duration of the body of a ``with`` statement."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, start)

    def add(self, name: str, seconds: float, start: float | None = None) -> None:
        """Counts a duration that began at ``start`` (of ``time.perf_counter``)."""
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._adding:
            if name not in self._counts:
                self._counts[name] = [0] * (len(BOUNDS_S) + 1)
            self._counts[name][bucket] += 1
            self.totals_s[name] += seconds
        if start is not None and len(self._events) < self._max_events:
            self._events.append((name, start, seconds))

    def read(self) -> dict[str, dict[str, object]]:
        """Returns by name the ``counts`` of the buckets of ``BOUNDS_S`` and of the last bucket, and ``sum_s``."""
        with self._adding:
            return {n: {"counts": list(c), "sum_s": self.totals_s[n]} for n, c in self._counts.items()}

    def events(self) -> list[tuple[str, float, float]]:
        """Returns (name, start, seconds) of each span in the timeline.

        The start is from ``time.perf_counter``, which the processes of a machine share.
        """
        return list(self._events)

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yields the items, and measures the time until each item arrives."""
        while True:
            with self(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
