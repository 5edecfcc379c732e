"""What the router counts. Counting is one addition on the process's row of the board; names and labels are added when asked."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbaton.discovery.messages import Cause, InstanceType, TransferMode
from kvbaton.discovery.registry import Registry
from kvbaton.router.board import Board

__all__ = ["COLUMNS", "GAUGES", "RouterMetrics", "write_messages"]

_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/generate", "/v1/models", "/health", "/ready", "/instances", "/metrics",
    "/live", "/handoffs", "/handoffs/{transfer_id}", "/", "/page/{name}", "other",
)  # fmt: skip
_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "other", "client_closed")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAUGES = {
    "in_flight_requests": "Completion requests that are not over",
    "queued_requests": "Completion requests that wait for a free instance",
}
_COUNTERS = {
    "prefill_failures": "Requests to prefill instances that failed",
    "decode_failures": "Requests to decode instances that failed",
    "retries": "Requests that were tried again with another pair",
    "local_prefills": "Requests that a decode instance was left to prefill by itself",
    "instance_deaths": "Requests that were not retried because their instance died while it served them",
    "suspected_requests": "Requests that were refused because several instances had died while they served that body",
    "queue_timeouts": "Requests that waited too long for a free instance",
    "queue_refusals": "Requests that found the queue full",
    "unauthorized": "Requests without a valid key",
    "malformed_traces": "Requests whose traceparent cannot be read; they were served without it",
    "untraced_handoffs": "Hand-offs of recorded traces that got no spans, because too many were under way or none was noted",
    "certificate_loads": "Changes of the certificate files that were taken, by each process of the router",
    "failed_certificate_loads": "Changes of the certificate files that were not taken, by each process of the router",
    "cluster_key_loads": "Changes of the file with the cluster keys that were taken, by each process of the router",
    "failed_cluster_key_loads": "Changes of the file with the cluster keys that were not taken, by each process of the router",
    "quarantines": "Times that an instance was put aside because it could not be reached",
    "messages": "",
}
_NAMES = (*_GAUGES, *_COUNTERS)
_REQUESTS = len(_NAMES)
_TTFT = _REQUESTS + len(_PATHS) * len(_STATUSES)
_CAUSES = _TTFT + len(_BUCKETS) + 2
GAUGES = len(_GAUGES)
"""How many of the first columns go up and down; they are void when their process is gone."""
COLUMNS = _CAUSES + len(Cause)
"""How many columns of a board the metrics take."""


class RouterMetrics:
    """The counters of one router; this process writes `row` of `board`."""

    def __init__(self, board: Board, row: int, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._cells = board.row(row)
        self._columns = {name: index for index, name in enumerate(_NAMES)}
        self._request_columns = {
            (path, status): _REQUESTS + i * len(_STATUSES) + j
            for i, path in enumerate(_PATHS)
            for j, status in enumerate(_STATUSES)
        }
        self._answer_columns = {(path, 200): self._request_columns[path, "2xx"] for path in _PATHS}
        self._prometheus = CollectorRegistry()
        self._prometheus.register(_Collector(self, registry, clock))

    def add(self, name: str, amount: int = 1) -> None:
        """Count; gauges may go down."""
        self._cells[self._columns[name]] += amount

    def count_request(self, path: str, status: str) -> None:
        """A request was answered, or its client went away; an unknown path counts as `other`."""
        column = self._request_columns.get((path, status))
        self._cells[self._request_columns["other", status] if column is None else column] += 1

    def count_answer(self, path: str, status: int) -> None:
        """A request was answered with this status."""
        column = self._answer_columns.get((path, status))
        if column is None:
            self.count_request(path, f"{status // 100}xx" if 100 <= status < 600 else "other")
        else:
            self._cells[column] += 1

    def see_first_byte(self, seconds: float) -> None:
        """A request's first byte came after so long."""
        cells = self._cells
        cells[_TTFT + bisect_left(_BUCKETS, seconds)] += 1
        cells[_TTFT + len(_BUCKETS) + 1] += seconds

    def see_messages(self, messages: int, malformed: Mapping[Cause, int]) -> None:
        """How many messages the discovery socket has seen; written by the process that has it."""
        write_messages(self._cells, messages, malformed)

    def see_loads(self, **totals: int) -> None:
        """How many changes of the certificates and of the cluster keys this process has taken, or not taken, so far."""
        for name, total in totals.items():
            self._cells[self._columns[name]] = total

    def value(self, name: str) -> float:
        """A number over all processes."""
        return self._board.total(self._columns[name])

    def render(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(self._prometheus)

    def numbers(self) -> Iterable[Metric]:
        """What was counted, with names and labels."""
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvbaton_router_{name}", text, self.value(name))
        for name, text in _COUNTERS.items():
            if text:
                yield CounterMetricFamily(f"kvbaton_router_{name}_total", text, self.value(name))
        requests = CounterMetricFamily(
            "kvbaton_router_requests_total", "Requests by path and status class", labels=["path", "status"]
        )
        for labels, column in self._request_columns.items():
            if (count := self._board.total(column)) > 0:
                requests.add_metric(labels, count)
        yield requests
        yield self._first_bytes()
        taken = "Messages that reached the discovery socket"
        yield CounterMetricFamily("kvbaton_router_registrations_total", taken, self.value("messages"))
        skipped = CounterMetricFamily("kvbaton_router_malformed_registrations_total", "Skipped messages", labels=["cause"])
        for index, cause in enumerate(Cause):
            skipped.add_metric([cause], self._board.total(_CAUSES + index))
        yield skipped

    def _first_bytes(self) -> Metric:
        counts, below = [], 0.0
        for index in range(len(_BUCKETS) + 1):
            below += self._board.total(_TTFT + index)
            counts.append((str(_BUCKETS[index]) if index < len(_BUCKETS) else "+Inf", below))
        text = "From a request's arrival to the first byte of its decode instance's answer"
        return HistogramMetricFamily(
            "kvbaton_router_ttft_seconds", text, buckets=counts, sum_value=self._board.total(_TTFT + len(_BUCKETS) + 1)
        )


def write_messages(row: memoryview[float], messages: int, malformed: Mapping[Cause, int]) -> None:
    """Write into a row of the board how many messages the discovery socket has seen."""
    row[_NAMES.index("messages")] = messages
    for index, cause in enumerate(Cause):
        row[_CAUSES + index] = malformed.get(cause, 0)


class _Collector(Collector):
    """Reads board and registry when it is asked, so that nothing has to be kept in step."""

    def __init__(self, metrics: RouterMetrics, registry: Registry, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._registry = registry
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
        aside = sum(instance.aside_until > now for instance in self._registry.live(now))
        yield GaugeMetricFamily("kvbaton_router_quarantined_instances", "Live instances that are put aside", aside)
        yield from self._metrics.numbers()
