"""The metrics text: what the agents have counted is in it, by cause, where there are agents."""

from __future__ import annotations

from collections import Counter

from prometheus_client import generate_latest

from kvbaton.agent.engine_port import AgentStats
from kvbaton.engines.embedded.metrics import make_registry
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


def _agent(dropped: Counter[str]) -> AgentStats:
    return AgentStats(
        handoffs_live={"source": 3, "target": 0},
        quarantined_blocks=7,
        late_total=Counter({"aux": 2}),
        dropped_total=dropped,
        mismatches_total=4,
        stamped_total=14,
        aux_fallbacks_total=Counter({"no free slot": 5}),
        errors_total=1,
        turns_total=10,
        busy_s_total=0.5,
        poll_s_total=0.25,
        failures_total=Counter({("target", "no progress"): 6}),
        runs_total=8,
        peers=2,
        handshakes_total=9,
        certificate_loads_total=10,
        failed_certificate_loads_total=11,
        cluster_key_loads_total=12,
        failed_cluster_key_loads_total=13,
    )


def test_what_the_agents_have_counted_is_reported() -> None:
    text = generate_latest(make_registry(_stats, lambda: _agent(Counter()))).decode()
    for line in (
        'kvbaton_handoffs_live{side="source"} 3.0',
        'kvbaton_handoffs_live{side="target"} 0.0',
        "kvbaton_quarantined_blocks 7.0",
        'kvbaton_handoff_late_events_total{event="aux"} 2.0',
        "kvbaton_checksum_mismatches_total 4.0",
        "kvbaton_stamped_handoffs_total 14.0",
        'kvbaton_handoff_failures_total{cause="no progress",side="target"} 6.0',
        "kvbaton_runs_total 8.0",
        "kvbaton_peers 2.0",
        "kvbaton_handshakes_total 9.0",
        "kvbaton_certificate_loads_total 10.0",
        "kvbaton_failed_certificate_loads_total 11.0",
        "kvbaton_cluster_key_loads_total 12.0",
        "kvbaton_failed_cluster_key_loads_total 13.0",
        'kvbaton_aux_fallbacks_total{cause="no free slot"} 5.0',
        "kvbaton_agent_errors_total 1.0",
        "kvbaton_agent_turns_total 10.0",
        "kvbaton_agent_busy_seconds_total 0.5",
        "kvbaton_agent_poll_seconds_total 0.25",
    ):
        assert line in text


def test_dropped_messages_are_counted_by_cause_at_each_scrape() -> None:
    dropped = Counter({"not authenticated": 0, "no route": 2})
    registry = make_registry(_stats, lambda: _agent(dropped))
    assert b'kvbaton_control_dropped_total{cause="not authenticated"} 0.0' in generate_latest(registry)
    dropped["not authenticated"] += 3
    text = generate_latest(registry).decode()
    assert 'kvbaton_control_dropped_total{cause="not authenticated"} 3.0' in text
    assert 'kvbaton_control_dropped_total{cause="no route"} 2.0' in text


def test_without_a_control_channel_nothing_is_said_about_it() -> None:
    assert b"control" not in generate_latest(make_registry(_stats))
