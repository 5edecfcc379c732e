"""Hand-offs that are confirmed by a stamp: when one is set, taken and cleared on either side, and between two real drivers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Clock, Post, ScriptedRanks, card_of, key_of
from driver_rig import Side, is_equal, landed, start_handoff
from driver_rig import key_of as key_of_pair

from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, Offer, SourceEnded, SourceRequest
from kvbaton.agent.rank_orders import SpansSummed
from kvbaton.agent.source import SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.checks import SpanSum
from kvbaton.core.handoff import Confirmation, Executor, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Message,
    Over,
    Prefilled,
    Release,
    Retracted,
)
from kvbaton.core.stamps import Stamp, StampArea
from kvbaton.core.timeline import Note, Stage
from kvbaton.core.timeline import Side as NoteSide
from kvbaton.transport.memory import MemoryHub
from kvbaton.transport.runs import load_loops
from watching import wait_until

KEY = key_of("k")
TOKENS = 2
S1, T1 = Incarnation("s1"), Incarnation("t1")
SPANS = tuple(Span(number, number, number + 1, 0, 1) for number in range(TOKENS))
ADDRESS = ControlAddress.of("127.0.0.1", 7000)
SOURCE_BLOCKS = ((4, 5),)


@dataclass
class Board:
    """Stamps of one process, in a dict that both sides see."""

    shown: dict[int, int] = field(default_factory=dict)
    slots: int = 2
    reads: bool = True

    @property
    def area(self) -> StampArea | None:
        return StampArea(3, 1, self.slots)

    def vouch(self) -> None: ...

    def withdraw(self) -> None: ...

    def write(self, slot: int, value: int) -> None:
        self.shown[slot] = value

    def follow(self, card: Card) -> bool:
        del card
        return self.reads

    def read(self, peer: Incarnation, slot: int) -> int:
        del peer
        return self.shown.get(slot, 0) if self.reads else 0

    def forget(self, peer: Incarnation) -> None:
        del peer
        self.reads = False

    def close(self) -> None: ...


@dataclass
class SourceRig:
    """A source side whose target reads stamps."""

    board: Board = field(default_factory=Board)
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)
    events: list[EngineEvent] = field(default_factory=list)
    shown_at_end: list[dict[int, int]] = field(default_factory=list)
    grant: dict[str, Any] = field(default_factory=lambda: {"reads_stamps": True})

    def __post_init__(self) -> None:
        ports = (self.clock, self.post, ScriptedRanks(), self._take)
        self.side = SourceSide(1, LIMITS, *ports, stamps=self.board, name="s1")

    def _take(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, SourceEnded):
            self.shown_at_end.append({slot: value for slot, value in self.board.shown.items() if value})

    def serve(self) -> Prefilled:
        """Up to the point where the whole cache is announced; what the target was sent then."""
        self.begin()
        self.offer()
        (prefilled,) = (message for message in self.post.take() if isinstance(message, Prefilled))
        return prefilled

    def begin(self) -> None:
        """Up to the point where everything is computed."""
        self.side.expect(KEY, "p")
        how: dict[str, Any] = {"executor": Executor.TARGET_READS, **self.grant}
        self.side.on_grant(T1, Grant(KEY, 1, "p", Mode.PUSH, epoch=1, blocks=(), cached_tokens=0, sequence=1, **how))
        self.side.spans_ready(KEY, BLOCKS, SPANS)

    def offer(self) -> None:
        self.side.offer(Offer(KEY, BLOCKS, TOKENS, AUX), lambda: Span(0, 0, TOKENS, 0, 1))


def test_a_complete_cache_has_a_stamp_until_its_target_has_seen_it() -> None:
    rig = SourceRig()
    stamp = rig.serve().stamp
    assert stamp is not None
    assert rig.board.shown == {stamp.slot: stamp.value}
    rig.side.on_release(T1, Release(KEY, 1, stamp.value))
    assert rig.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)
    assert rig.shown_at_end == [{}], "it is cleared before the engine has the blocks"
    assert len(rig.side.stamp_slots) == rig.board.slots


@pytest.mark.parametrize("named", [0, 1])
def test_control_a_release_that_does_not_name_the_stamp_releases_nothing(named: int) -> None:
    rig = SourceRig()
    stamp = rig.serve().stamp
    assert stamp is not None
    rig.side.on_release(T1, Release(KEY, 1, named))
    rig.side.on_release(T1, Release(KEY, 2, stamp.value))
    rig.side.on_release(Incarnation("t2"), Release(KEY, 1, stamp.value))
    assert rig.side.live[KEY].state is SourceState.SERVING
    assert rig.side.late_total["release"] == 3
    assert rig.board.shown == {stamp.slot: stamp.value}


def _cancel(rig: SourceRig) -> None:
    rig.side.cancel(KEY, "enough")


def _expire(rig: SourceRig) -> None:
    rig.clock.now += LIMITS.defer_timeout
    rig.side.tick()


def _lose_target(rig: SourceRig) -> None:
    rig.side.on_peer_gone(T1, "dead")


@pytest.mark.parametrize("end", [_cancel, _expire, _lose_target])
def test_the_stamp_is_cleared_before_blocks_go_back_however_it_ends(end: Any) -> None:
    rig = SourceRig()
    assert rig.serve().stamp is not None
    end(rig)
    assert rig.shown_at_end == [{}]
    assert not any(rig.board.shown.values())
    assert len(rig.side.stamp_slots) == rig.board.slots


@pytest.mark.parametrize(
    "grant",
    [
        {"reads_stamps": False},
        {"reads_stamps": False, "integrity": Integrity.FULL},
        {"reads_stamps": True, "executor": Executor.SOURCE_WRITES},
        {"reads_stamps": True, "executor": Executor.SOURCE_WRITES, "integrity": Integrity.FULL},
    ],
    ids=["not read", "not read, summed", "written", "written, summed"],
)
def test_there_is_none_where_the_target_cannot_look_or_needs_an_answer(grant: dict[str, Any]) -> None:
    rig = SourceRig(grant=grant)
    assert rig.serve().stamp is None
    assert rig.board.shown == {}


def _sums(rig: SourceRig, numbers: Iterable[int]) -> SpansSummed:
    record = rig.side.live[KEY]
    return SpansSummed(record.copy, NoteSide.SOURCE, 0, {number: ((0, 40 + number),) for number in numbers})


def _prefilled(rig: SourceRig) -> list[Prefilled]:
    return [message for message in rig.post.take() if isinstance(message, Prefilled)]


def test_a_stamp_waits_for_the_checksums_that_go_with_it() -> None:
    rig = SourceRig(grant={"reads_stamps": True, "integrity": Integrity.FULL})
    rig.begin()
    rig.offer()
    rig.side.on_summed_spans(_sums(rig, range(TOKENS - 1)))
    grant = rig.side.live[KEY].grant
    assert grant is not None
    rig.side.on_grant(T1, grant)
    early = _prefilled(rig)
    assert [(each.stamp, each.sums, each.sums_follow) for each in early] == 2 * [(None, (), True)]
    assert rig.board.shown == {}
    rig.side.on_summed_spans(_sums(rig, [TOKENS - 1]))
    (prefilled,) = _prefilled(rig)
    assert prefilled.stamp is not None
    assert rig.board.shown == {prefilled.stamp.slot: prefilled.stamp.value}
    assert prefilled.sums == tuple(SpanSum(0, number, 40 + number) for number in range(TOKENS))
    assert not prefilled.sums_follow
    rig.side.on_grant(T1, grant)
    assert _prefilled(rig) == [prefilled], "sent again as it was"
    rig.side.on_summed_spans(_sums(rig, [0]))
    assert _prefilled(rig) == [], "a report that comes twice shows nothing anew"
    rig.side.on_release(T1, Release(KEY, 1, prefilled.stamp.value))
    assert rig.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)
    assert len(rig.side.stamp_slots) == rig.board.slots


def test_checksums_that_were_there_first_are_not_waited_for() -> None:
    rig = SourceRig(grant={"reads_stamps": True, "integrity": Integrity.FULL})
    rig.side.sum_size = 1
    rig.begin()
    rig.side.on_summed_spans(_sums(rig, range(TOKENS)))
    assert rig.board.shown == {}, "it may be retracted yet"
    rig.offer()
    (prefilled,) = _prefilled(rig)
    assert prefilled.stamp is not None
    assert len(prefilled.sums) == TOKENS


def test_without_a_free_slot_the_checksums_go_with_the_confirmation() -> None:
    rig = SourceRig(Board(slots=0), grant={"reads_stamps": True, "integrity": Integrity.FULL})
    rig.begin()
    rig.offer()
    (early,) = _prefilled(rig)
    assert early.sums_follow
    rig.side.on_summed_spans(_sums(rig, range(TOKENS)))
    (prefilled,) = _prefilled(rig)
    assert (prefilled.stamp, prefilled.sums, prefilled.sums_follow) == (None, (), False)
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, prefilled.generation))
    (confirmed,) = (message for message in rig.post.take() if isinstance(message, Confirmed))
    assert len(confirmed.sums) == TOKENS


def test_a_target_that_asks_although_the_stamp_stands_is_sent_the_checksums() -> None:
    """It may not know that they go with the stamp, or may not have had that message."""
    rig = SourceRig(grant={"reads_stamps": True, "integrity": Integrity.FULL})
    rig.begin()
    rig.offer()
    rig.side.on_summed_spans(_sums(rig, range(TOKENS)))
    rig.post.take()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.side.live[KEY].generation))
    (confirmed,) = rig.post.take()
    assert isinstance(confirmed, Confirmed)
    assert len(confirmed.sums) == TOKENS


def test_what_ends_before_its_last_checksum_never_shows_a_stamp() -> None:
    rig = SourceRig(grant={"reads_stamps": True, "integrity": Integrity.FULL})
    rig.begin()
    rig.offer()
    _prefilled(rig)
    late = _sums(rig, range(TOKENS))
    _cancel(rig)
    rig.side.on_summed_spans(late)
    assert _prefilled(rig) == []
    assert rig.board.shown == {}
    assert len(rig.side.stamp_slots) == rig.board.slots


def test_a_repeated_grant_gets_the_same_stamp_and_a_full_board_none() -> None:
    rig = SourceRig(Board(slots=1))
    stamp = rig.serve().stamp
    grant = rig.side.live[KEY].grant
    assert grant is not None
    rig.side.on_grant(T1, grant)
    assert [message.stamp for message in rig.post.take() if isinstance(message, Prefilled)] == [stamp]
    rig.side.stamp_slots.take()
    assert SourceRig(Board(slots=0)).serve().stamp is None


def test_nothing_is_stamped_while_it_can_be_retracted() -> None:
    rig = SourceRig()
    rig.side.expect(KEY, "p")
    rig.side.on_grant(T1, Grant(KEY, 1, "p", Mode.PUSH, Executor.TARGET_READS, 1, (), 0, 1, reads_stamps=True))
    rig.side.spans_ready(KEY, BLOCKS, SPANS)
    assert rig.board.shown == {}
    rig.side.retract(KEY)
    assert rig.board.shown == {}


@dataclass
class TargetRig:
    """A target side that reads, and looks at the stamps of its source."""

    board: Board = field(default_factory=Board)
    settings: HandoffSettings = DEFAULT_HANDOFF
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)
    ranks: ScriptedRanks = field(default_factory=ScriptedRanks)
    events: list[EngineEvent] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = (self.clock, self.post, self.ranks, self.events.append)
        how = (self.settings, self.notes.append, self.board)
        self.side = TargetSide(card_of("t1"), "scripted", LIMITS, *ports, *how)
        self.ranks.report = self.side.on_copy  # type: ignore[assignment]

    def begin(self, stamp: Stamp | None, generation: int = 1, sums: tuple[SpanSum, ...] = ()) -> None:
        """Up to the point where everything was received but the last bytes."""
        wanted = SourceRequest(KEY, "p", ADDRESS, None, Mode.PUSH)
        self.side.expect(wanted, card_of("s1"))
        self.side.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
        self.announce(stamp, generation, sums)

    def announce(self, stamp: Stamp | None, generation: int, sums: tuple[SpanSum, ...] = ()) -> None:
        self.side.on_announced(S1, Announced(KEY, 1, generation, SOURCE_BLOCKS, SPANS))
        self.side.on_prefilled(S1, Prefilled(KEY, 1, generation, TOKENS, TOKENS, 0.0, stamp, sums))
        self.side.on_aux(S1, AuxSent(KEY, 1, AUX))

    def sent(self) -> list[Message]:
        return self.post.take()


STAMP = Stamp(1, 77)


def test_a_stamp_that_stands_behind_the_last_byte_is_the_confirmation() -> None:
    rig = TargetRig(Board({1: 77}))
    rig.begin(STAMP)
    (grant,) = rig.sent()
    assert isinstance(grant, Grant)
    assert grant.reads_stamps
    assert rig.events == [], "not before the last byte"
    rig.ranks.finish_all()
    assert rig.sent() == [Release(KEY, 1, 77)]
    assert isinstance(rig.events[0], Landed)
    assert rig.side.stamped_total == 1
    assert [note.stage for note in rig.notes][-3:] == [Stage.FILLED, Stage.CONFIRMED, Stage.ENDED]


@pytest.mark.parametrize("shown", [{}, {1: 0}, {1: 78}, {0: 77}], ids=str)
def test_control_one_that_does_not_stand_any_more_is_none(shown: dict[int, int]) -> None:
    """The source is asked, and knows why: it has ended, or its slot is another hand-off's."""
    rig = TargetRig(Board({1: 77}))
    rig.begin(STAMP)
    rig.sent()
    rig.board.shown = shown
    rig.ranks.finish_all()
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    assert rig.events == []
    assert rig.side.live[KEY].state is TargetState.CONFIRMING
    rig.side.on_over(S1, Over(KEY, 1, Outcome.CANCELLED, "enough"))
    rig.ranks.quiet_all()
    assert "enough" in str(rig.events)


