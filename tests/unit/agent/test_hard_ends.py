"""Every live state of every table has an end that time alone brings about, or is a documented quarantine.

The peer is alive all the time: it beats, and repeats whatever it has sent. That renews leases, and must not do so for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import BLOCKS, LIMITS, card_of
from test_source import KEY, T1, T2, grant
from test_source import Rig as SourceRig
from test_target import RANKS, S1
from test_target import Rig as TargetRig

from kvbaton.agent.engine_port import Allocation, SourceEnded, TargetEnded
from kvbaton.core.handoff import Outcome, Span
from kvbaton.core.lifecycle import (
    COPY,
    SOURCE,
    TARGET,
    CopyEvent,
    CopyState,
    SourceEffect,
    SourceState,
    TargetEffect,
    TargetState,
)
from kvbaton.core.messages import Announced, Heartbeat, Prefilled, Retracted, Stopped

PAGE = Path(__file__).parents[3].joinpath("docs", "lifecycle.md").read_text(encoding="utf-8")
SOURCE_QUARANTINE = {SourceState.STOPPING}
TARGET_QUARANTINE = {TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED}
COPY_QUARANTINE = {CopyState.BROKEN, CopyState.STOPPING}
CAP_S = LIMITS.hold_cap + LIMITS.beat_s
QUEUE_S = LIMITS.queue_timeout + LIMITS.beat_s


def _streaming(rig: SourceRig, *, writes: bool = False) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant(writes=writes))
    rig.side.spans_ready(KEY, BLOCKS, (Span(0, 0, 1, 0, 1),))


def _retracting(rig: SourceRig) -> None:
    _streaming(rig, writes=True)
    rig.side.retract(KEY)


def _held(rig: SourceRig) -> None:
    rig.expect()
    rig.offer()


def _stopping(rig: SourceRig) -> None:
    _streaming(rig, writes=True)
    rig.side.cancel(KEY, "enough")


INTO_SOURCE: dict[SourceState, Callable[[SourceRig], object]] = {
    SourceState.PARKED: lambda rig: rig.side.on_grant(T1, grant()),
    SourceState.QUEUED: lambda rig: rig.expect(),
    SourceState.STREAMING: _streaming,
    SourceState.RETRACTING: _retracting,
    SourceState.HELD: _held,
    SourceState.SERVING: lambda rig: rig.serve(),
    SourceState.STOPPING: _stopping,
}


def _let_target_live(rig: SourceRig, seconds: float) -> float:
    """Let time pass while the target beats and repeats its grant; returns how long the hand-off lived, out of quarantine."""
    start = rig.clock.now
    while rig.clock.now < start + seconds:
        record = rig.side.live.get(KEY)
        if record is None or record.state in SOURCE_QUARANTINE:
            break
        rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, record.grant_number),)))
        if record.grant is not None:
            rig.side.on_grant(T1, record.grant)
        rig.clock.now += LIMITS.beat_s
        rig.side.tick()
    return rig.clock.now - start


def test_every_live_state_of_a_source_is_walked() -> None:
    assert set(INTO_SOURCE) == set(SourceState) - SOURCE.terminal


@pytest.mark.parametrize("state", INTO_SOURCE, ids=str)
def test_time_ends_a_source_although_its_target_lives(state: SourceState) -> None:
    rig = SourceRig()
    INTO_SOURCE[state](rig)
    assert rig.side.live[KEY].state is state
    lived_s = _let_target_live(rig, 10 * CAP_S)
    assert lived_s <= CAP_S
    if KEY in rig.side.live:
        assert rig.side.live[KEY].state in SOURCE_QUARANTINE
        rig.clock.now += 100 * CAP_S
        rig.side.tick()
        assert KEY in rig.side.live, "memory that our own copies still read does not go back"
        rig.ranks.quiet_all()
    assert KEY not in rig.side.live


def test_a_source_that_was_queued_too_long_states_it() -> None:
    rig = SourceRig()
    rig.expect()
    rig.side.spans_ready(KEY, BLOCKS, (Span(0, 0, 1, 0, 1),))
    rig.clock.now += LIMITS.queue_timeout - 1
    rig.side.tick()
    assert rig.take_events() == [], "not a second too early"
    rig.clock.now += 1
    rig.side.tick()
    (ended,) = rig.take_events()
    assert isinstance(ended, SourceEnded)
    assert ended.outcome is Outcome.EXPIRED
    assert f"queued for {LIMITS.queue_timeout:g} s" in ended.reason


def test_a_target_that_queues_does_not_use_up_the_time_that_its_source_waits_for_it() -> None:
    """It may come late, and wait for memory then; each wait has its limit, from its own beginning."""
    rig = SourceRig()
    rig.expect()
    rig.clock.now += LIMITS.queue_timeout - 1
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    come_at = rig.clock.now
    while rig.clock.now < come_at + LIMITS.hold_cap - 1:
        rig.clock.now += 1
        rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
        rig.side.tick()
    assert rig.side.live[KEY].state is SourceState.QUEUED
    rig.clock.now += 1
    rig.side.tick()
    (ended,) = rig.take_events()
    assert isinstance(ended, SourceEnded)
    assert ended.outcome is Outcome.EXPIRED, "heartbeats alone keep it no longer than the cap"
    assert f"granted nothing for {LIMITS.hold_cap:g} s" in ended.reason


def test_time_has_nothing_to_say_to_a_source_that_stops() -> None:
    """An alarm of an earlier state may ring: it is no event then, and not counted as one that came late."""
    rig = SourceRig()
    _stopping(rig)
    assert rig.side.live[KEY].state is SourceState.STOPPING
    rig.clock.now += 2 * LIMITS.hold_cap
    rig.side.tick()
    assert rig.side.live[KEY].state is SourceState.STOPPING
    assert not rig.side.late_total


def test_a_queued_source_does_not_wait_for_a_target_that_has_fallen_silent() -> None:
    """It has sent a heartbeat, so it would send more while it waited: on another host, silence is all that shows its death."""
    rig = SourceRig()
    rig.expect()
    rig.clock.now += LIMITS.defer_timeout + 1
    rig.side.tick()
    assert rig.take_events() == [], "without a target there is no lease"
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    rig.clock.now += LIMITS.defer_timeout - 0.1
    rig.side.tick()
    assert rig.take_events() == [], "not too early"
    rig.clock.now += 0.2
    due_at = rig.side.next_deadline()
    assert due_at is not None
    assert due_at <= rig.clock.now, "its alarm is set for that"
    rig.side.tick()
    (ended,) = rig.take_events()
    assert isinstance(ended, SourceEnded)
    assert ended.outcome is Outcome.EXPIRED
    assert ended.reason == f"no message from the target for {LIMITS.defer_timeout:g} s while queued"


def test_a_target_that_only_claimed_a_queued_source_cannot_take_it_from_one_that_waits() -> None:
    """Two clients may use one transfer id: a heartbeat has the id alone, and the first to send one may not be the target."""
    rig = SourceRig()
    rig.expect()
    rig.side.on_heartbeat(T2, Heartbeat(False, ((KEY, 0),)))
    for _ in range(4):
        rig.clock.now += LIMITS.defer_timeout / 2
        rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
        rig.side.tick()
    assert rig.take_events() == []
    assert rig.side.live[KEY].state is SourceState.QUEUED


def test_a_source_that_is_computed_on_and_on_lives_as_long_as_that() -> None:
    rig = SourceRig()
    _streaming(rig)
    for number in range(1, 8):
        _let_target_live(rig, 0.9 * LIMITS.hold_cap)
        rig.side.spans_ready(KEY, BLOCKS, (Span(number, number, number + 1, 0, 1),))
    assert rig.side.live[KEY].state is SourceState.STREAMING


def test_a_source_that_is_preempted_again_and_again_ends() -> None:
    """Each time it gets as far as before, and no further: its target would wait for ever."""
    rig = SourceRig()
    _streaming(rig)
    rounds = 0
    while KEY in rig.side.live and rounds < 100:
        rounds += 1
        rig.side.retract(KEY)
        rig.ranks.quiet_all()
        rig.side.spans_ready(KEY, BLOCKS, (Span(0, 0, 1, 0, 1),))
        _let_target_live(rig, LIMITS.defer_timeout / 2)
    assert KEY not in rig.side.live
    assert rounds * LIMITS.defer_timeout / 2 <= CAP_S + LIMITS.defer_timeout


def _queued_target(rig: TargetRig) -> None:
    rig.side.expect(rig.request(), card_of("s1", RANKS))


def _handshaking(rig: TargetRig) -> None:
    rig.side.expect(rig.request(), None)
    rig.side.allocated(Allocation(rig.request(), BLOCKS, 3, 0))


def _filling(rig: TargetRig) -> None:
    rig.grant()
    rig.announce(0)


def _clearing(rig: TargetRig) -> None:
    _filling(rig)
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))


def _quarantined(rig: TargetRig, fences: int) -> None:
    rig.grant()
    rig.side.cancel(KEY, "enough")
    for _ in range(fences):
        rig.pass_time(LIMITS.stop_timeout)


INTO_TARGET: dict[TargetState, Callable[[TargetRig], object]] = {
    TargetState.QUEUED: _queued_target,
    TargetState.HANDSHAKING: _handshaking,
    TargetState.GRANTED: lambda rig: rig.grant(),
    TargetState.FILLING: _filling,
    TargetState.CLEARING: _clearing,
    TargetState.CONFIRMING: lambda rig: rig.fill(),
    TargetState.STOPPING: lambda rig: _quarantined(rig, 0),
    TargetState.REVOKING: lambda rig: _quarantined(rig, 1),
    TargetState.ISOLATED: lambda rig: _quarantined(rig, 2),
}


def _let_source_live(rig: TargetRig, seconds: float) -> float:
    """Let time pass while the source beats and repeats that its prefill is complete."""
    start = rig.clock.now
    while rig.clock.now < start + seconds:
        record = rig.side.live.get(KEY)
        if record is None or record.state in TARGET_QUARANTINE:
            break
        rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, record.grant),)))
        if record.state is TargetState.FILLING:
            rig.side.on_announced(S1, Announced(KEY, record.grant, record.generation, (), ()))
            rig.side.on_prefilled(S1, Prefilled(KEY, record.grant, record.generation, 3, 3, 0.0))
        rig.clock.now += LIMITS.beat_s
        rig.side.tick()
    return rig.clock.now - start


def test_every_live_state_of_a_target_is_walked() -> None:
    assert set(INTO_TARGET) == set(TargetState) - TARGET.terminal


@pytest.mark.parametrize("writes", [False, True], ids=["target reads", "source writes"])
@pytest.mark.parametrize("state", INTO_TARGET, ids=str)
def test_time_ends_a_target_although_its_source_lives(state: TargetState, writes: bool) -> None:
    if not writes and state in TARGET_QUARANTINE:
        pytest.skip("where no other process writes, the blocks are back as soon as our own copies are quiet")
    if writes and state in (TargetState.CLEARING, TargetState.CONFIRMING):
        pytest.skip("where the source writes, no copy of ours is waited for, and nothing is asked")
    rig = TargetRig(writes=writes)
    INTO_TARGET[state](rig)
    assert rig.side.live[KEY].state is state
    lived_s = _let_source_live(rig, 10 * CAP_S)
    assert lived_s <= (QUEUE_S if state is TargetState.QUEUED else CAP_S)
    if KEY in rig.side.live:
        rig.ranks.quiet_all()
    if KEY in rig.side.live:
        assert writes
        for _ in range(100):
            rig.pass_time(LIMITS.stop_timeout)
        assert rig.side.live[KEY].state is TargetState.ISOLATED, "time alone never frees target memory"
        rig.side.on_stopped(S1, Stopped(KEY, rig.side.live[KEY].grant))
    assert KEY not in rig.side.live


def test_a_target_that_was_queued_too_long_states_it() -> None:
    rig = TargetRig()
    _queued_target(rig)
    rig.pass_time(LIMITS.queue_timeout - 1)
    assert rig.take_events() == [], "not a second too early"
    rig.pass_time(1)
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert ended.outcome is Outcome.EXPIRED
    assert f"queued for {LIMITS.queue_timeout:g} s" in ended.reason
    assert len(rig.side.decline_notices) == 1, "its source is notified"


def test_a_source_that_retracts_again_and_again_does_not_keep_a_target() -> None:
    rig = TargetRig()
    _filling(rig)
    rounds = 0
    while rig.side.live.get(KEY) is not None and rig.state() not in TARGET_QUARANTINE and rounds < 100:
        rounds += 1
        rig.side.on_retracted(S1, Retracted(KEY, 1, 1 + rounds))
        rig.ranks.quiet_all()
        rig.announce(0, generation=1 + rounds)
        _let_source_live(rig, LIMITS.transfer_timeout)
    assert rounds * LIMITS.transfer_timeout <= CAP_S + LIMITS.transfer_timeout


def test_a_target_that_gets_one_span_after_another_lives_as_long_as_that() -> None:
    rig = TargetRig()
    rig.grant()
    for number in range(3):
        rig.announce(number)
        _let_source_live(rig, 0.9 * LIMITS.hold_cap)
        rig.ranks.finish_all()
    assert rig.state() in (TargetState.FILLING, TargetState.CONFIRMING)


def test_every_end_of_a_side_stops_its_copies_and_a_copy_ends_when_it_is_quiet() -> None:
    """A copy has no clock of its own. The side that opened it has; and memory under a copy in flight is in use."""
    for table, stopping, stop in (
        (SOURCE, SourceState.STOPPING, SourceEffect.STOP_COPY),
        (TARGET, TargetState.STOPPING, TargetEffect.STOP_COPY),
    ):
        ends = [row for (state, _), row in table.rows.items() if row.state is stopping and state is not stopping]
        assert ends
        assert all(stop in row.effects for row in ends)
    live = set(CopyState) - COPY.terminal
    assert live - COPY_QUARANTINE == {CopyState.OPEN}
    stopped = COPY.step(CopyState.OPEN, CopyEvent.STOP)
    assert stopped is not None
    assert stopped.state in COPY_QUARANTINE
    for state in COPY_QUARANTINE:
        ended = COPY.step(state, CopyEvent.DRAINED)
        assert ended is not None
        assert ended.state in COPY.terminal


def test_the_page_names_the_deadline_of_every_live_state() -> None:
    section = PAGE.partition("## Deadlines\n")[2].partition("\n## ")[0]
    named = {
        (table, state.strip())
        for table, states in re.findall(r"^\| (source|target|copy) \| ([^|]+) \|", section, re.MULTILINE)
        for state in states.split(",")
    }
    tables = {"source": SOURCE, "target": TARGET, "copy": COPY}
    states = {"source": SourceState, "target": TargetState, "copy": CopyState}
    live = {(name, str(state)) for name, table in tables.items() for state in states[name] if state not in table.terminal}  # type: ignore[attr-defined]
    assert named == live
