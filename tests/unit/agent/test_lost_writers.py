"""A source that writes is dead, or was replaced at its address: its blocks are freed when it is fenced, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agent_rig import BLOCKS, LIMITS
from msgspec import structs
from test_coordinator import KEY, TOKENS, Pair, ended

from kvbaton.agent.engine_port import SourceEnded
from kvbaton.agent.rank_orders import CopyFailed, CopyStopped, Disconnect, PeerFenced, RankOrder, RegionFenced, RevokePeer
from kvbaton.core.handoff import Executor, Incarnation, Outcome, Span
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import Grant, Over, Refused, Stop, Stopped

SOURCE = Incarnation("s1")
RANKS = 2


def _replaced(pair: Pair) -> None:
    pair.restart_source()
    pair.net.pass_time(LIMITS.retry * 2)
    pair.net.deliver_all()


def _dead(pair: Pair) -> None:
    pair.net.dead.add(pair.source.card.process.pid)
    pair.net.pass_time(2.0)


every_loss = pytest.mark.parametrize("lose", [_replaced, _dead])


def _writing(*, fences_writers: bool = True, executor: Executor = Executor.SOURCE_WRITES) -> Pair:
    """The source has its grant and writes."""
    pair = Pair(executor)
    pair.target.ranks.fences_writers = fences_writers
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    assert pair.target.coordinator.target.live[KEY].grant
    return pair


def _fence(pair: Pair, *ranks: int) -> None:
    (_, epoch) = pair.target.ranks.revoked[-1]
    for rank in ranks:
        pair.target.ranks.report(PeerFenced(SOURCE, epoch, rank))
    pair.target.settle()


@every_loss
def test_its_blocks_wait_until_every_rank_has_fenced_it(lose: Callable[[Pair], None]) -> None:
    pair = _writing()
    lose(pair)
    record = pair.target.coordinator.target.live[KEY]
    assert record.state is TargetState.REVOKING
    assert pair.target.ranks.revoked == [(SOURCE, record.epoch + 1)]
    assert pair.target.events == []
    _fence(pair, 0)
    assert pair.target.events == [], "one rank may still be written to"
    _fence(pair, 1)
    assert ended(pair.target.events).outcome is Outcome.FAILED
    assert pair.target.coordinator.target.quarantined_blocks == 0


@every_loss
def test_control_without_a_fence_to_wait_for_it_ends_at_once(lose: Callable[[Pair], None]) -> None:
    """What `--unfenced-writes` accepts, and what is right where the target reads."""
    for pair in (_writing(fences_writers=False), _writing(executor=Executor.TARGET_READS)):
        lose(pair)
        pair.run()
        assert ended(pair.target.events).outcome is Outcome.FAILED
        assert pair.target.ranks.revoked == []


@every_loss
def test_it_is_fenced_before_the_ranks_forget_it(lose: Callable[[Pair], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has disconnected a peer does not know any more which of its ranks could write."""
    pair, orders = _writing(), list[RankOrder]()
    send_all = pair.target.ranks.send_all

    def noted(order: RankOrder) -> None:
        orders.append(order)
        send_all(order)

    monkeypatch.setattr(pair.target.ranks, "send_all", noted)
    lose(pair)
    about = [type(order) for order in orders if isinstance(order, RevokePeer | Disconnect)]
    assert about[:2] == [RevokePeer, Disconnect]


@every_loss
def test_one_that_was_asked_to_stop_is_not_waited_for(lose: Callable[[Pair], None]) -> None:
    pair = _writing()
    pair.target.coordinator.cancel(KEY)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.STOPPING
    pair.net.letters.clear()
    lose(pair)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    _fence(pair, *range(RANKS))
    assert ended(pair.target.events).outcome is Outcome.CANCELLED, "what ended it first"


def test_a_fence_that_was_half_done_when_it_was_lost_is_completed() -> None:
    pair = _writing()
    pair.target.coordinator.cancel(KEY)
    pair.net.letters.clear()
    pair.net.pass_time(LIMITS.stop_timeout)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    _fence(pair, 0)
    _dead(pair)
    _fence(pair, 1)
    assert ended(pair.target.events).outcome is Outcome.CANCELLED


def test_a_fence_has_its_own_time_and_gets_no_more_when_its_writer_is_lost() -> None:
    pair = _writing()
    pair.target.coordinator.cancel(KEY)
    pair.net.letters.clear()
    pair.net.pass_time(LIMITS.stop_timeout)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    pair.net.dead.add(pair.source.card.process.pid)
    pair.net.pass_time(LIMITS.stop_timeout)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.ISOLATED


def test_a_writer_that_is_lost_while_it_is_stopped_is_fenced_for_as_long_as_any_other() -> None:
    pair = _writing()
    pair.target.coordinator.cancel(KEY)
    pair.net.letters.clear()
    pair.net.pass_time(0.7 * LIMITS.stop_timeout, lose=True)
    _dead(pair)
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    assert pair.target.ranks.resets == []


