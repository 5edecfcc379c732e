"""Checksums of a hand-off: asked for by the target, compared before anything lands, on both sides and over real drivers."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from agent_rig import AUX, BLOCKS, Net, Node, card_of, key_of
from driver_rig import Side as DriverSide
from driver_rig import is_equal, landed, pair, start_handoff
from driver_rig import key_of as driver_key

from kvbaton.agent.engine_port import Allocation, Landed, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.rank_orders import CopyId, RankReport, SpansMoved, SpansSummed
from kvbaton.config import HandoffSettings
from kvbaton.core.checks import ONE_IN
from kvbaton.core.handoff import Executor, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.core.messages import ConfirmAsk, Confirmed, decode, encode
from kvbaton.core.timeline import Side
from kvbaton.transport.faulty import Faults

KEY = key_of("k")
RANKS, TOKENS = 2, 3
SPANS = tuple(Span(number, number, number + 1, 0, 1) for number in range(TOKENS))
FULL = HandoffSettings(integrity=Integrity.FULL)


class Pair:
    """Two nodes in the middle of a push, every span announced."""

    def __init__(self, *, writes: bool = False, settings: HandoffSettings = FULL, spans: tuple[Span, ...] = SPANS) -> None:
        executor = Executor.SOURCE_WRITES if writes else Executor.TARGET_READS
        self.net = Net()
        self.source = self.net.add(card_of("s", RANKS), 1, executor)
        self.target = self.net.add(card_of("t", RANKS), 2, executor, settings=settings)
        wanted = SourceRequest(KEY, "p", self.source.address, None, Mode.PUSH)
        self.source.coordinator.expect_target(KEY, "p")
        self.target.coordinator.expect_source(wanted)
        self.target.coordinator.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
        self.settle()
        if spans:
            self.source.coordinator.spans_ready(KEY, BLOCKS, spans)
            self.settle()

    def settle(self) -> None:
        self.source.settle()
        self.target.settle()
        self.net.deliver_all()

    def offer(self) -> None:
        self.source.coordinator.offer(Offer(KEY, BLOCKS, TOKENS, AUX))
        self.settle()

    def move(self) -> None:
        for node in (self.source, self.target):
            node.ranks.finish_all()
        self.settle()

    def sum(self, node: Node, wrong: int = 0) -> None:
        node.ranks.sum_all(wrong)
        self.settle()

    def quiet(self) -> None:
        for node in (self.source, self.target):
            node.ranks.quiet_all()
        self.settle()

    def sent(self, node: Node, kind: type[Any]) -> list[Any]:
        return [message for message in node.sent if isinstance(message, kind)]

    def target_events(self) -> list[Any]:
        return [event for event in self.target.events if isinstance(event, Landed | TargetEnded)]


def test_spans_that_are_reported_together_are_summed_with_one_order() -> None:
    pair = Pair()
    pair.target.coordinator.target.sum_size = 1
    copies = {move.copy for move in pair.target.ranks.moves}
    (copy,) = copies
    late = CopyId(key_of("another"), 1, 1)
    reports = deque[RankReport]([SpansMoved(copy, 0, (0, 1), 20, 20), SpansMoved(copy, 1, (0,), 10, 10)])
    reports += [SpansMoved(late, 1, (1,), 10, 10), SpansMoved(copy, 1, (0, 1), 10, 10), SpansMoved(copy, 1, (1,), 10, 10)]
    while reports:
        pair.target.coordinator.take_report(reports)
    sums = [(rank, [span.number for span in order.spans]) for rank, order in pair.target.ranks.sums]
    assert sums == [(0, [0, 1]), (1, [0]), (1, [1])]
    record = pair.target.coordinator.target.live[KEY]
    assert record.moved == {0: {0, 1}, 1: {0, 1}}
    assert record.bytes_moved == 40, "a span that is reported again counts once"
    assert pair.target.coordinator.target.late_total["copy"] == 1


def test_spans_are_summed_when_all_are_known_and_moved_and_compared_before_landed() -> None:
    pair = Pair()
    pair.move()
    assert pair.source.ranks.sums == pair.target.ranks.sums == [], "more may come, and one order can sum it all"
    pair.offer()
    for node, side in ((pair.source, Side.SOURCE), (pair.target, Side.TARGET)):
        assert [(rank, ask.spans, ask.side) for rank, ask in node.ranks.sums] == [(rank, SPANS, side) for rank in range(RANKS)]
    assert pair.sent(pair.target, ConfirmAsk) == [], "nothing is asked before our own sums are there"
    pair.sum(pair.target)
    assert len(pair.sent(pair.target, ConfirmAsk)) == 1
    assert pair.sent(pair.source, Confirmed) == [], "nothing is confirmed before the source's sums are there"
    pair.sum(pair.source)
    (confirmed,) = pair.sent(pair.source, Confirmed)
    assert len(confirmed.sums) == RANKS * TOKENS
    assert isinstance(pair.target_events()[0], Landed)
    assert pair.target.coordinator.target.mismatches_total == 0


def test_what_is_moved_after_the_last_announcement_is_summed_with_the_rest() -> None:
    pair = Pair()
    pair.offer()
    assert pair.target.ranks.sums == []
    (first, *others) = list(pair.target.ranks.moves)
    for move in others:
        pair.target.ranks.finish(move)
    pair.settle()
    assert {rank for rank, _ in pair.target.ranks.sums} == {each.rank for each in others} - {first.rank}
    pair.target.ranks.finish(first)
    pair.settle()
    assert [rank for rank, _ in pair.target.ranks.sums].count(first.rank) == 1
    pair.sum(pair.source)
    pair.sum(pair.target)
    assert isinstance(pair.target_events()[0], Landed)


@pytest.mark.parametrize("integrity", [Integrity.FULL, Integrity.SAMPLED])
def test_what_is_worth_an_order_is_summed_while_more_is_computed(integrity: Integrity) -> None:
    pair = Pair(settings=HandoffSettings(integrity=integrity), spans=())
    one_in = ONE_IN if integrity is Integrity.SAMPLED else 1
    pair.source.coordinator.source.sum_size, pair.target.coordinator.target.sum_size = 2, 2 * one_in
    numbers: dict[Side, list[list[int]]] = {side: [] for side in Side}
    spans = tuple(Span(number, number * one_in, (number + 1) * one_in, 0, 1) for number in range(TOKENS))
    for span in spans:
        pair.source.coordinator.spans_ready(KEY, BLOCKS, (span,))
        pair.settle()
        pair.move()
        for node, side in ((pair.source, Side.SOURCE), (pair.target, Side.TARGET)):
            numbers[side].append([each.number for rank, order in node.ranks.sums if rank == 1 for each in order.spans])
    assert numbers == {side: [[], [0, 1], [0, 1]] for side in Side}


def test_of_a_sample_the_target_waits_for_as_many_times_more_as_it_leaves_out() -> None:
    sizes = {
        integrity: Pair(settings=HandoffSettings(integrity=integrity)).target.coordinator.target.sum_size
        for integrity in (Integrity.FULL, Integrity.SAMPLED)
    }
    assert sizes[Integrity.SAMPLED] == ONE_IN * sizes[Integrity.FULL]


@pytest.mark.parametrize("writes", [False, True])
def test_a_wrong_sum_fails_the_handoff_with_both_values_and_is_counted(writes: bool) -> None:
    pair = Pair(writes=writes)
    pair.move()
    pair.offer()
    pair.sum(pair.source)
    pair.sum(pair.target, wrong=7)
    pair.quiet()
    (ended,) = pair.target_events()
    assert ended.outcome is Outcome.FAILED
    assert ended.reason.startswith("checksum of span 0 (tokens 0 to 1, layers 0 to 1) in leg 0")
    assert "00000007 at the target and 00000000 at the source" in ended.reason
    assert pair.target.coordinator.target.mismatches_total == 1
    assert [event.outcome for event in pair.source.events if isinstance(event, SourceEnded)] == [Outcome.FAILED]


def test_where_the_source_writes_the_target_sums_after_the_confirmation_and_before_delivery() -> None:
    pair = Pair(writes=True)
    pair.offer()
    pair.move()
    assert pair.sent(pair.source, Confirmed) == []
    assert pair.target.ranks.sums == []
    pair.sum(pair.source)
    assert len(pair.sent(pair.source, Confirmed)) == 1
    assert pair.target_events() == []
    assert {rank for rank, _ in pair.target.ranks.sums} == set(range(RANKS))
    pair.sum(pair.target)
    assert isinstance(pair.target_events()[0], Landed)


def test_what_a_source_wrote_is_summed_once_however_often_it_confirms() -> None:
    pair = Pair(writes=True)
    pair.offer()
    pair.move()
    pair.sum(pair.source)
    confirmed = pair.sent(pair.source, Confirmed)[-1]
    assert len(pair.target.ranks.sums) == RANKS
    pair.target.coordinator.on_frame(decode(encode(Incarnation("s"), "t", confirmed)), pair.source.address)
    assert len(pair.target.ranks.sums) == RANKS


def test_sums_that_are_missing_are_wrong() -> None:
    pair = Pair()
    pair.move()
    pair.offer()
    pair.sum(pair.target)
    (ask,) = pair.sent(pair.target, ConfirmAsk)
    pair.target.coordinator.target.on_confirmed(pair.source.card.incarnation, Confirmed(KEY, ask.grant, ask.generation, TOKENS))
    pair.quiet()
    (ended,) = pair.target_events()
    assert "missing at the source" in ended.reason


def test_a_source_that_cannot_sum_fails_at_once_on_both_sides() -> None:
    pair = Pair()
    pair.offer()
    rank, ask = pair.source.ranks.sums[0]
    pair.source.coordinator.on_rank(SpansSummed(ask.copy, Side.SOURCE, rank, {}, "checksum: no memory"))
    pair.settle()
    pair.quiet()
    (ended,) = pair.target_events()
    assert (ended.outcome, "no memory" in ended.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize("side", list(Side))
def test_one_span_of_several_that_cannot_be_summed_fails_the_hand_off(side: Side) -> None:
    pair = Pair()
    pair.move()
    pair.offer()
    node = pair.source if side is Side.SOURCE else pair.target
    rank, ask = node.ranks.sums[0]
    good = SpansSummed(ask.copy, side, rank, {0: ((rank, 1),)})
    bad = SpansSummed(ask.copy, side, rank, {}, "checksum: no memory")
    reports = deque[RankReport]([good, bad])
    while reports:
        node.coordinator.take_report(reports)
    pair.settle()
    pair.quiet()
    (ended,) = pair.target_events()
    assert (ended.outcome, "no memory" in ended.reason) == (Outcome.FAILED, True)


def test_a_retraction_drops_the_sums_with_the_spans() -> None:
    pair = Pair(spans=())
    pair.source.coordinator.source.sum_size = pair.target.coordinator.target.sum_size = 1
    pair.source.coordinator.spans_ready(KEY, BLOCKS, SPANS)
    pair.settle()
    pair.move()
    source, target = pair.source.ranks, pair.target.ranks
    late = [SpansSummed(ask.copy, ask.side, rank, {0: ((rank, 99),)}) for rank, ask in (source.sums[0], target.sums[0])]
    pair.source.coordinator.retract(KEY)
    pair.settle()
    assert source.sums == []
    assert target.sums == []
    target.quiet_all()
    for node, report in zip((pair.source, pair.target), late, strict=True):
        node.coordinator.on_rank(report)
    pair.source.coordinator.spans_ready(KEY, BLOCKS, SPANS)
    pair.settle()
    pair.offer()
    pair.move()
    pair.sum(pair.source)
    pair.sum(pair.target)
    assert isinstance(pair.target_events()[0], Landed)


def test_a_retraction_drops_what_was_to_be_summed_with_what_would_come() -> None:
    pair = Pair()
    pair.move()
    record = pair.target.coordinator.target.live[KEY]
    assert record.unsummed == {rank: [span.number for span in SPANS] for rank in range(RANKS)}
    pair.source.coordinator.retract(KEY)
    pair.settle()
    assert record.unsummed == {}
    pair.target.ranks.quiet_all()
    pair.source.coordinator.spans_ready(KEY, BLOCKS, SPANS)
    pair.settle()
    pair.offer()
    pair.move()
    assert [ask.copy.generation for _, ask in pair.target.ranks.sums] == [record.generation] * RANKS
    pair.sum(pair.source)
    pair.sum(pair.target)
    assert isinstance(pair.target_events()[0], Landed)


def test_without_checksums_nothing_is_summed() -> None:
    pair = Pair(settings=HandoffSettings())
    pair.move()
    pair.offer()
    assert isinstance(pair.target_events()[0], Landed)
    assert pair.source.ranks.sums == pair.target.ranks.sums == []


def test_nothing_is_left_of_sums_when_a_handoff_is_cancelled() -> None:
    pair = Pair()
    pair.move()
    pair.offer()
    assert pair.source.ranks.sums
    assert pair.target.ranks.sums
    pair.target.coordinator.cancel(KEY)
    pair.settle()
    pair.quiet()
    assert pair.source.ranks.sums == pair.target.ranks.sums == []


# Over real sockets and real memory.


@pytest.mark.parametrize("integrity", list(Integrity))
def test_real_bytes_pass_their_checksums(integrity: Integrity) -> None:
    with pair(settings=HandoffSettings(integrity=integrity)) as (source, target):
        landed(source, target, "k")
        assert is_equal(source, target)
        assert target.driver.stats().mismatches_total == 0


@pytest.mark.parametrize("faults", [Faults(corrupt=True), Faults(drop_writes=True)], ids=["corrupt", "dropped"])
@pytest.mark.parametrize("integrity", [Integrity.SAMPLED, Integrity.FULL])
def test_bytes_that_changed_on_their_way_fail_the_request_and_only_that(faults: Faults, integrity: Integrity) -> None:
    with pair(faults=faults, settings=HandoffSettings(integrity=integrity)) as (source, target):
        assert _fails(source, target, "k").startswith("checksum of span 0 (tokens 0 to 10, layers 0 to 2) in leg 0 is ")
        assert target.driver.stats().mismatches_total == 1
        target.transport.set_faults(Faults())
        landed(source, target, "next")
        assert is_equal(source, target)


def _fails(source: DriverSide, target: DriverSide, name: str) -> str:
    start_handoff(source, target, name)
    ended = target.wait_for(TargetEnded, driver_key(name))
    assert ended.outcome is Outcome.FAILED
    assert source.wait_for(SourceEnded, driver_key(name)).outcome is Outcome.FAILED
    return ended.reason


def test_control_without_checksums_the_same_corruption_lands() -> None:
    with pair(faults=Faults(corrupt=True)) as (source, target):
        landed(source, target, "k")
        assert not is_equal(source, target)
