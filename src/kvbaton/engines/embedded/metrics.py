"""The embedded engine's counters as Prometheus text, read from the engine at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbaton.agent.engine_port import AgentStats
from kvbaton.engines.embedded.stats import EngineStats

__all__ = ["EngineCollector", "ReadAgent", "make_registry"]

ReadAgent = Callable[[], AgentStats]
"""Reads what the agents of this instance have counted so far."""

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Turns one snapshot of an engine's statistics into metric families, at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], agent: ReadAgent | None = None) -> None:
        self._stats = stats
        self._agent = agent

    def describe(self) -> Iterable[Metric]:
        """Empty: without it, registering the collector would already read the engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape, all from the same snapshot."""
        stats = self._stats()
        yield _labelled(GaugeMetricFamily, "blocks", "Blocks of the cache by state.", ("state",), _block_states(stats))
        yield GaugeMetricFamily("kvbaton_blocks_capacity", "Blocks of the cache, whatever their state.", stats.blocks_total)
        cached = "Free blocks whose content can still serve a prompt with the same beginning."
        yield GaugeMetricFamily("kvbaton_blocks_cached", cached, stats.blocks_cached)
        yield _labelled(GaugeMetricFamily, "requests", "Live requests by state.", ("state",), _by(stats.requests))
        finished = "Requests by finish reason."
        yield _labelled(CounterMetricFamily, "requests_finished", finished, ("finish_reason",), _by(stats.requests_total))
        handoffs = stats.handoffs_total.items()
        yield _labelled(CounterMetricFamily, "handoffs", "Ended hand-offs by side and outcome.", ("side", "outcome"), handoffs)
        yield CounterMetricFamily("kvbaton_prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens_total)
        yield CounterMetricFamily("kvbaton_generated_tokens", "Tokens sampled.", stats.generated_tokens_total)
        yield CounterMetricFamily("kvbaton_cached_tokens", "Prompt tokens that were in the cache.", stats.cached_tokens_total)
        yield CounterMetricFamily("kvbaton_preemptions", "Requests put back to make room.", stats.preemptions_total)
        yield CounterMetricFamily("kvbaton_moved_bytes", "Bytes of landed hand-offs.", stats.moved_bytes_total)
        yield CounterMetricFamily("kvbaton_steps", "Steps of the engine.", stats.steps_total)
        if self._agent is not None:
            yield from _agent_families(self._agent())


def make_registry(stats: Callable[[], EngineStats], agent: ReadAgent | None = None) -> CollectorRegistry:
    """A registry of its own that reads `stats` and `agent` at each scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(stats, agent))
    return registry


def _agent_families(agent: AgentStats) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "handoffs_live", "Hand-offs under way, by side.", ("side",), _by(agent.handoffs_live))
    quarantined = "Blocks that wait until no peer can write to them any more."
    yield GaugeMetricFamily("kvbaton_quarantined_blocks", quarantined, agent.quarantined_blocks)
    dropped = "Messages of the control channel that were dropped, by cause."
    yield _labelled(CounterMetricFamily, "control_dropped", dropped, ("cause",), _by(agent.dropped_total))
    late = "Events of hand-offs that arrived too late to change anything, by kind."
    yield _labelled(CounterMetricFamily, "handoff_late_events", late, ("event",), _by(agent.late_total))
    failures = "Hand-offs that ended before they were delivered, by side and by what ended them."
    yield _labelled(CounterMetricFamily, "handoff_failures", failures, ("side", "cause"), agent.failures_total.items())
    yield CounterMetricFamily("kvbaton_runs", "Contiguous copies handed to the transport.", agent.runs_total)
    yield GaugeMetricFamily("kvbaton_peers", "Peers whose cards are known.", agent.peers)
    yield CounterMetricFamily("kvbaton_handshakes", "Cards of peers that were checked and taken.", agent.handshakes_total)
    mismatches = "Hand-offs that failed because of a checksum."
    yield CounterMetricFamily("kvbaton_checksum_mismatches", mismatches, agent.mismatches_total)
    stamped = "Hand-offs to here that were confirmed by the stamp of their source, without a question."
    yield CounterMetricFamily("kvbaton_stamped_handoffs", stamped, agent.stamped_total)
    fallbacks = "Aux records that were sent by message because the data transport could not, by cause."
    yield _labelled(CounterMetricFamily, "aux_fallbacks", fallbacks, ("cause",), _by(agent.aux_fallbacks_total))
    yield CounterMetricFamily("kvbaton_agent_errors", "Internal errors that the agents survived.", agent.errors_total)
    taken = "Changes of the certificate files that were taken."
    yield CounterMetricFamily("kvbaton_certificate_loads", taken, agent.certificate_loads_total)
    not_taken = "Changes of the certificate files that were not taken."
    yield CounterMetricFamily("kvbaton_failed_certificate_loads", not_taken, agent.failed_certificate_loads_total)
    taken = "Changes of the file with the cluster keys that were taken."
    yield CounterMetricFamily("kvbaton_cluster_key_loads", taken, agent.cluster_key_loads_total)
    not_taken = "Changes of the file with the cluster keys that were not taken."
    yield CounterMetricFamily("kvbaton_failed_cluster_key_loads", not_taken, agent.failed_cluster_key_loads_total)
    yield CounterMetricFamily("kvbaton_agent_turns", "Turns of the agents' thread.", agent.turns_total)
    yield CounterMetricFamily("kvbaton_agent_busy_seconds", "Seconds in which the agents' thread was busy.", agent.busy_s_total)
    polled = "Seconds in which it polled its transport for completions."
    yield CounterMetricFamily("kvbaton_agent_poll_seconds", polled, agent.poll_s_total)


def _by(counts: Mapping[str, int]) -> list[tuple[tuple[str], int]]:
    return [((name,), count) for name, count in counts.items()]


def _block_states(stats: EngineStats) -> list[tuple[tuple[str], int]]:
    return [(("free",), stats.blocks_free), (("held",), stats.blocks_held), (("in_use",), stats.blocks_in_use)]


def _labelled(
    kind: type[Family], name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], int]]
) -> Family:
    family = kind(f"kvbaton_{name}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
