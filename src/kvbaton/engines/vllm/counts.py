"""What happened in a worker since vLLM last asked: ends of hand-offs, their costs, and what the agents counted.

The numbers travel as plain maps from the worker to vLLM's front end, which logs them and shows them to Prometheus:
`ended` and `failures` count by side, `grown` counts by name, `series` hold single values, `gauges` are as of now.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvbaton.agent.engine_port import AgentStats, HandoffStats
from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side

__all__ = ["Counts", "added", "is_empty", "shown"]

_SERIES = ("moved_bytes", "handover_s", "wire_s", "source_queue_s", "target_queue_s")
_SUMMED = ("ended", "failures", "grown")


class Counts:
    """Collects until `take`. Belongs to the worker's thread."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._series: dict[str, list[float]] = {name: [] for name in _SERIES}
        self._seen: Counter[str] = Counter()
        self._seen_failures: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def queued(self, side: Side, seconds: float) -> None:
        """A request waited so long: at a source until its prefill began, at a target until it had blocks."""
        self._series[f"{side}_queue_s"].append(seconds)

    def source_ended(self, outcome: Outcome) -> None:
        """A hand-off from here is over."""
        self._ended[f"source {outcome}"] += 1

    def target_ended(self, outcome: Outcome, stats: HandoffStats | None = None) -> None:
        """A hand-off to here is over; `stats` if it landed."""
        self._ended[f"target {outcome}"] += 1
        if stats is not None:
            for name, value in zip(_SERIES, (stats.bytes_moved, stats.handover_s, stats.wire_s), strict=False):
                self._series[name].append(value)

    def take(self, agent: AgentStats) -> dict[str, Any] | None:
        """Everything that is new since the last call, as one map; None when nothing is."""
        totals, gauges = _totals(agent), _gauges(agent)
        failures = Counter({f"{side} {cause}": count for (side, cause), count in agent.failures_total.items()})
        grown, failed = totals - self._seen, failures - self._seen_failures
        is_waited = any(self._series.values())
        if not (self._ended or grown or failed or is_waited) and gauges == self._gauges:
            return None
        self._seen, self._seen_failures, self._gauges = totals, failures, gauges
        ended, self._ended = self._ended, Counter()
        series, self._series = self._series, {name: [] for name in _SERIES}
        return {"ended": dict(ended), "failures": dict(failed), "grown": dict(grown), "series": series, "gauges": gauges}


def _totals(agent: AgentStats) -> Counter[str]:
    return Counter(
        runs=agent.runs_total,
        handshakes=agent.handshakes_total,
        late_events=agent.late_total.total(),
        dropped_messages=agent.dropped_total.total(),
        checksum_mismatches=agent.mismatches_total,
        stamped_handoffs=agent.stamped_total,
        agent_errors=agent.errors_total,
        certificate_loads=agent.certificate_loads_total,
        failed_certificate_loads=agent.failed_certificate_loads_total,
        cluster_key_loads=agent.cluster_key_loads_total,
        failed_cluster_key_loads=agent.failed_cluster_key_loads_total,
    )


def _gauges(agent: AgentStats) -> dict[str, int]:
    live = {f"live_{side}": count for side, count in agent.handoffs_live.items()}
    return {**live, "quarantined_blocks": agent.quarantined_blocks, "peers": agent.peers}


def is_empty(data: dict[str, Any]) -> bool:
    """Whether there is nothing in these numbers."""
    return not data


def added(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both as one; gauges are those of the second."""
    if is_empty(first) or is_empty(second):
        return first or second
    series = {name: [*first["series"].get(name, ()), *second["series"].get(name, ())] for name in _SERIES}
    sums = {name: dict(Counter(first[name]) + Counter(second[name])) for name in _SUMMED}
    return {**sums, "series": series, "gauges": second["gauges"]}


def shown(data: dict[str, Any]) -> dict[str, float]:
    """The numbers as a line in vLLM's log has them."""
    if is_empty(data):
        return {}
    line: dict[str, float] = {name.replace(" ", "_"): count for name, count in sorted(data["ended"].items())}
    line |= {f"{name.replace(' ', '_')}_failures": count for name, count in sorted(data["failures"].items())}
    line["moved_MB"] = round(sum(data["series"]["moved_bytes"]) / 1e6, 1)
    for name in _SERIES[1:]:
        values = sorted(data["series"][name])
        if values:
            line[f"{name}_median"] = round(values[len(values) // 2], 4)
    return {**line, **data["grown"], **data["gauges"]}
