"""The connector's numbers in vLLM's own statistics: one line in its log, and series at its `/metrics`. Imports vLLM."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.engines.vllm.counts import added, is_empty, shown

__all__ = ["KVBatonMetrics", "KVBatonStats"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TIMES = {
    "handover_s": "From the end of prefill until landed, without the wire",
    "wire_s": "Wire time of a hand-off",
    "source_queue_s": "Wait of a request at its source until its prefill began",
    "target_queue_s": "Wait of a request at its target until it had blocks",
}
_COUNTED = {
    "runs": "Contiguous copies handed to the transport",
    "handshakes": "Cards of peers that were checked and taken",
    "late_events": "Events of hand-offs that came too late to change anything",
    "dropped_messages": "Control messages that were not taken",
    "checksum_mismatches": "Hand-offs that failed because of a checksum",
    "stamped_handoffs": "Hand-offs to here that were confirmed by the stamp of their source, without a question",
    "agent_errors": "Errors of our own that the agents went on after",
    "certificate_loads": "Changes of the certificate files that were taken",
    "failed_certificate_loads": "Changes of the certificate files that were not taken",
    "cluster_key_loads": "Changes of the file with the cluster keys that were taken",
    "failed_cluster_key_loads": "Changes of the file with the cluster keys that were not taken",
}
_NOW = {
    "quarantined_blocks": "Blocks that wait until no peer can write to them any more",
    "peers": "Peers whose cards are known",
}
# What follows has NIXL's names and buckets, so that a board that was made for `vllm:nixl_...` works with a rename.
_XFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_XFER_BYTES = tuple(2**power for power in range(11, 35, 2))
_AS_NIXL = {
    "num_failed_transfers": ("Hand-offs to here that failed or expired", ("target failed", "target expired")),
    "num_kv_expired_reqs": ("Hand-offs from here that expired before a target had fetched them", ("source expired",)),
}
_LATEST = {"multiprocess_mode": "mostrecent"}
"""With several API servers vLLM reports each step to one of them: what the others have is out of date."""


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
    """The same numbers for Prometheus, all named `vllm:kvbaton_...`."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._ended = counter("vllm:kvbaton_handoffs", "Hand-offs by side and outcome", [*labelnames, "side", "outcome"])
        failures = "Hand-offs that ended before they were delivered, by side and by what ended them"
        self._failures = counter("vllm:kvbaton_handoff_failures", failures, [*labelnames, "side", "cause"])
        self._bytes = counter("vllm:kvbaton_moved_bytes", "Bytes of landed hand-offs", labelnames)
        self._grown = {name: counter(f"vllm:kvbaton_{name}", text, labelnames) for name, text in _COUNTED.items()}
        self._live = gauge("vllm:kvbaton_handoffs_live", "Hand-offs under way, by side", [*labelnames, "side"], **_LATEST)
        self._gauges = {name: gauge(f"vllm:kvbaton_{name}", text, labelnames, **_LATEST) for name, text in _NOW.items()}
        self._seconds = {
            name: histogram(f"vllm:kvbaton_{name}econds", text, labelnames, buckets=_SECONDS) for name, text in _TIMES.items()
        }

        self._xfer_time = histogram(
            "vllm:kvbaton_xfer_time_seconds", "Wire time of a hand-off, by NIXL's name", labelnames, buckets=_XFER_SECONDS
        )
        self._xfer_bytes = histogram(
            "vllm:kvbaton_bytes_transferred", "Bytes of a landed hand-off, by NIXL's name", labelnames, buckets=_XFER_BYTES
        )
        self._as_nixl = {name: counter(f"vllm:kvbaton_{name}", text, labelnames) for name, (text, _) in _AS_NIXL.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine reported."""
        if is_empty(transfer_stats_data):
            return
        labels = self.per_engine_labelvalues[engine_idx]
        for counter, name in ((self._ended, "ended"), (self._failures, "failures")):
            for both, count in transfer_stats_data[name].items():
                counter.labels(*labels, *both.split(" ", 1)).inc(count)
        for name, (_, ends) in _AS_NIXL.items():
            self._as_nixl[name].labels(*labels).inc(sum(transfer_stats_data["ended"].get(end, 0) for end in ends))
        for kind, count in transfer_stats_data["grown"].items():
            self._grown[kind].labels(*labels).inc(count)
        self._observe_gauges(transfer_stats_data["gauges"], labels)
        self._observe_series(transfer_stats_data["series"], labels)

    def _observe_gauges(self, gauges: dict[str, int], labels: list[object]) -> None:
        for kind, value in gauges.items():
            if kind.startswith("live_"):
                self._live.labels(*labels, kind.removeprefix("live_")).set(value)
            else:
                self._gauges[kind].labels(*labels).set(value)

    def _observe_series(self, series: dict[str, list[float]], labels: list[object]) -> None:
        self._bytes.labels(*labels).inc(sum(series["moved_bytes"]))
        for kind, observed in (("wire_s", self._xfer_time), ("moved_bytes", self._xfer_bytes)):
            for value in series[kind]:
                observed.labels(*labels).observe(value)
        for name, histogram in self._seconds.items():
            for value in series[name]:
                histogram.labels(*labels).observe(value)
