"""The connector's numbers in vLLM's own statistics: one line in its log, and series at its `/metrics`. Imports vLLM."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.engines.vllm.counts import added, is_empty, shown

__all__ = ["KVBatonMetrics", "KVBatonStats"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class KVBatonStats(KVConnectorStats):
    """What happened since vLLM last asked; see `counts`."""

    def reset(self) -> None:
        """Start anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVBatonStats:
        """Add what another worker, or a later step, has counted."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the log."""
        return dict(shown(self.data))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return is_empty(self.data)


class KVBatonMetrics(KVConnectorPromMetrics):
    """The same numbers for Prometheus."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._ended = counter("vllm:kvbaton_handoffs", "Hand-offs by side and outcome", [*labelnames, "side", "outcome"])
        self._grown = counter("vllm:kvbaton_events", "What the agents counted, by kind", [*labelnames, "kind"])
        self._bytes = counter("vllm:kvbaton_moved_bytes", "Bytes of landed hand-offs", labelnames)
        described = (("handover_s", "From the end of prefill until landed, without the wire"), ("wire_s", "Wire time"))
        self._seconds = {
            name: histogram(f"vllm:kvbaton_{name}econds", text, labelnames, buckets=_SECONDS) for name, text in described
        }
        self._gauges = gauge("vllm:kvbaton_now", "Live hand-offs and quarantined blocks", [*labelnames, "kind"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine told."""
        if is_empty(transfer_stats_data):
            return
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data["ended"].items():
            self._ended.labels(*labels, *name.split(" ", 1)).inc(count)
        for kind, count in transfer_stats_data["grown"].items():
            self._grown.labels(*labels, kind).inc(count)
        for kind, value in transfer_stats_data["gauges"].items():
            self._gauges.labels(*labels, kind).set(value)
        series = transfer_stats_data["series"]
        self._bytes.labels(*labels).inc(sum(series["moved_bytes"]))
        for name, histogram in self._seconds.items():
            for value in series[name]:
                histogram.labels(*labels).observe(value)
