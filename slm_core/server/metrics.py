"""The metrics page: of HTTP requests, and of all engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slm_core.server.registry import ModelRegistry

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class HttpMetrics:
    """Counts HTTP requests.

    Attributes:
        registry: its series.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "method", "status")
        self._requests = Counter("slm:http_requests", "HTTP requests that are over.", labels, registry=self.registry)
        self._seconds = Histogram(
            "slm:http_request_duration_seconds", "Seconds of HTTP requests.", ("path",), registry=self.registry
        )

    def count(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request that is over. ``path`` is the path of its route, so that clients cannot create series."""
        self._requests.labels(path, method if method in _METHODS else "other", str(status)).inc()
        self._seconds.labels(path).observe(seconds)


class _Engines(Collector):
    """The series of all engines; series with one name, which differ in the label of the model, become one family."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for running in self._models.running:
            for family in running.engine.registry.collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        return families.values()


class _All(CollectorRegistry):
    def __init__(self, http: HttpMetrics, models: ModelRegistry) -> None:
        super().__init__()
        self._http = http
        self._engines = _Engines(models)

    def collect(self) -> Iterator[Metric]:
        yield from self._http.registry.collect()
        yield from self._engines.collect()


def metrics_page(http: HttpMetrics, models: ModelRegistry) -> bytes:
    """All metrics in Prometheus' text format, UTF-8."""
    return generate_latest(_All(http, models))
