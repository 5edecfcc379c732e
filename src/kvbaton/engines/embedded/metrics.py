"""The embedded engine's numbers as Prometheus text: read from the engine when asked, kept nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbaton.engines.embedded.stats import EngineStats

__all__ = ["ControlDropped", "EngineCollector", "make_registry", "metrics_text"]

ControlDropped = Callable[[], Mapping[str, int]]
"""Tells how many messages of the control channel were dropped so far, by cause; the causes are few and fixed."""

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Turns one snapshot of an engine's statistics into metric families, at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], control_dropped: ControlDropped | None = None) -> None:
        self._stats = stats
        self._control_dropped = control_dropped

    def describe(self) -> Iterable[Metric]:
        """Nothing to tell before the first scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape, all from the same snapshot."""
        stats = self._stats()
        yield _labelled(GaugeMetricFamily, "blocks", "Blocks of the cache by state.", ("state",), _block_states(stats))
        yield GaugeMetricFamily("kvbaton_blocks_capacity", "Blocks of the cache, whatever their state.", stats.blocks_total)
        cached = "Free blocks whose content can still serve a prompt with the same beginning."
        yield GaugeMetricFamily("kvbaton_blocks_cached", cached, stats.blocks_cached)
        requests = [((state,), count) for state, count in stats.requests.items()]
        yield _labelled(GaugeMetricFamily, "requests", "Live requests by state.", ("state",), requests)
        finished = [((reason,), count) for reason, count in stats.requests_total.items()]
        yield _labelled(CounterMetricFamily, "requests_finished", "Requests by finish reason.", ("finish_reason",), finished)
        handoffs = stats.handoffs_total.items()
        yield _labelled(CounterMetricFamily, "handoffs", "Ended hand-offs by side and outcome.", ("side", "outcome"), handoffs)
        yield CounterMetricFamily("kvbaton_prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens_total)
        yield CounterMetricFamily("kvbaton_generated_tokens", "Tokens sampled.", stats.generated_tokens_total)
        yield CounterMetricFamily("kvbaton_cached_tokens", "Prompt tokens that were in the cache.", stats.cached_tokens_total)
        yield CounterMetricFamily("kvbaton_preemptions", "Requests put back to make room.", stats.preemptions_total)
        yield CounterMetricFamily("kvbaton_steps", "Steps of the engine.", stats.steps_total)
        if self._control_dropped is not None:
            text = "Messages of the control channel that were dropped, by cause."
            dropped = [((cause,), count) for cause, count in self._control_dropped().items()]
            yield _labelled(CounterMetricFamily, "control_dropped", text, ("cause",), dropped)


def make_registry(stats: Callable[[], EngineStats], control_dropped: ControlDropped | None = None) -> CollectorRegistry:
    """A registry of its own that asks `stats` and `control_dropped` at each scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(stats, control_dropped))
    return registry


def metrics_text(registry: CollectorRegistry) -> bytes:
    """One scrape in the Prometheus text format."""
    return generate_latest(registry)


def _block_states(stats: EngineStats) -> list[tuple[tuple[str], int]]:
    return [(("free",), stats.blocks_free), (("held",), stats.blocks_held), (("in_use",), stats.blocks_in_use)]


def _labelled(
    kind: type[Family], name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], int]]
) -> Family:
    family = kind(f"kvbaton_{name}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