def test_one_that_was_cleared_by_mistake_is_answered_as_ever() -> None:
    rig = TargetRig(Board({}))
    rig.begin(STAMP)
    rig.sent()
    rig.ranks.finish_all()
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    rig.side.on_confirmed(S1, Confirmed(KEY, 1, 1, TOKENS))
    assert rig.sent() == [Release(KEY, 1)], "the stamp was not seen"
    assert isinstance(rig.events[0], Landed)
    assert rig.side.stamped_total == 0


def test_the_stamp_of_what_was_retracted_confirms_nothing() -> None:
    rig = TargetRig(Board({1: 77}))
    rig.begin(STAMP)
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    rig.ranks.quiet_all()
    rig.announce(None, generation=2)
    rig.sent()
    rig.ranks.finish_all()
    assert rig.sent() == [ConfirmAsk(KEY, 1, 2)]


FULL = HandoffSettings(integrity=Integrity.FULL)
SUMS = tuple(SpanSum(0, number, 40 + number) for number in range(TOKENS))


def _sum_here(rig: TargetRig, sums: tuple[SpanSum, ...] = SUMS) -> None:
    here: dict[int, tuple[tuple[int, int], ...]] = {each.span: ((0, each.value),) for each in sums}
    rig.side.on_summed_spans(SpansSummed(rig.side.live[KEY].copy, NoteSide.TARGET, 0, here))