def test_without_the_report_of_a_rank_the_memory_is_registered_anew_and_time_frees_nothing() -> None:
    pair = _writing()
    _replaced(pair)
    _fence(pair, 0)
    pair.net.pass_time(LIMITS.stop_timeout)
    (epoch,) = pair.target.ranks.resets
    pair.net.pass_time(10 * LIMITS.stop_timeout)
    assert pair.target.events == []
    for rank in range(RANKS):
        pair.target.ranks.report(RegionFenced(epoch, rank))
    pair.target.settle()
    assert "s1 was replaced by s2" in ended(pair.target.events).reason


# A source that lives, and has given up a connection with bytes on it.


def _give_up(pair: Pair, *, may_land: bool = True) -> None:
    """The copy of the source fails on its first rank; the others stop."""
    copy = pair.source.ranks.moves[0].copy
    pair.source.ranks.report(CopyFailed(copy, 0, "the link broke", may_land))
    pair.source.settle()
    for rank in range(1, RANKS):
        pair.source.ranks.quiet(rank, copy)
    pair.source.settle()


def test_what_it_had_sent_is_fenced_before_the_blocks_are_freed() -> None:
    pair = _writing()
    _give_up(pair)
    pair.net.deliver_all()
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    assert pair.target.events == []
    _fence(pair, *range(RANKS))
    assert "the link broke" in ended(pair.target.events).reason


def test_control_one_that_has_nothing_on_its_way_is_not_fenced() -> None:
    for pair, may_land in ((_writing(), False), (_writing(fences_writers=False), True)):
        _give_up(pair, may_land=may_land)
        pair.net.deliver_all()
        assert "the link broke" in ended(pair.target.events).reason
        assert pair.target.ranks.revoked == []


def test_the_answer_to_a_stop_states_it_too_also_when_the_end_was_lost() -> None:
    pair = _writing()
    _give_up(pair)
    assert [message.may_land for message in pair.source.sent if isinstance(message, Over)] == [True]
    pair.net.letters.clear()
    pair.target.coordinator.cancel(KEY)
    pair.net.deliver_all()
    assert [message.may_land for message in pair.source.sent if isinstance(message, Stopped)] == [True]
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
    assert any(isinstance(message, Stop) for message in pair.target.sent)


def test_where_nothing_can_be_fenced_the_answer_to_a_stop_ends_it_whatever_it_states() -> None:
    pair = _writing(fences_writers=False)
    _give_up(pair)
    pair.net.letters.clear()
    pair.target.coordinator.cancel(KEY)
    pair.net.deliver_all()
    assert [message.may_land for message in pair.source.sent if isinstance(message, Stopped)] == [True]
    assert ended(pair.target.events).outcome is Outcome.CANCELLED
    assert pair.target.ranks.revoked == []


def test_a_later_grant_is_not_refused_while_bytes_of_an_earlier_one_are_on_their_way() -> None:
    """A refusal would promise quiet, and both may be for the same blocks."""
    pair = _writing()
    (granted,) = [message for message in pair.target.sent if isinstance(message, Grant)]
    later = structs.replace(granted, grant=granted.grant + 1, sequence=granted.sequence + 1)
    target, source = pair.target.card.incarnation, pair.source.coordinator.source
    source.on_grant(target, later)
    copy = pair.source.ranks.moves[0].copy
    for rank in range(RANKS):
        pair.source.ranks.report(CopyStopped(copy, rank, may_land=not rank))
    pair.source.settle()
    before = len(pair.source.sent)
    assert not [message for message in pair.source.sent if isinstance(message, Refused)]
    source.on_grant(target, later)
    ends = [(message.grant, message.may_land) for message in pair.source.sent if isinstance(message, Over)]
    assert ends[-2:] == [(later.grant, True), (later.grant, True)], "also when it is sent again"
    assert len(pair.source.sent) == before + 1


def test_a_generation_that_was_retracted_with_bytes_on_their_way_has_no_successor() -> None:
    """They would land on the next one, in the same blocks."""
    pair = Pair(Executor.SOURCE_WRITES, ranks=1)
    pair.target.ranks.fences_writers = True
    pair.source.coordinator.expect_target(KEY, "p")
    pair.fetch()
    pair.net.deliver_all()
    pair.source.coordinator.spans_ready(KEY, BLOCKS, (Span(0, 0, TOKENS, 0, 1),))
    pair.net.deliver_all()
    copy = pair.source.ranks.moves[0].copy
    pair.source.coordinator.retract(KEY)
    pair.source.ranks.report(CopyStopped(copy, 0, may_land=True))
    pair.source.settle()
    pair.net.deliver_all()
    last = pair.source.events[-1]
    assert isinstance(last, SourceEnded)
    assert last.outcome is Outcome.FAILED
    assert pair.target.coordinator.target.live[KEY].state is TargetState.REVOKING
