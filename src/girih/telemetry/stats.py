"""Statistics of one process: counters, gauges, histograms and spans, read by one verb."""

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
"""Numbers by name, or by the name of a kind and their own, read from another thread than that which moves them: plain integers and floats."""
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
STALENESS = "staleness"
"""Histogram of a trainer, over its batches."""
BOUNDS_S = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations, in seconds; one more bucket has the rest."""


class StatsSnapshot(TypedDict):
    """The statistics of a process as plain values; see :class:`Stats`."""

    counters: dict[str, int]
    gauges: dict[str, float]
    histograms: dict[str, dict[str, int]]
    spans: list[tuple[str, float, float]]


class Stats:
    """Statistics of one process; spans and bytes from any thread, the others from one thread each, or under a lock.

    Attributes:
        counters: name → how often, or how many bytes; ``wire.<kind>`` for bytes sent.
        gauges: name → the latest value.
        histograms: name → value → how often.
        spans: phases, timed.
        requests: verb → how long requests took, from when they came to when they were answered.
        busy: how long the process worked.
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
        """A process has its own: what a role takes along to its process is empty."""
        return Stats, ()

    def watch(self, source: StatsSource) -> None:
        """Has :meth:`reading` ask for more numbers, from another thread, until :meth:`unwatch`."""
        with self._reading:
            self._sources.append(source)

    def unwatch(self) -> None:
        """Returns once no source is asked any more: what they read may be given back."""
        with self._reading:
            self._sources.clear()

    def reading(self) -> dict[str, object]:
        """The numbers as they are now, as plain values for JSON; from any thread, while others count.

        Returns:
            ``counters``, ``histograms``, ``phases`` and ``requests`` (see :meth:`Spans.read`), ``busy_s``, and ``live``: what
            sources say, where several have one name its sum.
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
        """Counts bytes that this process sent to others; from any thread."""
        with self._adding:
            self.counters[WIRE + kind] += num_bytes

    def wire_bytes(self) -> dict[str, int]:
        """Bytes sent by this process, by kind."""
        return wire_bytes(self.counters)

    def snapshot(self, *, spans: bool = True) -> StatsSnapshot:
        """Everything, as plain values for JSON; ``spans`` may be many."""
        return {
            "counters": dict(self.counters),
            "gauges": dict(self.gauges),
            "histograms": self._plain_histograms(),
            "spans": self.spans.events() if spans else [],
        }

    def _plain_histograms(self) -> dict[str, dict[str, int]]:
        # copies of a dict are one operation, that no thread interrupts
        histograms = {name: dict(self.histograms[name]) for name in list(self.histograms)}
        return {name: {str(v): n for v, n in each.items()} for name, each in histograms.items()}


def wire_bytes(counters: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind, from counters."""
    return {name.removeprefix(WIRE): n for name, n in counters.items() if name.startswith(WIRE)}


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, Mapping):
        return one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


class Spans:
    """Durations by name, counted in fixed buckets; from any thread.

    The first ``max_events`` whose start is known are kept as a timeline.

    Attributes:
        totals_s: name → seconds in all.
    """

    def __init__(self, max_events: int = 4000) -> None:
        self.totals_s: defaultdict[str, float] = defaultdict(float)
        self._counts: dict[str, list[int]] = {}
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
            self.add(name, time.perf_counter() - start, start)

    def add(self, name: str, seconds: float, start: float | None = None) -> None:
        """Counts one, which began at ``start`` (of ``time.perf_counter``)."""
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._adding:
            if name not in self._counts:
                self._counts[name] = [0] * (len(BOUNDS_S) + 1)
            self._counts[name][bucket] += 1
            self.totals_s[name] += seconds
        if start is not None and len(self._events) < self._max_events:
            self._events.append((name, start, seconds))

    def read(self) -> dict[str, dict[str, object]]:
        """Name → ``counts`` in the buckets of ``BOUNDS_S`` and of the rest, and ``sum_s``."""
        with self._adding:
            return {n: {"counts": list(c), "sum_s": self.totals_s[n]} for n, c in self._counts.items()}

    def events(self) -> list[tuple[str, float, float]]:
        """(name, start in seconds of ``time.perf_counter``, which processes of a machine share, seconds)."""
        return list(self._events)

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yields the items and times how long each takes to arrive."""
        while True:
            with self(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