def _fill_under_a_stamp(sums: tuple[SpanSum, ...] = SUMS) -> TargetRig:
    rig = TargetRig(Board({1: 77}), FULL)
    rig.begin(STAMP, sums=sums)
    rig.sent()
    rig.ranks.finish_all()
    assert not rig.events
    assert not rig.sent(), "not before what lies here is summed"
    return rig


def test_checksums_that_came_with_the_stamp_are_compared_and_nothing_is_asked() -> None:
    rig = _fill_under_a_stamp()
    _sum_here(rig)
    assert rig.sent() == [Release(KEY, 1, 77)]
    assert isinstance(rig.events[0], Landed)
    assert (rig.side.stamped_total, rig.side.mismatches_total) == (1, 0)


@pytest.mark.parametrize("sums", [SUMS[:-1], SUMS[1:], (*SUMS[:-1], SpanSum(0, TOKENS - 1, 39)), ()], ids=str)
def test_control_a_checksum_that_differs_or_is_missing_delivers_nothing(sums: tuple[SpanSum, ...]) -> None:
    rig = _fill_under_a_stamp(sums)
    _sum_here(rig)
    assert rig.side.live[KEY].state is TargetState.STOPPING
    assert (rig.side.stamped_total, rig.side.mismatches_total) == (0, 1)
    assert not any(isinstance(message, Release) for message in rig.sent())
    rig.ranks.quiet_all()
    assert "checksum of span" in str(rig.events)


