"""Serves the metrics of a process over HTTP, as Prometheus reads them: values are read when it asks."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from girih.config.metrics import MetricsOptions
from girih.errors import ConfigError
from girih.runs.live.metrics import BY_NAME, Histogram, Sample, samples
from girih.runs.live.place import ProcessId, StatusTarget
from girih.runs.live.process import BEGUN_S, cpu_s, resident_bytes
from girih.runs.stats import Stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

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
                    told = f"metrics: {host}:{port}: {error.strerror}; set metrics.bind to an address of this host"
                    raise ConfigError(told) from None
        else:
            raise ConfigError(f"metrics: port = {first}: no port is free from there on; set another, or 0")
        self.address = f"{host}:{self._server.server_port}"

    def collect(self) -> Iterator[Family]:
        """All metrics as they are now, for Prometheus's registry."""
        by_name: defaultdict[str, list[Sample]] = defaultdict(list)
        reading = {"cpu_s": cpu_s(), "rss_bytes": resident_bytes(), "stats": self._stats.reading()}
        for sample in (("process_start_time_seconds", None, BEGUN_S), *samples(reading)):
            by_name[sample[0]].append(sample)
        for name, found in by_name.items():
            yield self._family(name, found)

    def close(self) -> None:
        """Serves no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _family(self, name: str, found: list[Sample]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metric = BY_NAME[name]
        names = [*self._labels, *([] if metric.label is None else [metric.label])]
        histogram = HistogramMetricFamily(name, metric.about, labels=names)
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        number = kind(name, metric.about, labels=names)
        for _, own, value in found:
            labels = [*self._labels.values(), *([] if own is None else [own])]
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
