"""A target that counts what its source writes: it lands without a message of its own after the grant.

How long that takes is a matter of the network. What is held here is which messages have to pass, one after the other.
"""

from __future__ import annotations

import itertools

import pytest
from agent_rig import AUX, BLOCKS, LIMITS, key_of
from test_coordinator import KEY, TOKENS, Pair

from kvbaton.agent.engine_port import Landed, Offer, SourceEnded, TargetEnded
from kvbaton.agent.rank_orders import Arrived, CopyId, SpansPlanned
from kvbaton.core.handoff import Executor, Incarnation, Outcome, Span
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.core.messages import Confirmed, Grant, Release

SOURCE = Incarnation("s1")


def _on_its_way(ranks: int) -> Pair:
    """Everything is computed and on its way, and confirmed as 100 bytes of each rank; nothing has arrived."""
    made = Pair(Executor.SOURCE_WRITES, ranks=ranks)
    made.target.ranks.counts_arrivals = True
    made.prefill()
    made.fetch()
    made.net.deliver_all()
    for rank in range(ranks):
        moves = [move for move in made.source.ranks.moves if move.rank == rank]
        made.source.ranks.report(SpansPlanned(moves[0].copy, rank, tuple(move.span for move in moves), 100))
    made.source.settle()
    made.net.deliver_all()
    return made


@pytest.fixture
def pair() -> Pair:
    return _on_its_way(ranks=1)


def _copy(pair: Pair) -> CopyId:
    return pair.source.ranks.moves[0].copy


_NUMBERS = itertools.count(1)


def _arrive(pair: Pair, count: int, copy: CopyId | None = None, peer: Incarnation = SOURCE, times: int = 1) -> None:
    report = Arrived(copy or _copy(pair), peer, 0, next(_NUMBERS), count)
    for _ in range(times):
        pair.target.ranks.report(report)
    pair.target.settle()


def test_it_lands_with_the_last_byte_and_sends_nothing_before(pair: Pair) -> None:
    (confirmed,) = [message for message in pair.source.sent if isinstance(message, Confirmed)]
    assert confirmed.written_bytes == 100
    _arrive(pair, 60)
    assert pair.target.events == []
    _arrive(pair, 40)
    assert [type(event) for event in pair.target.events] == [Landed]
    sent = pair.target.sent
    granted = next(index for index, message in enumerate(sent) if isinstance(message, Grant))
    assert [type(message) for message in sent[granted:]] == [Grant, Release], "no question, and no answer, in between"


@pytest.mark.parametrize("executor", Executor)
@pytest.mark.parametrize("can_count", [False, True])
def test_a_grant_states_whether_what_is_written_is_counted(executor: Executor, can_count: bool) -> None:
    pair = Pair(executor, ranks=1)
    pair.target.ranks.counts_arrivals = can_count
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    (grant,) = [message for message in pair.target.sent if isinstance(message, Grant)]
    assert grant.counts_arrivals is (can_count and executor is Executor.SOURCE_WRITES)
    opened = [order for order in pair.source.ranks.copies.values() if order.executor is Executor.SOURCE_WRITES]
    assert all(order.counts_arrivals is grant.counts_arrivals for order in opened)
    assert bool(opened) is (executor is Executor.SOURCE_WRITES)


def test_what_is_reported_twice_counts_once(pair: Pair) -> None:
    _arrive(pair, 50, times=2)
    assert pair.target.events == []
    assert pair.target.coordinator.target.late_total["arrived"] == 1
    _arrive(pair, 50)
    assert [type(event) for event in pair.target.events] == [Landed]


def test_spans_that_are_planned_twice_count_once(pair: Pair) -> None:
    record = pair.source.coordinator.source.live[KEY]
    moves = pair.source.ranks.moves
    pair.source.ranks.report(SpansPlanned(moves[0].copy, 0, tuple(move.span for move in moves), 100))
    pair.source.settle()
    assert record.written_bytes == 100


def test_what_was_on_its_way_before_a_retraction_is_not_confirmed() -> None:
    pair = Pair(Executor.SOURCE_WRITES, ranks=1)
    pair.target.ranks.counts_arrivals = True
    source = pair.source.coordinator
    source.expect_target(KEY, "p")
    pair.fetch()
    pair.net.deliver_all()
    source.spans_ready(KEY, BLOCKS, (Span(0, 0, 2, 0, 1),))
    pair.source.settle()
    old = _copy(pair)
    pair.source.ranks.report(SpansPlanned(old, 0, (0,), 40))
    pair.source.settle()
    source.retract(KEY)
    pair.source.ranks.report(SpansPlanned(old, 0, (1,), 7))
    pair.source.ranks.quiet_all()
    pair.source.settle()
    pair.net.deliver_all()
    source.offer(Offer(KEY, BLOCKS, TOKENS, AUX))
    pair.source.settle()
    assert _copy(pair).generation > old.generation
    pair.source.ranks.report(SpansPlanned(_copy(pair), 0, tuple(move.span for move in pair.source.ranks.moves), 100))
    pair.source.settle()
    (confirmed,) = [message for message in pair.source.sent if isinstance(message, Confirmed)]
    assert confirmed.written_bytes == 100
    assert source.source.late_total["copy"] == 1