def test_without_the_stamp_the_checksums_of_the_confirmation_count() -> None:
    """The slot was cleared: the source is asked as ever, and its answer replaces what came with the stamp."""
    rig = _fill_under_a_stamp((SpanSum(0, 0, 1),))
    rig.board.shown = {}
    _sum_here(rig)
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    rig.side.on_confirmed(S1, Confirmed(KEY, 1, 1, TOKENS, SUMS))
    assert rig.sent() == [Release(KEY, 1)]
    assert isinstance(rig.events[0], Landed)


def test_a_confirmation_before_it_was_asked_changes_no_checksum() -> None:
    rig = _fill_under_a_stamp()
    rig.side.on_confirmed(S1, Confirmed(KEY, 1, 1, TOKENS, (SpanSum(0, 0, 1),)))
    _sum_here(rig)
    assert isinstance(rig.events[0], Landed)


def test_checksums_of_what_was_retracted_are_forgotten() -> None:
    rig = TargetRig(Board({1: 77}), FULL)
    rig.begin(STAMP, sums=SUMS)
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    assert rig.side.live[KEY].source_sums == {}
    assert rig.side.live[KEY].stamp is None


FOLLOWS = Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.0, sums_follow=True)


def _wait_for_the_stamp() -> TargetRig:
    """Everything is in and summed here, and the source has promised its stamp."""
    rig = TargetRig(Board({1: 77}), FULL)
    wanted = SourceRequest(KEY, "p", ADDRESS, None, Mode.PUSH)
    rig.side.expect(wanted, card_of("s1"))
    rig.side.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
    rig.side.on_announced(S1, Announced(KEY, 1, 1, SOURCE_BLOCKS, SPANS))
    rig.side.on_prefilled(S1, FOLLOWS)
    rig.side.on_aux(S1, AuxSent(KEY, 1, AUX))
    rig.sent()
    rig.ranks.finish_all()
    _sum_here(rig)
    assert rig.side.live[KEY].state is TargetState.CONFIRMING
    assert not rig.sent(), "it comes by itself"
    return rig


