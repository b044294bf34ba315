"""The Prometheus metrics of a process: their names and their values. Imports the Prometheus package only if needed."""

from __future__ import annotations

import errno
from bisect import bisect_left
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
    Stats,
    wire_bytes,
)
from girih.telemetry.status_file import BEGUN_S, ProcessId, StatusTarget, cpu_s, resident_bytes

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


Kind = Literal["counter", "gauge", "histogram"]
BATCHES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""Upper bounds of the buckets of counts of batches and updates."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Every sample also has the labels ``role``, ``index``, ``incarnation`` and ``run``.

    Attributes:
        name: the name in Prometheus. For a histogram, without ``_bucket``, ``_sum`` and ``_count``.
        source: ``GROUP.KEY``, the place of the metric's value in the result of :func:`values_of`.
        label: the label that distinguishes the samples, if there are several. The value is then a mapping by this
            label.
    """

    name: str
    kind: Kind
    about: str
    source: str
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, and the sum of all values. The last bucket has no upper bound."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


METRICS = (
    Metric("girih_steps_total", "counter", "Batches trained on, refused ones included.", "live.steps"),
    Metric("girih_examples_total", "counter", "Examples trained on: this trainer's share of each batch.", "live.examples"),
    Metric("girih_refused_steps_total", "counter", "Steps refused for a NaN or an infinity.", "live.refused"),
    Metric("girih_lost_updates_total", "counter", "Updates lost when a process was restarted.", "counters.lost_updates"),
    Metric("girih_staleness_batches", "histogram", "Earlier batches of this trainer that were not applied when a batch's rows were read.", f"histograms.{STALENESS}"),
    Metric("girih_updates_since_read", "histogram", "Updates of all trainers between the read of a batch's rows and the batch's own update.", f"histograms.{UPDATES_SINCE_READ}"),
    Metric("girih_dense_staleness_writes", "histogram", "Writes of other nets to dense parameters since a net began to read.", f"histograms.{DENSE_STALENESS}"),
    Metric("girih_lookup_seconds", "histogram", "Time to read the rows of one request from the tables of a server.", "phases.lookup"),
    Metric("girih_update_seconds", "histogram", "Time to apply one update to the tables of a server.", "phases.update"),
    Metric("girih_request_seconds", "histogram", "Time from the arrival of a request to its answer.", "labeled.requests", "verb"),
    Metric("girih_phase_seconds", "histogram", "Time of one pass through any other phase of the process.", "labeled.phases", "phase"),
    Metric("girih_queue_depth", "gauge", "Number of requests, samples, shares, updates or batches that wait in the process.", "live.queues", "queue"),
    Metric("girih_busy_seconds_total", "counter", "Time in which the process worked and did not wait for another process.", "process.busy_s"),
    Metric("girih_rows", "gauge", "Rows of a table in this process.", "live.rows", "table"),
    Metric("girih_lookups_total", "counter", "Keys read for training.", "store.lookups"),
    Metric("girih_hits_total", "counter", "Keys read for training that had a row.", "store.hits"),
    Metric("girih_new_rows_total", "counter", "Rows made.", "store.new"),
    Metric("girih_refused_keys_total", "counter", "Keys that were not admitted.", "store.refused"),
    Metric("girih_full_total", "counter", "Keys that found their table full.", "store.full"),
    Metric("girih_evictions_total", "counter", "Rows evicted to make room for others.", "store.evicted"),
    Metric("girih_expirations_total", "counter", "Rows dropped because of their age.", "store.expired"),
    Metric("girih_row_updates_total", "counter", "Gradients of rows that were applied.", "store.updates"),
    Metric("girih_dropped_gradients_total", "counter", "Gradients of keys without a row.", "store.dropped"),
    Metric("girih_tier_reads_total", "counter", "Rows that training read from a tier, if there are several.", "labeled.tier_reads", "tier"),
    Metric("girih_ssd_bytes_total", "counter", "Bytes read from the SSD and written to it.", "labeled.ssd_bytes", "direction"),
    Metric("girih_sent_bytes_total", "counter", "Bytes that this process sent to others.", "labeled.sent", "kind"),
    Metric("girih_retries_total", "counter", "Connections to other processes that were opened again.", "live.retries"),
    Metric("girih_lost_calls_total", "counter", "Calls lost when a process was restarted.", "live.lost_calls"),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory.", "process.rss_bytes"),
    Metric("process_cpu_seconds_total", "counter", "Processor time over all cores.", "process.cpu_s"),
    Metric("process_start_time_seconds", "gauge", "Start of the process, in seconds since 1970.", "process.begun_s"),
)  # fmt: skip


def values_of(process: Mapping[str, float], stats: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Maps group and key to the value of a metric: a number, a :class:`Histogram`, or a mapping of these by label.

    Args:
        process: the numbers of this process that the system reports.
        stats: the result of :meth:`girih.telemetry.stats.Stats.reading`.
    """
    live, counters, store = stats["live"], stats["counters"], stats["live"].get("store", {})
    phases = {name: _of_durations(**durations) for name, durations in stats["phases"].items()}
    labeled = {
        "requests": {verb: _of_durations(**durations) for verb, durations in stats["requests"].items()},
        "phases": {name: times for name, times in phases.items() if name not in ("lookup", "update")},
        "tier_reads": {
            name.removesuffix("_reads"): n for name, n in store.items() if name.endswith("_reads")
        },
        "ssd_bytes": {way: store[key] for way in ("read", "written") if (key := f"ssd_bytes_{way}") in store},
        "sent": wire_bytes(counters),
    }
    histograms = {name: _of_integers(counts) for name, counts in stats["histograms"].items()}
    return {
        "process": {**process, "busy_s": stats["busy_s"]}, "live": live, "store": store, "counters": counters,
        "phases": phases, "histograms": histograms, "labeled": labeled,
    }  # fmt: skip


