"""The metrics of a process: their names, and their values in a reading. Nothing of Prometheus is imported here."""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from girih.config.train import MetricsOptions
from girih.errors import ConfigError
from girih.telemetry.stats import (
    BOUNDS_S,
    DENSE_STALENESS,
    STALENESS,
    UPDATES_SINCE_READ,
    WIRE,
    Stats,
)
from girih.telemetry.status_file import BEGUN_S, ProcessId, StatusTarget, cpu_s, resident_bytes

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


Kind = Literal["counter", "gauge", "histogram"]
BATCHES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""Upper bounds of the buckets of counts of batches and updates."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; every sample has the labels ``role``, ``index``, ``incarnation`` and ``run`` besides.

    Attributes:
        name: as Prometheus has it, of a histogram without ``_bucket``, ``_sum`` and ``_count``.
        label: the one that tells its samples apart, if there are several.
    """

    name: str
    kind: Kind
    about: str
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, the last one without a bound, and the sum of all values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


Sample = tuple[str, str | None, float | Histogram]
"""Name of the metric, value of its label, value."""

METRICS = (
    Metric("girih_steps_total", "counter", "Batches trained on, refused ones included."),
    Metric("girih_examples_total", "counter", "Examples trained on: of all trainers, as this trainer's batches are its share of."),
    Metric("girih_refused_steps_total", "counter", "Steps refused for a NaN or an infinity."),
    Metric("girih_lost_updates_total", "counter", "Updates that a restarted process took along."),
    Metric("girih_staleness_batches", "histogram", "Earlier batches of this trainer that were not applied when a batch's rows were read."),
    Metric("girih_updates_since_read", "histogram", "Updates of all trainers between the read of rows and their own."),
    Metric("girih_dense_staleness_writes", "histogram", "Writes of other nets to dense parameters since a net began to read."),
    Metric("girih_lookup_seconds", "histogram", "Reading the rows of one request from the tables of a server."),
    Metric("girih_update_seconds", "histogram", "Applying one update to the tables of a server."),
    Metric("girih_request_seconds", "histogram", "A request, from when it came to when it was answered.", "verb"),
    Metric("girih_phase_seconds", "histogram", "One pass through any other phase of the process.", "phase"),
    Metric("girih_queue_depth", "gauge", "What waits in the process: requests, samples, shares, updates or batches.", "queue"),
    Metric("girih_busy_seconds_total", "counter", "Time in which the process worked, and did not wait for another one."),
    Metric("girih_rows", "gauge", "Rows of a table in this process.", "table"),
    Metric("girih_lookups_total", "counter", "Keys read for training."),
    Metric("girih_hits_total", "counter", "Keys read for training that had a row."),
    Metric("girih_new_rows_total", "counter", "Rows made."),
    Metric("girih_refused_keys_total", "counter", "Keys that were not admitted."),
    Metric("girih_full_total", "counter", "Keys that found their table full."),
    Metric("girih_evictions_total", "counter", "Rows that made room for others."),
    Metric("girih_expirations_total", "counter", "Rows dropped for their age."),
    Metric("girih_row_updates_total", "counter", "Gradients of rows that were applied."),
    Metric("girih_dropped_gradients_total", "counter", "Gradients of keys without a row."),
    Metric("girih_tier_reads_total", "counter", "Rows that training read from a tier, where there are several.", "tier"),
    Metric("girih_ssd_bytes_total", "counter", "Bytes read from the SSD and written to it.", "direction"),
    Metric("girih_sent_bytes_total", "counter", "Bytes that this process sent to others.", "kind"),
    Metric("girih_retries_total", "counter", "Connections to other processes that were made again."),
    Metric("girih_lost_calls_total", "counter", "Calls that a restarted process took along."),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory."),
    Metric("process_cpu_seconds_total", "counter", "Time of all cores."),
    Metric("process_start_time_seconds", "gauge", "When the process began, in seconds since 1970."),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}

_LIVE = {
    "steps": "girih_steps_total",
    "examples": "girih_examples_total",
    "refused": "girih_refused_steps_total",
    "retries": "girih_retries_total",
    "lost_calls": "girih_lost_calls_total",
}
_STORE = {
    "lookups": "girih_lookups_total",
    "hits": "girih_hits_total",
    "new": "girih_new_rows_total",
    "refused": "girih_refused_keys_total",
    "full": "girih_full_total",
    "evicted": "girih_evictions_total",
    "expired": "girih_expirations_total",
    "updates": "girih_row_updates_total",
    "dropped": "girih_dropped_gradients_total",
}
_COUNTERS = {"lost_updates": "girih_lost_updates_total"}
_HISTOGRAMS = {
    STALENESS: "girih_staleness_batches",
    UPDATES_SINCE_READ: "girih_updates_since_read",
    DENSE_STALENESS: "girih_dense_staleness_writes",
}
_PHASES = {"lookup": "girih_lookup_seconds", "update": "girih_update_seconds"}
_SSD_BYTES = {"ssd_bytes_read": "read", "ssd_bytes_written": "written"}


def samples(reading: Mapping[str, Any]) -> Iterator[Sample]:
    """All samples of a reading of :meth:`girih.telemetry.status_writer.StatusWriter.read`."""
    stats = reading["stats"]
    counters, live = stats["counters"], stats["live"]
    yield "process_resident_memory_bytes", None, reading["rss_bytes"]
    yield "process_cpu_seconds_total", None, reading["cpu_s"]
    yield "girih_busy_seconds_total", None, stats["busy_s"]
    for names, values in ((_LIVE, live), (_STORE, live.get("store", {})), (_COUNTERS, counters)):
        for key, name in names.items():
            if key in values:
                yield name, None, values[key]
    for table, rows in live.get("rows", {}).items():
        yield "girih_rows", table, rows
    for queue, depth in live.get("queues", {}).items():
        yield "girih_queue_depth", queue, depth
    for counter, value in counters.items():
        if counter.startswith(WIRE):
            yield "girih_sent_bytes_total", counter.removeprefix(WIRE), value
    for counter, value in live.get("store", {}).items():
        if counter.endswith("_reads"):
            yield "girih_tier_reads_total", counter.removesuffix("_reads"), value
        elif counter in _SSD_BYTES:
            yield "girih_ssd_bytes_total", _SSD_BYTES[counter], value
    for key, counts in stats["histograms"].items():
        if key in _HISTOGRAMS:
            yield _HISTOGRAMS[key], None, _of_integers(counts)
    for phase, durations in stats["phases"].items():
        label = None if phase in _PHASES else phase
        yield _PHASES.get(phase, "girih_phase_seconds"), label, _of_durations(**durations)
    for verb, durations in stats["requests"].items():
        yield "girih_request_seconds", verb, _of_durations(**durations)


def _of_durations(counts: Sequence[int], sum_s: float) -> Histogram:
    return Histogram(BOUNDS_S, counts, sum_s)


def _of_integers(counts: Mapping[str, int]) -> Histogram:
    buckets = [0] * (len(BATCHES) + 1)
    for value, times in counts.items():
        buckets[bisect_left(BATCHES, int(value))] += times
    return Histogram(BATCHES, buckets, float(sum(int(value) * times for value, times in counts.items())))


MOST_PORTS = 1000
"""Ports that are tried, from the first on."""


class Endpoint:
    """A server of this process's metrics, until it is closed.

    Attributes:
        address: ``HOST:PORT``.

    Raises:
        ConfigError: prometheus-client is missing, or no port is free.
    """

    def __init__(self, who: ProcessId, place: StatusTarget, stats: Stats) -> None:
        require_client(place.metrics)
        from prometheus_client import CollectorRegistry, start_http_server

        self._stats = stats
        self._labels = {"role": who.role, "index": str(who.index)}
        self._labels |= {"incarnation": str(who.incarnation), "run": place.name}
        registry = CollectorRegistry()
        registry.register(self)
        first, host = place.metrics.port or 0, place.metrics.bind
        for port in range(first, min(first + MOST_PORTS, 65_536)) if first else (0,):
            try:
                self._server, self._thread = start_http_server(port, host, registry)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    message = f"metrics: {host}:{port}: {error.strerror}; set metrics.bind to an address of this host"
                    raise ConfigError(message) from None
        else:
            raise ConfigError(f"metrics: port = {first}: no port is free from there on; set another, or 0")
        self.address = f"{host}:{self._server.server_port}"

    def collect(self) -> Iterator[Family]:
        """All metrics as they are now, for Prometheus's registry."""
        by_name: defaultdict[str, list[Sample]] = defaultdict(list)
        reading = {"cpu_s": cpu_s(), "rss_bytes": resident_bytes(), "stats": self._stats.reading()}
        for sample in (("process_start_time_seconds", None, BEGUN_S), *samples(reading)):
            by_name[sample[0]].append(sample)
        for name, family_samples in by_name.items():
            yield self._family(name, family_samples)

    def close(self) -> None:
        """Serves no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _family(self, name: str, family_samples: list[Sample]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metric = BY_NAME[name]
        names = [*self._labels, *([] if metric.label is None else [metric.label])]
        histogram = HistogramMetricFamily(name, metric.about, labels=names)
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        number = kind(name, metric.about, labels=names)
        for _, label_value, value in family_samples:
            labels = [*self._labels.values(), *([] if label_value is None else [label_value])]
            if isinstance(value, Histogram):
                bounds = [*map(str, map(float, value.bounds)), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
                histogram.add_metric(labels, buckets, value.total)
            else:
                number.add_metric(labels, value)
        return histogram if metric.kind == "histogram" else number


def require_client(options: MetricsOptions) -> None:
    """Refuses to serve metrics without the package that does it.

    Raises:
        ConfigError: it is not installed.
    """
    if options.port is None:
        return
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"metrics: port = {options.port} needs a package that is not installed; pip install 'girih[metrics]'"
        ) from None