def _stamped(sums: tuple[SpanSum, ...] = SUMS, stamp: Stamp | None = STAMP) -> Prefilled:
    return Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.1, stamp, sums)


def test_a_stamp_that_follows_is_waited_for() -> None:
    rig = _wait_for_the_stamp()
    rig.side.on_prefilled(S1, FOLLOWS)
    assert not rig.sent(), "repeated, it brings nothing"
    rig.side.on_prefilled(S1, _stamped())
    assert rig.sent() == [Release(KEY, 1, 77)]
    assert isinstance(rig.events[0], Landed)
    assert (rig.side.stamped_total, rig.side.mismatches_total) == (1, 0)
    stages = [note.stage for note in rig.notes]
    assert stages[-3:] == [Stage.FILLED, Stage.CONFIRMED, Stage.ENDED]
    assert stages.count(Stage.PREFILLED) == 1


def test_a_stamp_that_follows_first_is_kept_and_its_promise_changes_nothing() -> None:
    rig = TargetRig(Board({1: 77}), FULL)
    rig.begin(STAMP, sums=SUMS)
    rig.side.on_prefilled(S1, FOLLOWS)
    rig.sent()
    rig.ranks.finish_all()
    _sum_here(rig)
    assert rig.sent() == [Release(KEY, 1, 77)]


def test_control_checksums_that_follow_and_differ_deliver_nothing() -> None:
    rig = _wait_for_the_stamp()
    rig.side.on_prefilled(S1, _stamped((*SUMS[:-1], SpanSum(0, TOKENS - 1, 39))))
    assert not any(isinstance(message, Release) for message in rig.sent())
    assert (rig.side.stamped_total, rig.side.mismatches_total) == (0, 1)
    rig.ranks.quiet_all()
    assert "checksum of span" in str(rig.events)


@pytest.mark.parametrize("stamp", [None, Stamp(1, 78), Stamp(0, 77)], ids=str)
def test_without_a_stamp_that_stands_it_is_asked_at_once(stamp: Stamp | None) -> None:
    """No slot was free, or the source has ended since."""
    rig = _wait_for_the_stamp()
    rig.side.on_prefilled(S1, _stamped(stamp=stamp, sums=() if stamp is None else SUMS))
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    assert rig.events == []
    rig.side.on_confirmed(S1, Confirmed(KEY, 1, 1, TOKENS, SUMS))
    assert rig.sent() == [Release(KEY, 1)]


def test_a_repetition_behind_the_question_asks_nothing_again() -> None:
    rig = _wait_for_the_stamp()
    rig.board.shown = {}
    rig.side.on_prefilled(S1, _stamped())
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    rig.side.on_prefilled(S1, _stamped())
    assert rig.sent() == []


