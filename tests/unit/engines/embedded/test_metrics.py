"""The metrics text: what the control channel dropped is in it, by cause, where there is a control channel."""

from __future__ import annotations

from collections import Counter

from kvbaton.engines.embedded.metrics import make_registry, metrics_text
from kvbaton.engines.embedded.stats import EngineStats


def _stats() -> EngineStats:
    return EngineStats(
        blocks_total=8,
        blocks_free=8,
        blocks_in_use=0,
        blocks_held=0,
        blocks_cached=0,
        requests={},
        requests_total={},
        handoffs_total={},
        prompt_tokens_total=0,
        generated_tokens_total=0,
        cached_tokens_total=0,
        preemptions_total=0,
        steps_total=0,
    )


def test_dropped_messages_are_counted_by_cause_at_each_scrape() -> None:
    dropped = Counter({"not authenticated": 0, "no route": 2})
    registry = make_registry(_stats, lambda: dropped)
    assert b'kvbaton_control_dropped_total{cause="not authenticated"} 0.0' in metrics_text(registry)
    dropped["not authenticated"] += 3
    text = metrics_text(registry).decode()
    assert 'kvbaton_control_dropped_total{cause="not authenticated"} 3.0' in text
    assert 'kvbaton_control_dropped_total{cause="no route"} 2.0' in text


def test_without_a_control_channel_nothing_is_said_about_it() -> None:
    assert b"control" not in metrics_text(make_registry(_stats))