def test_spans_of_another_hand_off_are_not_on_their_way(pair: Pair) -> None:
    source, copy = pair.source.coordinator.source, _copy(pair)
    source.on_planned(SpansPlanned(CopyId(key_of("another"), 1, 1), 0, (5,), 9))
    source.on_planned(SpansPlanned(copy, 3, (5,), 9))
    assert source.live[KEY].written_bytes == 100
    assert source.late_total["copy"] == 2


def test_bytes_of_others_do_not_count(pair: Pair) -> None:
    copy = _copy(pair)
    _arrive(pair, 60)
    _arrive(pair, 40, CopyId(copy.key, copy.grant + 1, copy.generation))
    _arrive(pair, 40, CopyId(copy.key, copy.grant, copy.generation - 1))
    _arrive(pair, 40, peer=Incarnation("s9"))
    assert pair.target.events == []
    assert pair.target.coordinator.target.late_total["arrived"] == 3
    _arrive(pair, 40)
    assert [type(event) for event in pair.target.events] == [Landed]


def test_bytes_of_a_generation_that_was_retracted_do_not_count(pair: Pair) -> None:
    copy, target = _copy(pair), pair.target.coordinator.target
    _arrive(pair, 60)
    _arrive(pair, 30, CopyId(copy.key, copy.grant, copy.generation + 1))
    assert target.live[KEY].arrived_bytes == 30
    _arrive(pair, 40)
    assert target.live[KEY].arrived_bytes == 30
    assert pair.target.events == []


def test_bytes_that_no_grant_asks_to_be_counted_do_not_count(pair: Pair) -> None:
    pair.target.coordinator.target.live[KEY].counts_arrivals = False
    _arrive(pair, 100)
    assert pair.target.events == []
    assert pair.target.coordinator.target.late_total["arrived"] == 1


def test_bytes_that_arrive_are_progress(pair: Pair) -> None:
    for _ in range(3):
        pair.net.pass_time(0.6 * LIMITS.transfer_timeout, lose=True)
        _arrive(pair, 10)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.FILLING
    pair.net.pass_time(1.1 * LIMITS.transfer_timeout, lose=True)
    assert pair.target.coordinator.target.live[KEY].state is not TargetState.FILLING


def test_a_source_keeps_its_blocks_until_its_own_copies_are_acknowledged(pair: Pair) -> None:
    _arrive(pair, 100)
    pair.net.deliver_all()
    assert not [event for event in pair.source.events if isinstance(event, SourceEnded)]
    assert pair.source.coordinator.source.beat() == {}
    pair.source.ranks.finish_all()
    pair.source.settle()
    assert pair.source.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)


def test_a_source_waits_for_its_own_copies_although_its_target_is_done_and_silent(pair: Pair) -> None:
    _arrive(pair, 100)
    pair.net.deliver_all()
    (release,) = [message for message in pair.target.sent if isinstance(message, Release)]
    pair.source.coordinator.source.on_release(Incarnation("t1"), release)
    assert pair.source.coordinator.source.late_total["release"] == 1
    pair.net.pass_time(2 * LIMITS.defer_timeout, lose=True)
    assert not [event for event in pair.source.events if isinstance(event, SourceEnded)]
    pair.source.ranks.finish_all()
    pair.source.settle()
    assert pair.source.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)


def test_a_source_does_not_wait_for_its_own_copies_for_ever(pair: Pair) -> None:
    _arrive(pair, 100)
    pair.net.deliver_all()
    pair.net.pass_time(LIMITS.hold_cap, lose=True)
    assert pair.source.coordinator.source.live[KEY].state is SourceState.STOPPING, "copies of ours may still read the blocks"
    pair.source.ranks.quiet(0, _copy(pair))
    pair.source.settle()
    last = pair.source.events[-1]
    assert isinstance(last, SourceEnded)
    assert last.outcome is Outcome.EXPIRED
    assert "the target has delivered" in last.reason


def test_a_copy_that_fails_after_the_delivery_changes_nothing(pair: Pair) -> None:
    _arrive(pair, 100)
    pair.net.deliver_all()
    pair.source.ranks.fail(0, _copy(pair))
    pair.source.settle()
    assert pair.source.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)


def test_a_rank_whose_copy_fails_after_the_delivery_is_progress() -> None:
    pair = _on_its_way(ranks=2)
    _arrive(pair, 200)
    pair.net.deliver_all()
    pair.net.pass_time(0.6 * LIMITS.hold_cap, lose=True)
    pair.source.ranks.fail(0, _copy(pair))
    pair.source.settle()
    pair.net.pass_time(0.6 * LIMITS.hold_cap, lose=True)
    assert pair.source.coordinator.source.live[KEY].state is SourceState.SERVING
    pair.net.pass_time(0.5 * LIMITS.hold_cap, lose=True)
    assert pair.source.coordinator.source.live[KEY].state is SourceState.STOPPING


def test_a_copy_that_fails_before_the_last_byte_fails_both(pair: Pair) -> None:
    _arrive(pair, 99)
    pair.source.ranks.fail(0, _copy(pair))
    pair.source.settle()
    pair.net.deliver_all()
    (event,) = pair.target.events
    assert isinstance(event, TargetEnded)
    assert "the link broke" in event.reason
    last = pair.source.events[-1]
    assert isinstance(last, SourceEnded)
    assert last.outcome is Outcome.FAILED