def test_a_stamp_that_does_not_come_is_asked_for_and_not_for_ever() -> None:
    rig = _wait_for_the_stamp()
    rig.clock.now += LIMITS.retry
    rig.side.tick()
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]
    for _ in range(100):
        rig.clock.now += LIMITS.transfer_timeout / 50
        rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
        rig.side.tick()
    assert rig.side.live[KEY].state in (TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED), (
        "no heartbeat renews it"
    )
    rig.ranks.quiet_all()
    assert "no progress" in str(rig.events)


def test_the_answer_counts_if_it_comes_before_the_stamp() -> None:
    rig = _wait_for_the_stamp()
    rig.side.on_confirmed(S1, Confirmed(KEY, 1, 1, TOKENS, SUMS))
    assert rig.sent() == [Release(KEY, 1)]
    rig.side.on_prefilled(S1, _stamped())
    assert rig.side.late_total["prefilled"] == 1


def test_a_retraction_while_the_stamp_is_waited_for_takes_its_promise_back() -> None:
    rig = _wait_for_the_stamp()
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    record = rig.side.live[KEY]
    assert not record.sums_follow
    rig.side.on_prefilled(S1, _stamped())
    assert record.stamp is None
    assert record.source_sums == {}


def test_a_source_whose_stamps_cannot_be_read_is_asked() -> None:
    rig = TargetRig(Board({1: 77}, reads=False))
    rig.begin(STAMP)
    (grant,) = rig.sent()
    assert isinstance(grant, Grant)
    assert not grant.reads_stamps
    rig.ranks.finish_all()
    assert rig.sent() == [ConfirmAsk(KEY, 1, 1)]


def test_a_release_that_is_repeated_names_the_stamp_again() -> None:
    rig = TargetRig(Board({1: 77}))
    rig.begin(STAMP)
    rig.ranks.finish_all()
    rig.sent()
    rig.clock.now += LIMITS.retry
    rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
    assert rig.sent() == [Release(KEY, 1, 77)]


# Two real drivers, whose stamps lie in memory that the other one maps.

needs_loops = pytest.mark.skipif(load_loops() is None, reason="no compiler is here, so there are no stamps")


@contextmanager
def real_pair(settings: HandoffSettings = DEFAULT_HANDOFF) -> Iterator[tuple[Side, Side]]:
    hub = MemoryHub()
    with Side(hub, has_stamps=True) as source, Side(hub, settings=settings, has_stamps=True) as target:
        yield source, target


@needs_loops
@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("mode", Mode)
def test_between_processes_of_one_host_nothing_is_asked(mode: Mode, integrity: Integrity) -> None:
    with real_pair(HandoffSettings(integrity=integrity)) as (source, target):
        landed(source, target, "stamped", mode)
        assert is_equal(source, target)
        assert target.driver.stats().stamped_total == 1
        assert source.driver.stats().stamped_total == 0


@needs_loops
@pytest.mark.parametrize("integrity", Integrity)
def test_control_by_a_setting_every_source_is_asked(integrity: Integrity) -> None:
    with real_pair(HandoffSettings(confirmation=Confirmation.MESSAGE, integrity=integrity)) as (source, target):
        landed(source, target, "asked")
        assert is_equal(source, target)
        assert target.driver.stats().stamped_total == 0


@needs_loops
@pytest.mark.parametrize("how", Confirmation)
def test_a_target_does_not_wait_for_a_source_that_stands_still_behind_its_last_message(how: Confirmation) -> None:
    """What the interpreter's lock of a busy engine does: the source's agents come to nothing once everything is announced."""
    with real_pair(HandoffSettings(confirmation=how)) as (source, target):
        landed(source, target, "first")
        goes_on, send = threading.Event(), source.sockets.send

        def send_and_stand_still(peer: Incarnation, message: Message) -> None:
            send(peer, message)
            if isinstance(message, AuxSent):
                source.sockets._send_waiting()
                source.sockets._door.flush()
                assert goes_on.wait(30)

        source.sockets.send = send_and_stand_still  # type: ignore[method-assign]
        start_handoff(source, target, "second")
        if how is Confirmation.STAMP:
            target.wait_for(Landed, key_of_pair("second"))
        else:
            stage = TargetState.CONFIRMING
            live = target.driver._coordinator.target.live
            wait_until(lambda: any(record.state is stage for record in live.values()), "it asks")
            assert target._find(Landed, key_of_pair("second")) is None
        goes_on.set()
        target.wait_for(Landed, key_of_pair("second"))
        source.wait_for(SourceEnded, key_of_pair("second"))
        assert is_equal(source, target)