def _of_durations(counts: Sequence[int], sum_s: float) -> Histogram:
    return Histogram(BOUNDS_S, counts, sum_s)


def _of_integers(counts: Mapping[str, int]) -> Histogram:
    buckets = [0] * (len(BATCHES) + 1)
    for value, times in counts.items():
        buckets[bisect_left(BATCHES, int(value))] += times
    return Histogram(BATCHES, buckets, float(sum(int(value) * times for value, times in counts.items())))


MOST_PORTS = 1000
"""The number of ports to try, starting at the first."""


class Endpoint:
    """A server for this process's metrics. It serves until it is closed.

    Attributes:
        address: ``HOST:PORT``.

    Raises:
        ConfigError: the package prometheus-client is not installed, or no port is free.
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
            raise ConfigError(f"metrics: port = {first}: no port from there on is free; set another, or 0")
        self.address = f"{host}:{self._server.server_port}"

    def collect(self) -> Iterator[Family]:
        """Yields all current metrics, for Prometheus's registry."""
        process = {"cpu_s": cpu_s(), "rss_bytes": resident_bytes(), "begun_s": BEGUN_S}
        values = values_of(process, self._stats.reading())
        for metric in METRICS:
            group, _, key = metric.source.partition(".")
            value = values[group].get(key)
            if value not in (None, {}):
                yield self._family(metric, {None: value} if metric.label is None else value)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _family(self, metric: Metric, samples: Mapping[str | None, float | Histogram]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names = [*self._labels, *([] if metric.label is None else [metric.label])]
        histogram = HistogramMetricFamily(metric.name, metric.about, labels=names)
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        number = kind(metric.name, metric.about, labels=names)
        for label_value, value in samples.items():
            labels = [*self._labels.values(), *([] if label_value is None else [label_value])]
            if isinstance(value, Histogram):
                bounds = [*map(str, map(float, value.bounds)), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
                histogram.add_metric(labels, buckets, value.total)
            else:
                number.add_metric(labels, value)
        return histogram if metric.kind == "histogram" else number


def require_client(options: MetricsOptions) -> None:
    """Refuses to serve metrics if the package prometheus-client is missing.

    Raises:
        ConfigError: the package is not installed.
    """
    if options.port is None:
        return
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"metrics: port = {options.port} needs a package that is not installed; pip install 'girih[metrics]'"
        ) from None
