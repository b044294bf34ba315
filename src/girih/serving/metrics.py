"""Metrics of a server for Prometheus. If several workers serve one port, each scrape returns the sums over all workers.

docs/serving.md lists them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from girih.errors import ConfigError

if TYPE_CHECKING:
    from girih.serving.served import ModelVersion

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable through which prometheus-client finds the files that the workers of a server share."""
BOUNDS_S = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServingMetrics:
    """The metrics of one worker.

    Raises:
        ConfigError: prometheus-client is missing.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise ConfigError(
                "serve: prometheus-client is not installed; pip install 'girih[serve]'"
            ) from None
        self._registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "girih_serving", "registry": self._registry}
        gauge = {"multiprocess_mode": "livemin", **shared}  # the minimum over workers
        self.seconds = Histogram(
            "seconds", "Time to answer a request, after its body arrived.", buckets=BOUNDS_S, **shared
        )
        self.requests = Counter("requests", "Requests for predictions, by HTTP status.", ["status"], **shared)
        self.examples = Counter("examples", "Examples that got predictions.", **shared)
        self.refused = Counter("refused", "Clients that exceeded a limit, by reason.", ["reason"], **shared)
        self._step = Gauge("step", "Training steps of the version that answers.", **gauge)
        self._number = Gauge("version", "The last published segment in the version that answers.", **gauge)

    def serves(self, version: ModelVersion) -> None:
        """Records the version that answers from now on."""
        self._step.set(version.step)
        self._number.set(version.number)

    def text(self) -> bytes:
        """Returns all metrics of all workers, in the format of Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        registry = self._registry
        if SHARED in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
