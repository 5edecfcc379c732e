"""What the router counts, in a Prometheus registry of its own."""

from __future__ import annotations

import time
from collections import Counter as Counted
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import InstanceType, TransferMode
from kvbaton.discovery.registry import Registry

__all__ = ["RouterMetrics"]

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Discovery(Collector):
    """Reads the registry and the listener when it is asked, so that nothing has to be kept in step."""

    def __init__(self, registry: Registry, listener: Listener, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._listener = listener
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        now = self._clock()
        live = GaugeMetricFamily("kvbaton_router_instances", "Live instances", labels=["type", "mode"])
        counts = Counted((instance.type, instance.transfer_mode) for instance in self._registry.live(now))
        for kind in InstanceType:
            for transfer_mode in TransferMode:
                live.add_metric([kind.word, transfer_mode.mode], counts[kind, transfer_mode])
        yield live
        yield GaugeMetricFamily("kvbaton_router_refused_instances", "Refused instances", len(self._registry.refused(now)))
        taken = "Messages that reached the discovery socket"
        yield CounterMetricFamily("kvbaton_router_registrations_total", taken, self._listener.messages_total())
        skipped = CounterMetricFamily("kvbaton_router_malformed_registrations_total", "Skipped messages", labels=["cause"])
        for cause, count in self._listener.malformed_total().items():
            skipped.add_metric([cause], count)
        yield skipped


class RouterMetrics:
    """The counters of one router."""

    def __init__(self, registry: Registry, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Discovery(registry, listener, clock))
        self.requests = Counter(
            "kvbaton_router_requests_total", "Requests by path and status class", ["path", "status"], registry=self._registry
        )
        self.in_flight = Gauge(
            "kvbaton_router_in_flight_requests", "Completion requests that are not over", registry=self._registry
        )
        self.prefill_failures = Counter(
            "kvbaton_router_prefill_failures_total", "Prefill legs that failed", registry=self._registry
        )
        self.decode_failures = Counter(
            "kvbaton_router_decode_failures_total", "Decode legs that failed", registry=self._registry
        )
        self.ttft = Histogram(
            "kvbaton_router_ttft_seconds",
            "From a request's arrival to the first byte of its decode instance's answer",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(self._registry)
