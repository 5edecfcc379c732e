"""The connector's numbers: told once, added up, and shown."""

from __future__ import annotations

from collections import Counter

from kvbaton.agent.engine_port import AgentStats, HandoffStats
from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side
from kvbaton.engines.vllm.counts import Counts, added, is_empty, shown


def agents(late: int = 0, live: int = 0, runs: int = 0, failures: int = 0) -> AgentStats:
    return AgentStats(
        handoffs_live={"source": 0, "target": live},
        quarantined_blocks=0,
        late_total=Counter({"aux": late}),
        dropped_total=Counter(),
        mismatches_total=0,
        aux_fallbacks_total=Counter(),
        errors_total=0,
        turns_total=0,
        busy_s_total=0.0,
        poll_s_total=0.0,
        failures_total=Counter({("target", "no progress"): failures}),
        runs_total=runs,
        peers=1,
    )


def test_what_happened_is_told_once() -> None:
    counts = Counts()
    counts.take(agents())
    assert counts.take(agents()) is None
    counts.source_ended(Outcome.DELIVERED)
    counts.target_ended(Outcome.DELIVERED, HandoffStats(bytes_moved=7, handover_s=0.5, wire_s=0.25))
    data = counts.take(agents(late=3))
    assert data is not None
    assert data["ended"] == {"source delivered": 1, "target delivered": 1}
    assert {name: values for name, values in data["series"].items() if values} == {
        "moved_bytes": [7],
        "handover_s": [0.5],
        "wire_s": [0.25],
    }
    assert data["grown"] == {"late_events": 3}
    assert counts.take(agents(late=3)) is None
    later = counts.take(agents(late=4))
    assert later is not None
    assert later["grown"] == {"late_events": 1}


def test_runs_failures_and_waits_are_told_once_too() -> None:
    counts = Counts()
    counts.take(agents())
    counts.queued(Side.TARGET, 0.75)
    data = counts.take(agents(runs=5, failures=2))
    assert data is not None
    assert (data["grown"], data["failures"], data["series"]["target_queue_s"]) == (
        {"runs": 5},
        {"target no progress": 2},
        [0.75],
    )
    assert data["gauges"]["peers"] == 1
    assert counts.take(agents(runs=5, failures=2)) is None
    assert added(data, data)["failures"] == {"target no progress": 4}
    assert shown(data)["target_no_progress_failures"] == 2


def test_gauges_are_told_when_they_change() -> None:
    counts = Counts()
    first, second = counts.take(agents(live=1)), counts.take(agents())
    assert first is not None
    assert second is not None
    assert (first["gauges"]["live_target"], second["gauges"]["live_target"]) == (1, 0)


def test_two_steps_add_up() -> None:
    counts = Counts()
    counts.target_ended(Outcome.FAILED)
    first = counts.take(agents(live=2))
    counts.target_ended(Outcome.FAILED)
    second = counts.take(agents(late=1))
    assert first is not None
    assert second is not None
    both = added(first, second)
    assert (both["ended"], both["grown"], both["gauges"]["live_target"]) == (
        {"target failed": 2},
        {"late_events": 1},
        0,
    )
    assert added({}, second) == added(second, {}) == second
    assert is_empty(added({}, {}))


def test_a_line_for_the_log() -> None:
    counts = Counts()
    counts.target_ended(Outcome.DELIVERED, HandoffStats(bytes_moved=2_000_000, handover_s=0.01, wire_s=0.02))
    data = counts.take(agents())
    assert data is not None
    line = shown(data)
    assert (line["target_delivered"], line["moved_MB"], line["handover_s_median"]) == (1, 2.0, 0.01)
    assert shown({}) == {}
