"""The target side alone: what it grants, has filled, counts, delivers and gives back, and what it does not believe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Clock, Post, ScriptedRanks, card_of, key_of

from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, SourceRequest, TargetEnded
from kvbaton.agent.rank_orders import CopyId, CopyStopped, SpansMoved, SpansSummed
from kvbaton.agent.target import TargetSide
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, Executor, HandoffKey, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import (
    MAX_REASON,
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.timeline import Note, Side, Stage

KEY = key_of("k")
TOKENS = 3
S1, S2 = Incarnation("s1"), Incarnation("s2")
ADDRESS = ControlAddress.of("127.0.0.1", 7000)
SPANS = tuple(Span(number, number, number + 1, 0, 1) for number in range(TOKENS))
SOURCE_BLOCKS = ((7, 8, 9),)
RANKS = 2

MessageT = TypeVar("MessageT", bound=Message)


@dataclass
class Rig:
    """A target side, everything it sends, and a source that the test plays."""

    writes: bool = False
    mode: Mode = Mode.PUSH
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)
    events: list[EngineEvent] = field(default_factory=list)
    settings: HandoffSettings = DEFAULT_HANDOFF
    notes: list[Note] = field(default_factory=list)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.ranks = ScriptedRanks(Executor.SOURCE_WRITES if self.writes else Executor.TARGET_READS)
        card = card_of("t1", RANKS)
        ports = (self.clock, self.post, self.ranks, self.events.append)
        self.side = TargetSide(card, "scripted", self.limits, *ports, self.settings, self.notes.append)
        self.ranks.report = self.side.on_copy  # type: ignore[assignment]

    def sent(self, kind: type[MessageT]) -> list[MessageT]:
        """Messages of one kind that were sent since the last look."""
        return [message for message in self.post.take() if isinstance(message, kind)]

    def take_events(self) -> list[EngineEvent]:
        """Events that the engine got since the last look."""
        events = list(self.events)
        self.events.clear()
        return events

    def request(self, key: HandoffKey = KEY, incarnation: Incarnation | None = None) -> SourceRequest:
        return SourceRequest(key, "p", ADDRESS, incarnation, self.mode)

    def grant(self, key: HandoffKey = KEY, source: str = "s1") -> int:
        """Up to the point where the source has been sent its grant; returns its number."""
        wanted = self.request(key)
        self.side.expect(wanted, card_of(source, RANKS))
        self.side.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
        return self.side.live[key].grant

    def announce(self, *numbers: int, generation: int = 1, grant: int = 1) -> None:
        blocks = () if self.writes else SOURCE_BLOCKS
        self.side.on_announced(S1, Announced(KEY, grant, generation, blocks, tuple(SPANS[number] for number in numbers)))

    def finish_prefill(self, *, count: int = TOKENS, tokens: int = TOKENS, generation: int = 1, grant: int = 1) -> None:
        self.side.on_prefilled(S1, Prefilled(KEY, grant, generation, count, tokens, 0.0))
        self.side.on_aux(S1, AuxSent(KEY, grant, AUX))

    def fill(self) -> None:
        """Up to the point where everything has been moved."""
        self.grant()
        self.announce(0, 1, 2)
        self.finish_prefill()
        self.ranks.finish_all()

    def confirm(self, *, generation: int = 1, count: int = TOKENS, grant: int = 1) -> None:
        self.side.on_confirmed(S1, Confirmed(KEY, grant, generation, count))

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.side.tick()

    def state(self) -> TargetState | None:
        record = self.side.live.get(KEY)
        return None if record is None else record.state


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def writing() -> Rig:
    return Rig(writes=True)


def outcomes(events: list[EngineEvent]) -> list[Outcome]:
    """The outcomes that an engine got."""
    return [event.outcome if isinstance(event, TargetEnded) else Outcome.DELIVERED for event in events]


def test_a_read_is_granted_filled_confirmed_and_landed(rig: Rig) -> None:
    rig.grant()
    assert rig.post.take() == [Grant(KEY, 1, "p", Mode.PUSH, Executor.TARGET_READS, 1, (), 0, 1, tokens=TOKENS)]
    rig.announce(0, 1)
    assert {(move.rank, move.span, move.source_blocks) for move in rig.ranks.moves} == {
        (rank, span, SOURCE_BLOCKS) for rank in range(RANKS) for span in (0, 1)
    }
    rig.announce(1, 2)
    rig.finish_prefill()
    assert len(rig.ranks.moves) == RANKS * TOKENS, "a span is moved once"
    *rest, last = list(rig.ranks.moves)
    for move in rest:
        rig.ranks.finish(move)
    assert rig.sent(ConfirmAsk) == []
    rig.ranks.finish(last)
    assert rig.post.take() == [ConfirmAsk(KEY, 1, 1)]
    assert rig.take_events() == []
    rig.confirm()
    assert rig.post.take() == [Release(KEY, 1)]
    (landed,) = rig.take_events()
    assert isinstance(landed, Landed)
    assert (landed.key, landed.aux, landed.stats.bytes_moved) == (KEY, AUX, 10 * RANKS * TOKENS)
    assert not rig.side.live
    assert rig.ranks.copies == {}


def test_a_write_lands_when_the_source_has_confirmed(writing: Rig) -> None:
    writing.grant()
    (grant,) = writing.sent(Grant)
    assert (grant.executor, grant.blocks) == (Executor.SOURCE_WRITES, BLOCKS)
    writing.announce(0, 1, 2)
    assert writing.ranks.moves == []
    writing.finish_prefill()
    assert writing.take_events() == []
    writing.confirm()
    assert outcomes(writing.take_events()) == [Outcome.DELIVERED]
    assert writing.sent(Release) == [Release(KEY, 1)]


def test_a_confirmation_that_overtakes_the_prefill_counts_when_that_is_in(writing: Rig) -> None:
    """A source whose target counts sends both at once, and a connection that was dialled anew keeps no order."""
    writing.grant()
    writing.announce(0, 1, 2)
    writing.confirm()
    assert writing.take_events() == [], "a confirmation counts against what was prefilled"
    writing.finish_prefill()
    assert outcomes(writing.take_events()) == [Outcome.DELIVERED]


@pytest.mark.parametrize("wrong", [{"count": TOKENS + 1}, {"generation": 2}])
def test_a_wrong_confirmation_that_overtakes_the_prefill_is_late(writing: Rig, wrong: dict[str, int]) -> None:
    writing.grant()
    writing.announce(0, 1, 2)
    writing.confirm(**wrong)
    writing.finish_prefill()
    assert writing.take_events() == []
    assert writing.side.late_total["confirmed"] == 1
    writing.confirm()
    assert outcomes(writing.take_events()) == [Outcome.DELIVERED]


def test_a_confirmation_that_was_not_asked_for_is_not_kept_where_the_target_reads(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.confirm()
    assert rig.side.late_total["confirmed"] == 1
    assert rig.side.live[KEY].early_confirmed is None


def test_in_pull_the_target_reads_whatever_its_transport_can_do() -> None:
    rig = Rig(writes=True, mode=Mode.PULL)
    rig.grant()
    assert [grant.executor for grant in rig.sent(Grant)] == [Executor.TARGET_READS]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_messages_of_the_source_may_come_in_any_order(rig: Rig, order: tuple[int, ...]) -> None:
    rig.grant()
    steps = [
        lambda: rig.announce(0, 1, 2),
        lambda: rig.side.on_prefilled(S1, Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.0)),
        lambda: rig.side.on_aux(S1, AuxSent(KEY, 1, AUX)),
    ]
    for step in order:
        steps[step]()
    rig.ranks.finish_all()
    assert rig.state() is TargetState.CONFIRMING


@pytest.mark.parametrize("missing", ["spans", "prefilled", "aux", "one rank"])
def test_nothing_is_complete_while_a_part_is_missing(rig: Rig, missing: str) -> None:
    rig.grant()
    rig.announce(*((0, 1) if missing == "spans" else (0, 1, 2)))
    if missing != "prefilled":
        rig.side.on_prefilled(S1, Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.0))
    if missing != "aux":
        rig.side.on_aux(S1, AuxSent(KEY, 1, AUX))
    for move in [move for move in rig.ranks.moves if missing != "one rank" or move.rank == 0]:
        rig.ranks.finish(move)
    assert rig.state() is TargetState.FILLING
    assert rig.sent(ConfirmAsk) == []


def test_a_span_counts_once_however_often_it_is_reported(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.finish_prefill()
    move = rig.ranks.moves[0]
    for _ in range(TOKENS):
        rig.ranks.moves.append(move)
        rig.ranks.finish(move)
    assert rig.side.live[KEY].bytes_moved == 10
    assert rig.state() is TargetState.FILLING


def test_of_a_report_with_a_span_that_is_in_already_the_others_count(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1)
    copy = rig.side.live[KEY].copy
    rig.side.on_copy(SpansMoved(copy, 0, (0,), 10, 10))
    rig.side.on_copy(SpansMoved(copy, 0, (0, 1), 10, 10))
    assert rig.side.live[KEY].moved[0] == {0, 1}


@pytest.mark.parametrize(
    ("generation", "count", "grant"), [(2, TOKENS, 1), (0, TOKENS, 1), (1, TOKENS - 1, 1), (1, TOKENS, 2), (1, TOKENS, 0)]
)
def test_a_confirmation_of_anything_else_does_not_deliver(rig: Rig, generation: int, count: int, grant: int) -> None:
    rig.fill()
    rig.confirm(generation=generation, count=count, grant=grant)
    rig.side.on_confirmed(S2, Confirmed(KEY, 1, 1, TOKENS))
    assert rig.take_events() == []
    assert rig.side.late_total["confirmed"] == 2


def test_a_confirmation_before_the_last_byte_does_not_deliver(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.finish_prefill()
    rig.confirm()
    rig.ranks.finish_all()
    assert rig.take_events() == []
    assert rig.state() is TargetState.CONFIRMING


def test_a_count_that_changes_is_not_believed(rig: Rig) -> None:
    rig.fill()
    rig.side.on_prefilled(S1, Prefilled(KEY, 1, 1, TOKENS + 1, TOKENS, 0.0))
    rig.confirm(count=TOKENS + 1)
    assert rig.take_events() == []


@pytest.mark.parametrize("numbers", [(0, 1), (1, 2), ()])
def test_spans_that_are_not_the_whole_cache_are_not_delivered(rig: Rig, numbers: tuple[int, ...]) -> None:
    rig.grant()
    rig.announce(*numbers)
    rig.finish_prefill(count=len(numbers))
    rig.ranks.finish_all()
    rig.ranks.quiet_all()
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert "not the whole cache" in ended.reason


def test_another_number_of_tokens_is_refused_with_both(rig: Rig) -> None:
    rig.grant()
    rig.finish_prefill(tokens=TOKENS + 1)
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert "4 tokens" in ended.reason
    assert "asked for 3" in ended.reason


def test_a_retraction_before_the_first_announcement_leaves_it_granted(rig: Rig) -> None:
    rig.grant()
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    assert rig.state() is TargetState.GRANTED
    rig.announce(0, generation=1)
    assert rig.ranks.moves == []
    rig.announce(0, generation=2)
    assert rig.state() is TargetState.FILLING
    assert rig.ranks.moves


def test_a_count_of_spans_that_overtook_their_announcements_is_void_with_its_generation(rig: Rig) -> None:
    rig.grant()
    rig.finish_prefill(count=1)
    assert rig.state() is TargetState.GRANTED
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    rig.announce(0, 1, 2, generation=2)
    rig.finish_prefill(generation=2)
    rig.ranks.finish_all()
    assert rig.take_events() == []
    assert rig.sent(ConfirmAsk) == [ConfirmAsk(KEY, 1, 2)]


def test_a_first_token_is_void_with_its_generation(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.finish_prefill()
    assert rig.side.live[KEY].aux is not None
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    assert rig.side.live[KEY].aux is None


@pytest.mark.parametrize("at", [TargetState.FILLING, TargetState.CONFIRMING])
def test_the_end_of_the_prefill_again_and_again_renews_no_deadline(rig: Rig, at: TargetState) -> None:
    if at is TargetState.CONFIRMING:
        rig.fill()
    else:
        rig.grant()
        rig.announce(0)
        rig.finish_prefill()
    assert rig.state() is at
    for _ in range(int(LIMITS.transfer_timeout) + 1):
        rig.finish_prefill()
        rig.pass_time(1.0)
    assert rig.state() is not at


def test_a_retraction_waits_for_the_reads_of_the_old_generation(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1)
    old = rig.side.live[KEY].copy
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    assert rig.state() is TargetState.CLEARING
    rig.announce(0, generation=2)
    assert {move.copy for move in rig.ranks.moves} == {old}, "nothing of the new generation moves yet"
    rig.ranks.quiet_all()
    assert rig.state() is TargetState.FILLING
    assert {(move.copy.generation, move.span) for move in rig.ranks.moves} == {(2, 0)}


def test_what_was_moved_before_a_retraction_does_not_count(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.ranks.finish_all()
    rig.announce(0, generation=2)
    rig.ranks.quiet_all()
    rig.finish_prefill(generation=2)
    rig.ranks.finish_all()
    assert rig.state() is TargetState.FILLING
    rig.announce(1, 2, generation=1)
    assert rig.side.late_total["announced"] == 1
    rig.announce(1, 2, generation=2)
    rig.ranks.finish_all()
    assert rig.sent(ConfirmAsk) == [ConfirmAsk(KEY, 1, 2)]


def test_a_retraction_after_the_last_byte_starts_over(rig: Rig) -> None:
    rig.fill()
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    rig.confirm()
    rig.ranks.quiet_all()
    assert rig.take_events() == []
    assert rig.state() is TargetState.FILLING


def test_one_failed_rank_fails_all_when_the_others_are_quiet(rig: Rig) -> None:
    rig.grant()
    rig.announce(0)
    copy = rig.side.live[KEY].copy
    rig.ranks.fail(1, copy, "the cable is cut")
    assert rig.take_events() == []
    assert rig.side.quarantined_blocks == 3
    assert [stop.reason for stop in rig.sent(Stop)] == ["the cable is cut"]
    rig.ranks.quiet_all()
    assert rig.take_events() == [TargetEnded(KEY, Outcome.FAILED, "the cable is cut")]
    assert rig.side.quarantined_blocks == 0


@pytest.mark.parametrize("answer", ["stopped", "over", "refused", "gone", "region"])
def test_blocks_that_a_source_may_write_to_come_back_when_it_is_quiet(writing: Rig, answer: str) -> None:
    writing.grant()
    writing.announce(0)
    writing.side.cancel(KEY, "the client is gone")
    assert writing.sent(Stop) == [Stop(KEY, 1, Outcome.CANCELLED, "the client is gone", sequence=1)]
    writing.pass_time(1000 * LIMITS.transfer_timeout)
    assert writing.take_events() == [], "time alone never frees target memory"
    match answer:
        case "stopped":
            writing.side.on_stopped(S1, Stopped(KEY, 1))
        case "over":
            writing.side.on_over(S1, Over(KEY, 1, Outcome.EXPIRED))
        case "refused":
            writing.side.on_refused(S1, Refused("this grant was used before", KEY, 1, stale=True, sequence=1))
        case "gone":
            writing.side.on_peer_gone(S1, "dead")
        case "region":
            writing.side.on_region_fenced(2)
    assert outcomes(writing.take_events()) == [Outcome.CANCELLED]


def test_a_source_that_does_not_stop_is_fenced_by_stronger_and_stronger_means(writing: Rig) -> None:
    writing.grant()
    writing.side.cancel(KEY, "the client is gone")
    states = []
    for _ in range(4):
        writing.pass_time(LIMITS.stop_timeout)
        states.append((writing.state(), list(writing.ranks.revoked), list(writing.ranks.resets)))
    assert states == [
        (TargetState.REVOKING, [(S1, 2)], []),
        (TargetState.ISOLATED, [(S1, 2)], [3]),
        (TargetState.ISOLATED, [(S1, 2)], [3]),
        (TargetState.ISOLATED, [(S1, 2)], [3]),
    ]
    assert len(writing.sent(Stop)) >= 5


@pytest.mark.parametrize("sender", [S2, S1])
def test_only_the_stop_of_this_grant_frees_blocks(writing: Rig, sender: Incarnation) -> None:
    writing.grant()
    writing.side.cancel(KEY, "the client is gone")
    writing.side.on_stopped(sender, Stopped(KEY, 1 if sender == S2 else 2))
    writing.side.on_stopped(sender, Stopped(key_of("other"), 1))
    assert writing.take_events() == []


def test_stopped_means_nothing_while_the_hand_off_is_live(writing: Rig) -> None:
    writing.grant()
    writing.side.on_stopped(S1, Stopped(KEY, 1))
    writing.side.cancel(KEY, "the client is gone")
    assert writing.take_events() == []


def test_a_stale_number_is_replaced_and_what_was_received_is_forgotten(rig: Rig) -> None:
    rig.grant()
    rig.finish_prefill()
    rig.post.take()
    rig.side.on_refused(S1, Refused("this grant was used before", KEY, 1, stale=True))
    assert [grant.grant for grant in rig.sent(Grant)] == [2]
    record = rig.side.live[KEY]
    assert (record.generation, record.span_count, record.aux) == (0, None, None)
    rig.announce(0, 1, 2, grant=1)
    assert rig.ranks.moves == []


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_refusal_of_a_number_that_the_grant_never_had_ends_nothing(writing: Rig, is_announced: bool) -> None:
    """A changed copy of the grant was refused; the grant itself may have been accepted, and the source writes."""
    writing.grant()
    writing.post.take()
    if is_announced:
        writing.announce(0)
    before = writing.state()
    writing.side.on_refused(S1, Refused("used before", KEY, 1, stale=True, used_up_to=1, sequence=7))
    assert writing.state() is before
    assert writing.take_events() == []
    assert writing.post.take() == []
    assert writing.side.late_total["refused"] == 1


@pytest.mark.parametrize("at", ["granted", "announced", "stopping"])
def test_a_refusal_without_its_number_is_no_proof_that_a_source_which_writes_is_quiet(writing: Rig, at: str) -> None:
    """Of an older release: it may be about a changed copy of the grant, while the source writes under the grant itself."""
    writing.grant()
    if at != "granted":
        writing.announce(0)
    if at == "stopping":
        writing.side.cancel(KEY, "the client is gone")
    writing.post.take()
    writing.side.on_refused(S1, Refused("too far ahead", KEY, 1, stale=True, used_up_to=6))
    assert writing.state() is TargetState.STOPPING
    assert writing.side.quarantined_blocks == 3
    assert writing.sent(Grant) == [], "a stop of a second grant would be answered while the first is still written to"
    writing.pass_time(LIMITS.stop_timeout / 2)
    assert writing.take_events() == []
    writing.side.on_stopped(S1, Stopped(KEY, 1))
    assert outcomes(writing.take_events()) == [Outcome.CANCELLED if at == "stopping" else Outcome.FAILED]
    writing.grant(key_of("next"))
    assert writing.sent(Grant)[-1].sequence == 7, "it goes on with a number that is accepted"


def test_a_number_that_a_source_which_writes_cannot_have_accepted_is_replaced(writing: Rig) -> None:
    """Its stop would not be answered either."""
    writing.grant()
    writing.side.on_refused(S1, Refused("used before", KEY, 1, stale=True, used_up_to=1 << 40, sequence=1))
    writing.post.take()
    writing.side.on_refused(S1, Refused("too far ahead", KEY, 2, stale=True, used_up_to=1))
    assert [(grant.grant, grant.sequence) for grant in writing.sent(Grant)] == [(3, 2)]


@pytest.mark.parametrize("used_up_to", [1, 2, 9_000, 1 << 40])
def test_a_stale_number_is_replaced_by_one_that_the_source_accepts(rig: Rig, used_up_to: int) -> None:
    rig.grant()
    rig.post.take()
    rig.side.on_refused(S1, Refused("used before", KEY, 1, stale=True, used_up_to=used_up_to))
    assert [grant.sequence for grant in rig.sent(Grant)] == [used_up_to + 1]
    rig.grant(key_of("next"))
    assert [grant.sequence for grant in rig.sent(Grant)] == [used_up_to + 2], "later grants go on from there"


def test_a_forged_refusal_that_sends_the_count_away_is_healed_by_the_next_true_one(rig: Rig) -> None:
    rig.grant()
    rig.side.on_refused(S1, Refused("forged", KEY, 1, stale=True, used_up_to=1 << 61))
    rig.post.take()
    rig.side.on_refused(S1, Refused("too far ahead", KEY, 2, stale=True, used_up_to=1))
    assert [(grant.grant, grant.sequence) for grant in rig.sent(Grant)] == [(3, 2)]


@pytest.mark.parametrize("used_up_to", [0, 1, 1 << 40])
def test_a_source_that_refuses_every_number_fails_the_hand_off_by_name(rig: Rig, used_up_to: int) -> None:
    rig.grant()
    for _ in range(20):
        if KEY not in rig.side.live:
            break
        number = rig.side.live[KEY].grant
        rig.side.on_refused(S1, Refused("used before", KEY, number, stale=True, used_up_to=used_up_to))
    grants = rig.sent(Grant)
    assert len(grants) <= 9
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert ended.outcome is Outcome.FAILED
    assert "refused 9 grants in a row as stale" in ended.reason
    assert str(grants[-1].sequence) in ended.reason


def test_what_the_last_refusal_states_counts_for_the_next_hand_off(rig: Rig) -> None:
    rig.grant()
    for refused in range(1, 10):
        number = rig.side.live[KEY].grant
        rig.side.on_refused(S1, Refused("used before", KEY, number, stale=True, used_up_to=1000 * refused))
    assert outcomes(rig.take_events()) == [Outcome.FAILED]
    rig.grant(key_of("next"))
    assert rig.sent(Grant)[-1].sequence == 9001


def test_a_source_without_a_number_left_fails_the_hand_off_by_name(rig: Rig) -> None:
    rig.grant()
    rig.side.on_refused(S1, Refused("used before", KEY, 1, stale=True, used_up_to=1 << 62))
    assert outcomes(rig.take_events()) == [Outcome.FAILED]
    rig.grant(key_of("next"))
    assert rig.sent(Grant)[-1].sequence == 2, "a number that cannot be sent is not kept"


def test_the_last_number_that_there_is_can_be_taken(rig: Rig) -> None:
    rig.grant()
    rig.side.on_refused(S1, Refused("used before", KEY, 1, stale=True, used_up_to=(1 << 62) - 1))
    assert rig.sent(Grant)[-1].sequence == 1 << 62
    assert KEY in rig.side.live
    rig.grant(key_of("next"))
    assert rig.sent(Grant)[-1].sequence == 1 << 62, "no message can have a greater one"
    rig.side.on_refused(
        S1, Refused("too far ahead", key_of("next"), rig.side.live[key_of("next")].grant, stale=True, used_up_to=5)
    )
    assert rig.sent(Grant)[-1].sequence == 6, "the source names where to go on"


def test_refusals_and_beats_without_our_grant_renew_no_deadline(rig: Rig) -> None:
    rig.grant()
    for _ in range(6):
        rig.pass_time(LIMITS.transfer_timeout / 5)
        if KEY in rig.side.live:
            number = rig.side.live[KEY].grant
            rig.side.on_refused(S1, Refused("used before", KEY, number, stale=True, used_up_to=number))
            rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 0),)))
    assert outcomes(rig.take_events()) == [Outcome.EXPIRED]


def test_beats_for_our_grant_renew_the_deadline(rig: Rig) -> None:
    rig.grant()
    for _ in range(20):
        rig.pass_time(LIMITS.transfer_timeout / 5)
        rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
    assert rig.state() is TargetState.GRANTED


def test_grants_are_counted_for_each_source(rig: Rig) -> None:
    for number, source in enumerate(["s1", "s2", "s1", "s3"]):
        rig.grant(key_of(f"k{number}"), source)
    assert [(grant.grant, grant.sequence) for grant in rig.sent(Grant)] == [(1, 1), (2, 1), (3, 2), (4, 1)]


def test_a_refusal_fails_with_the_reason(rig: Rig) -> None:
    rig.grant()
    rig.side.on_refused(S1, Refused("it belongs to another target", KEY, 1))
    assert rig.take_events() == [TargetEnded(KEY, Outcome.FAILED, "it belongs to another target")]


def test_no_two_grants_share_a_number(rig: Rig) -> None:
    numbers = [rig.grant(key_of(f"k{n}"), source) for n, source in enumerate(["s1", "s2", "s1", "s3"])]
    assert len(set(numbers)) == 4
    assert numbers == sorted(numbers)


def test_a_source_that_still_holds_what_ended_is_notified_how(rig: Rig) -> None:
    rig.fill()
    rig.confirm()
    rig.post.take()
    rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
    assert rig.post.take() == [], "it was sent just now"
    rig.clock.now += LIMITS.retry
    rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1), (KEY, 0), (key_of("never"), 9))))
    release, stop = rig.post.take()
    assert release == Release(KEY, 1)
    assert isinstance(stop, Stop)
    assert (stop.key, stop.grant, stop.outcome) == (key_of("never"), 9, Outcome.FAILED)


def test_a_delivery_from_one_source_is_not_sent_to_another(rig: Rig) -> None:
    """The same transfer id, first wanted from s2 and cancelled, then delivered by s1."""
    first = rig.grant(KEY, "s2")
    rig.side.cancel(KEY, "a retry elsewhere")
    second = rig.grant(KEY, "s1")
    rig.announce(0, 1, 2, grant=second)
    rig.finish_prefill(grant=second)
    rig.ranks.finish_all()
    rig.confirm(grant=second)
    assert outcomes(rig.take_events()) == [Outcome.CANCELLED, Outcome.DELIVERED]
    rig.post.take()
    rig.clock.now += LIMITS.retry
    rig.side.on_heartbeat(S2, Heartbeat(True, ((KEY, first),)))
    (stop,) = rig.post.take()
    assert isinstance(stop, Stop)
    assert stop.outcome is Outcome.CANCELLED


def test_that_the_prefill_is_complete_is_progress(rig: Rig) -> None:
    rig.grant()
    rig.pass_time(LIMITS.transfer_timeout * 0.9)
    rig.side.on_prefilled(S1, Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.0))
    rig.pass_time(LIMITS.transfer_timeout * 0.9)
    assert KEY in rig.side.live
    rig.pass_time(LIMITS.transfer_timeout * 0.2)
    assert KEY not in rig.side.live


def test_lack_of_progress_ends_it_and_heartbeats_and_spans_are_progress(rig: Rig) -> None:
    rig.grant()
    rig.pass_time(LIMITS.transfer_timeout - 1)
    rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
    rig.pass_time(LIMITS.transfer_timeout - 1)
    rig.announce(0)
    rig.pass_time(LIMITS.transfer_timeout - 1)
    rig.ranks.finish(rig.ranks.moves[0])
    rig.pass_time(LIMITS.transfer_timeout - 1)
    assert rig.state() is TargetState.FILLING
    rig.pass_time(1)
    rig.ranks.quiet_all()
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert ended.outcome is Outcome.EXPIRED
    assert "30 s while filling" in ended.reason


def test_waiting_for_memory_has_a_deadline_of_its_own_and_keeps_dialling(rig: Rig) -> None:
    rig.side.expect(rig.request(), None)
    question = Hello(card_of("t1", RANKS), wants_answer=True, question=1, answers=0, takes_several=True)
    assert rig.post.sent == [(ADDRESS, question)]
    rig.post.take()
    for _ in range(19):
        rig.pass_time(LIMITS.transfer_timeout)
    assert rig.state() is TargetState.QUEUED
    assert len(rig.sent(Hello)) == 19
    rig.pass_time(LIMITS.queue_timeout - 19 * LIMITS.transfer_timeout)
    assert outcomes(rig.take_events()) == [Outcome.EXPIRED]


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("handshaking", Hello), ("granted", Grant), ("filling", Grant), ("confirming", ConfirmAsk), ("stopping", Stop)],
)
def test_a_question_without_an_answer_is_asked_again_less_and_less_often(stage: str, kind: type[Message]) -> None:
    rig = Rig(writes=stage == "stopping")
    if stage == "handshaking":
        rig.side.expect(rig.request(), None)
        rig.side.allocated(Allocation(rig.request(), BLOCKS, TOKENS, 0))
    else:
        rig.grant()
    if stage in ("filling", "confirming"):
        rig.announce(0, 1, 2)
    if stage == "confirming":
        rig.finish_prefill()
        rig.ranks.finish_all()
    if stage == "stopping":
        rig.side.cancel(KEY, "enough")
    assert rig.state() == stage
    rig.post.take()
    asked = []
    for _ in range(40):
        rig.pass_time(0.1)
        asked.append(len(rig.sent(kind)))
    assert [index for index, count in enumerate(asked, 1) if count] == [10, 30]


def test_a_question_behind_others_that_are_being_answered_is_not_asked_again(rig: Rig) -> None:
    *others, last = (key_of(f"k{number}") for number in range(6))
    for key in (*others, last):
        rig.grant(key)
    rig.sent(Grant)
    for number, key in enumerate(others, 1):
        rig.clock.now += LIMITS.retry / 2
        rig.side.on_announced(S1, Announced(key, number, 1, SOURCE_BLOCKS, SPANS))
        rig.side.tick()
    assert last not in [grant.key for grant in rig.sent(Grant)]
    rig.pass_time(2 * LIMITS.retry)
    assert last in [grant.key for grant in rig.sent(Grant)], "the source has fallen silent"


def test_a_lost_question_is_asked_again_however_long_the_source_streams_something_else(rig: Rig) -> None:
    streamed, lost = key_of("streamed"), key_of("lost")
    for key in (streamed, lost):
        rig.grant(key)
    rig.sent(Grant)
    for _ in range(4):
        rig.clock.now += LIMITS.retry / 2
        rig.side.on_announced(S1, Announced(streamed, 1, 1, SOURCE_BLOCKS, SPANS))
        rig.side.tick()
    assert lost in [grant.key for grant in rig.sent(Grant)]


def test_signs_of_life_do_not_replace_the_confirmation(rig: Rig) -> None:
    rig.fill()
    for _ in range(8):
        rig.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))
        rig.pass_time(LIMITS.transfer_timeout / 4)
    assert rig.state() in (TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED)


def test_a_question_that_was_overtaken_by_a_later_one_is_asked_again(rig: Rig) -> None:
    first, second = key_of("first"), key_of("second")
    for key in (first, second):
        rig.grant(key)
    rig.sent(Grant)
    rig.clock.now += LIMITS.retry
    rig.side.on_announced(S1, Announced(second, 2, 1, SOURCE_BLOCKS, SPANS))
    rig.side.tick()
    assert first in [grant.key for grant in rig.sent(Grant)]


def test_nothing_is_asked_while_only_our_own_copies_are_waited_for(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.finish_prefill()
    rig.post.take()
    rig.pass_time(3 * LIMITS.retry)
    assert rig.sent(Grant) == []


def test_another_incarnation_than_the_expected_one_fails_with_both(rig: Rig) -> None:
    rig.side.expect(rig.request(incarnation=Incarnation("s0")), None)
    rig.side.on_card(card_of("s1", RANKS), ADDRESS)
    (ended,) = rig.take_events()
    assert isinstance(ended, TargetEnded)
    assert "s0" in ended.reason
    assert "s1" in ended.reason


def test_a_card_that_comes_late_is_met_in_either_order(rig: Rig) -> None:
    rig.side.expect(rig.request(), None)
    rig.side.on_card(card_of("s9", RANKS), ControlAddress.of("127.0.0.1", 9999))
    rig.side.allocated(Allocation(rig.request(), BLOCKS, TOKENS, 0))
    assert rig.state() is TargetState.HANDSHAKING
    rig.side.on_card(card_of("s1", RANKS), ADDRESS)
    assert rig.state() is TargetState.GRANTED
    rig.side.allocated(Allocation(rig.request(), BLOCKS, TOKENS, 0))
    assert rig.side.late_total["allocated"] == 1


def test_a_source_that_ended_before_any_grant_ends_the_hand_off_that_waits(rig: Rig) -> None:
    rig.grant()
    rig.side.on_over(S1, Over(KEY, 0, Outcome.CANCELLED, "the client is gone"))
    assert rig.take_events() == [TargetEnded(KEY, Outcome.FAILED, "the source cancelled: the client is gone")]


def test_an_end_without_a_grant_is_late_once_the_source_has_answered(rig: Rig) -> None:
    """It is that of an earlier hand-off of the same key: this one has a grant, and would be named by it."""
    rig.grant()
    rig.announce(0)
    rig.side.on_over(S1, Over(KEY, 0, Outcome.CANCELLED, "the client is gone"))
    assert rig.side.late_total["over"] == 1
    assert rig.state() is TargetState.FILLING
    assert rig.take_events() == []


def test_messages_that_name_no_grant_are_not_for_a_request_that_has_none(rig: Rig) -> None:
    rig.side.expect(rig.request(), card_of("s1", RANKS))
    rig.announce(0, grant=0)
    rig.finish_prefill(grant=0)
    rig.confirm(grant=0)
    rig.side.on_retracted(S1, Retracted(KEY, 0, 5))
    rig.side.on_refused(S1, Refused("no", KEY, 0))
    assert rig.state() is TargetState.QUEUED
    assert rig.take_events() == []


def test_a_source_that_does_not_stop_is_fenced_on_time_also_before_it_is_asked_again() -> None:
    rig = Rig(writes=True, limits=replace(LIMITS, stop_timeout=LIMITS.retry / 2))
    rig.grant()
    rig.side.cancel(KEY, "the client is gone")
    due_at = rig.side.next_deadline()
    assert due_at is not None
    assert due_at <= rig.clock.now + rig.limits.stop_timeout
    rig.pass_time(rig.limits.stop_timeout)
    assert rig.state() is TargetState.REVOKING


def test_a_new_registration_fails_only_what_was_written_under_the_old_one(writing: Rig) -> None:
    writing.grant(key_of("stuck"))
    writing.side.cancel(key_of("stuck"), "the client is gone")
    writing.grant()
    writing.pass_time(LIMITS.stop_timeout)
    writing.pass_time(LIMITS.stop_timeout)
    (epoch,) = writing.ranks.resets
    writing.grant(key_of("new"))
    assert writing.sent(Grant)[-1].epoch == epoch
    writing.side.on_region_fenced(epoch)
    assert outcomes(writing.take_events()) == [Outcome.CANCELLED, Outcome.FAILED]
    assert set(writing.side.live) == {key_of("new")}


def test_a_second_request_of_the_same_key_fails_and_leaves_the_first_alone(rig: Rig) -> None:
    rig.grant()
    rig.side.expect(rig.request(), card_of("s1", RANKS))
    assert outcomes(rig.take_events()) == [Outcome.FAILED]
    assert rig.state() is TargetState.GRANTED


def test_an_endless_reason_is_cut_to_what_the_wire_takes(writing: Rig) -> None:
    writing.grant()
    writing.side.cancel(KEY, "x" * 100_000)
    assert [len(stop.reason) for stop in writing.sent(Stop)] == [MAX_REASON]


def test_the_aux_record_that_landed_is_the_one_that_was_sent(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.finish_prefill()
    rig.side.on_aux(S2, AuxSent(KEY, 1, Aux(99, 0.0)))
    rig.side.on_aux(S1, AuxSent(KEY, 2, Aux(99, 0.0)))
    rig.ranks.finish_all()
    rig.confirm()
    (landed,) = rig.take_events()
    assert isinstance(landed, Landed)
    assert landed.aux == AUX


def test_heartbeats_go_to_the_sources_that_are_waited_for(rig: Rig) -> None:
    rig.side.expect(rig.request(key_of("queued")), card_of("s1", RANKS))
    rig.side.expect(rig.request(key_of("unknown")), None)
    number = rig.grant()
    assert rig.side.beat() == {S1: Heartbeat(False, ((key_of("queued"), 0), (KEY, number)))}
    assert rig.side.peers() == {S1}


def test_wire_time_that_computing_hid_is_not_taken_off_the_hand_over(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1)
    rig.clock.now += 3.0
    rig.ranks.finish_all()
    rig.clock.now += 5.0
    rig.announce(2)
    rig.clock.now += 1.0
    rig.finish_prefill()
    rig.clock.now += 0.25
    rig.ranks.finish_all()
    rig.clock.now += 0.5
    rig.confirm()
    (landed,) = rig.take_events()
    assert isinstance(landed, Landed)
    assert landed.stats.wire_s == pytest.approx(3.0 + 1.25)
    assert landed.stats.handover_s == pytest.approx(0.5)


def test_a_dial_ends_with_the_last_request_that_needed_it(rig: Rig) -> None:
    """While a request or its notice waits for the source it is dialled; after that, nothing may connect there again."""
    for name in ("one", "two"):
        rig.side.expect(rig.request(key_of(name)), None)
    assert rig.sent(Hello)
    for name in ("one", "two"):
        rig.pass_time(LIMITS.retry)
        assert rig.post.hung_up == [], "it is still needed"
        rig.side.cancel(key_of(name), "the client is gone")
    rig.pass_time(LIMITS.retry)
    assert rig.post.hung_up == [], "the source has to be notified that no target will come"
    deadline = rig.clock.now + LIMITS.transfer_timeout + LIMITS.retry
    while rig.clock.now < deadline:
        rig.pass_time(LIMITS.retry / 2)
    assert rig.post.hung_up == [ADDRESS]
    assert rig.side.next_deadline() is None
    rig.sent(Hello)
    rig.pass_time(10 * LIMITS.transfer_timeout)
    assert rig.sent(Hello) == []


def test_a_source_that_answers_is_not_hung_up_on(rig: Rig) -> None:
    rig.side.expect(rig.request(), None)
    rig.side.on_card(card_of("s1", RANKS), ADDRESS)
    rig.side.cancel(KEY, "the client is gone")
    rig.pass_time(10 * LIMITS.transfer_timeout)
    assert rig.post.hung_up == []


def test_a_span_that_is_announced_again_as_another_one_fails_the_hand_off() -> None:
    rig = Rig()
    grant = rig.grant()
    rig.announce(0, 1)
    rig.announce(1)
    assert rig.side.live[KEY].state is TargetState.FILLING, "the same span again is a repetition"
    other = Span(1, 0, 2, 0, 1)
    rig.side.on_announced(S1, Announced(KEY, grant, 1, SOURCE_BLOCKS, (other,)))
    assert rig.side.live[KEY].state is TargetState.STOPPING
    assert rig.side.live[KEY].spans[1] == SPANS[1]
    assert "announced span 1 as" in rig.side.live[KEY].reason


# What none of the tests above would miss, and a run of the simulator notices seldom.


def test_an_announcement_without_a_new_span_opens_no_copy(rig: Rig) -> None:
    rig.grant()
    rig.announce()
    assert rig.ranks.copies == {}
    assert rig.state() is TargetState.FILLING


def test_the_longest_block_list_of_a_generation_counts_whichever_comes_last(rig: Rig) -> None:
    rig.grant()
    rig.side.on_announced(S1, Announced(KEY, 1, 1, SOURCE_BLOCKS, SPANS[:1]))
    rig.side.on_announced(S1, Announced(KEY, 1, 1, ((7,),), SPANS[1:2]))
    assert {move.source_blocks for move in rig.ranks.moves} == {SOURCE_BLOCKS}


def test_announcements_of_a_source_that_writes_are_progress(writing: Rig) -> None:
    """Of its writes nothing else is seen: without them it would end although it gets further."""

    def beat_for(seconds: float) -> None:
        end = writing.clock.now + seconds
        while writing.clock.now < end:
            writing.pass_time(min(LIMITS.transfer_timeout / 2, end - writing.clock.now))
            writing.side.on_heartbeat(S1, Heartbeat(True, ((KEY, 1),)))

    writing.grant()
    writing.announce(0)
    beat_for(LIMITS.hold_cap - 1)
    writing.announce(1)
    beat_for(LIMITS.hold_cap - 1)
    assert writing.state() is TargetState.FILLING
    beat_for(2)
    assert writing.state() is TargetState.STOPPING


def test_a_late_card_of_another_incarnation_is_followed_by_a_question_at_once(rig: Rig) -> None:
    rig.side.expect(rig.request(incarnation=S2), None)
    assert [hello.question for hello in rig.sent(Hello)] == [1]
    rig.side.on_card(card_of("s1", RANKS), ADDRESS, answers=0)
    assert [hello.question for hello in rig.sent(Hello)] == [2]
    assert rig.state() is TargetState.QUEUED


def test_a_request_that_is_taken_after_all_withdraws_the_notice_that_it_was_declined(rig: Rig) -> None:
    rig.side.decline(rig.request(), card_of("s1", RANKS), "no room")
    assert len(rig.sent(Stop)) == 1
    rig.side.expect(rig.request(), card_of("s1", RANKS))
    rig.pass_time(LIMITS.retry)
    assert rig.sent(Stop) == []


def test_a_source_that_asks_for_our_card_is_sent_its_notices_again(rig: Rig) -> None:
    """It did not know us, and has dropped them."""
    rig.side.decline(rig.request(), card_of("s1", RANKS), "no room")
    rig.side.decline(rig.request(key_of("other")), card_of("s2", RANKS), "no room")
    rig.post.take()
    rig.side.resend_to(S1)
    assert [stop.key for stop in rig.sent(Stop)] == [KEY]


def test_a_source_that_is_gone_gets_no_notices(rig: Rig) -> None:
    rig.side.decline(rig.request(), card_of("s1", RANKS), "no room")
    rig.side.decline(rig.request(key_of("other")), card_of("s2", RANKS), "no room")
    rig.side.on_peer_gone(S1, "it died")
    assert len(rig.side.decline_notices) == 1


def test_a_fence_ends_the_grants_of_one_source(writing: Rig) -> None:
    other = key_of("other")
    writing.grant()
    writing.grant(other, source="s2")
    writing.side.on_peer_fenced(S1, writing.side.epoch + 1)
    assert [event.key for event in writing.take_events() if isinstance(event, TargetEnded)] == [KEY]
    assert writing.side.live[other].state is TargetState.GRANTED


def test_the_last_announcement_may_complete_a_write(writing: Rig) -> None:
    writing.grant()
    writing.finish_prefill()
    writing.confirm()
    assert writing.take_events() == []
    writing.announce(0, 1, 2)
    assert outcomes(writing.take_events()) == [Outcome.DELIVERED]


def test_a_refusal_that_is_not_stale_ends_it_whatever_number_it_has(rig: Rig) -> None:
    rig.grant()
    rig.side.on_refused(S1, Refused("another prompt", KEY, 1, sequence=99))
    assert outcomes(rig.take_events()) == [Outcome.FAILED]


def test_a_report_about_a_copy_of_nothing_is_late(rig: Rig) -> None:
    rig.side.on_copy(CopyStopped(CopyId(KEY, 1, 1), 0))
    assert rig.side.late_total["copy"] == 1


def test_a_lost_grant_is_sent_again_also_when_it_had_to_wait_for_memory(rig: Rig) -> None:
    wanted = rig.request()
    rig.side.expect(wanted, card_of("s1", RANKS))
    rig.pass_time(3 * LIMITS.retry)
    rig.side.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
    assert len(rig.sent(Grant)) == 1
    rig.pass_time(LIMITS.retry)
    assert len(rig.sent(Grant)) == 1


def test_bytes_that_were_moved_before_a_retraction_are_not_reported(rig: Rig) -> None:
    rig.grant()
    rig.announce(0, 1, 2)
    rig.ranks.finish_all()
    rig.announce(0, 1, 2, generation=2)
    rig.ranks.quiet_all()
    rig.ranks.finish_all()
    rig.finish_prefill(generation=2)
    rig.confirm(generation=2)
    (landed,) = rig.take_events()
    assert isinstance(landed, Landed)
    assert (landed.stats.bytes_planned, landed.stats.bytes_moved) == (10 * TOKENS * RANKS, 10 * TOKENS * RANKS)


def test_what_ends_without_a_grant_is_declined_for_its_prompt_alone(rig: Rig) -> None:
    rig.side.expect(rig.request(), card_of("s1", RANKS))
    rig.side.cancel(KEY, "gone")
    assert [(stop.grant, stop.prompt) for stop in rig.sent(Stop)] == [(0, "p")]


def test_what_ends_with_a_grant_is_stopped_and_not_declined_too(rig: Rig) -> None:
    """A decline is about whatever of that prompt has no grant: it would end the next request of the same key."""
    rig.grant()
    rig.side.cancel(KEY, "gone")
    assert outcomes(rig.take_events()) == [Outcome.CANCELLED]
    assert [stop.grant for stop in rig.sent(Stop)] == [1]
    assert len(rig.side.decline_notices) == 0


def test_a_heartbeat_of_another_source_renews_no_deadline(rig: Rig) -> None:
    rig.grant()
    rig.pass_time(0.9 * LIMITS.transfer_timeout)
    rig.side.on_heartbeat(S2, Heartbeat(from_source=True, live=((KEY, 1),)))
    rig.pass_time(0.2 * LIMITS.transfer_timeout)
    assert outcomes(rig.take_events()) == [Outcome.EXPIRED]


def test_blocks_for_a_request_that_is_over_are_late(rig: Rig) -> None:
    rig.side.allocated(Allocation(rig.request(), BLOCKS, TOKENS, 0))
    assert rig.side.late_total["allocated"] == 1
    assert rig.take_events() == []


def test_what_is_no_peer_is_sent_no_decline(rig: Rig) -> None:
    """Nothing has shown who it is at that address: there is none to send it to."""
    rig.side.expect(rig.request(), None)
    rig.post.take()
    rig.side.on_refused_peer(ADDRESS, "it speaks HTTP")
    assert rig.post.sent == []
    assert rig.take_events() == [TargetEnded(KEY, Outcome.FAILED, "it speaks HTTP")]


def test_what_is_no_peer_is_not_dialled_again_for_what_was_declined(rig: Rig) -> None:
    rig.side.decline(rig.request(), None, "no room")
    assert len(rig.sent(Hello)) == 1
    rig.side.on_refused_peer(ADDRESS, "it speaks HTTP")
    assert rig.post.sent == []
    assert rig.side.next_deadline() is None


def test_the_stop_of_a_grant_is_no_answer_to_a_notice(rig: Rig) -> None:
    """The key was used again: the source has stopped what it was granted before, and has yet to get the notice."""
    rig.grant()
    rig.side.cancel(KEY, "the client is gone")
    rig.side.decline(rig.request(), card_of("s1", RANKS), "no room")
    rig.side.on_stopped(S1, Stopped(KEY, 1))
    assert len(rig.side.decline_notices) == 1
    rig.side.on_stopped(S1, Stopped(KEY, 0))
    assert len(rig.side.decline_notices) == 0


def test_a_dial_ends_although_another_hand_off_has_its_source_at_that_address(rig: Rig) -> None:
    rig.side.expect(rig.request(key_of("one")), card_of("s1", RANKS))
    rig.side.expect(rig.request(key_of("two"), S2), None)
    rig.side.cancel(key_of("two"), "the client is gone")
    deadline = rig.clock.now + LIMITS.transfer_timeout + 2 * LIMITS.retry
    while rig.clock.now < deadline:
        rig.pass_time(LIMITS.retry / 2)
    assert rig.post.hung_up == [ADDRESS]
    assert list(rig.side.live) == [key_of("one")]


def test_announcements_of_a_source_that_is_read_put_no_end_off(rig: Rig) -> None:
    """Only what was moved counts: a source that announces more and more, and retracts it, would keep our blocks."""
    rig.grant()
    rig.announce(0)
    rig.ranks.finish_all()
    capped_at = rig.side.live[KEY].capped_at
    rig.clock.now += 1
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    rig.ranks.quiet_all()
    rig.announce(0, 1, 2, generation=2)
    rig.ranks.finish(rig.ranks.moves[0])
    assert sum(map(len, rig.side.live[KEY].moved.values())) == 1
    assert rig.side.live[KEY].capped_at == capped_at


def test_a_second_generation_in_more_spans_is_no_further_than_the_first_one_was(rig: Rig) -> None:
    """The first one was complete and waited for its confirmation; the next one is not, in however many spans it comes."""
    rig.grant()
    whole = Span(0, 0, TOKENS, 0, 1)
    rig.side.on_announced(S1, Announced(KEY, 1, 1, SOURCE_BLOCKS, (whole,)))
    rig.finish_prefill(count=1)
    rig.ranks.finish_all()
    assert rig.state() is TargetState.CONFIRMING
    capped_at = rig.side.live[KEY].capped_at
    rig.clock.now += 1
    rig.side.on_retracted(S1, Retracted(KEY, 1, 2))
    rig.ranks.quiet_all()
    rig.announce(0, 1, 2, generation=2)
    rig.ranks.finish_all()
    assert rig.state() is TargetState.FILLING
    assert sum(map(len, rig.side.live[KEY].moved.values())) == 3 * RANKS
    assert rig.side.live[KEY].capped_at == capped_at


@pytest.mark.parametrize("missing", ["the aux record", "a span", "the count"])
def test_what_is_missing_of_a_finished_prefill_is_asked_for(rig: Rig, missing: str) -> None:
    rig.grant()
    rig.announce(*((0, 1) if missing == "a span" else (0, 1, 2)))
    if missing != "the count":
        rig.side.on_prefilled(S1, Prefilled(KEY, 1, 1, TOKENS, TOKENS, 0.0))
    if missing != "the aux record":
        rig.side.on_aux(S1, AuxSent(KEY, 1, AUX))
    rig.post.take()
    rig.pass_time(LIMITS.retry)
    assert len(rig.sent(Grant)) == 1


def test_a_confirmation_that_is_missing_is_asked_for_and_once_it_came_nothing_is() -> None:
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    writing.announce(0, 1, 2)
    writing.finish_prefill()
    writing.post.take()
    writing.pass_time(LIMITS.retry)
    assert len(writing.sent(Grant)) == 1
    writing.confirm()
    writing.pass_time(4 * LIMITS.retry)
    assert writing.state() is TargetState.FILLING, "it is being summed"
    assert writing.sent(Grant) == []


def _sum_all(rig: Rig, grant: int = 1, generation: int = 1) -> None:
    for rank, order in list(rig.ranks.sums):
        copy = CopyId(KEY, grant, generation)
        rig.side.on_summed_spans(SpansSummed(copy, Side.TARGET, rank, {span.number: ((rank, 1),) for span in order.spans}))


def test_what_was_written_and_is_summed_has_to_be_the_whole_cache() -> None:
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    writing.announce(1, 2)
    writing.finish_prefill(count=2)
    writing.confirm(count=2)
    _sum_all(writing)
    assert writing.state() is TargetState.STOPPING
    assert "not the whole cache" in writing.side.live[KEY].reason


def test_what_was_written_is_summed_when_the_last_announcement_is_in_also_where_the_confirmation_overtook_it() -> None:
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    writing.announce(0, 1)
    writing.finish_prefill()
    writing.confirm()
    assert writing.ranks.sums == []
    writing.announce(2)
    assert [(rank, order.spans) for rank, order in writing.ranks.sums] == [(rank, SPANS) for rank in range(RANKS)]


@pytest.mark.parametrize(("grant", "generation"), [(2, 1), (1, 2)])
def test_sums_of_another_copy_do_not_count(grant: int, generation: int) -> None:
    """Reports of ranks are under way for a while: the key may be used again, or what was summed retracted, meanwhile."""
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    writing.announce(0, 1, 2)
    writing.finish_prefill()
    writing.confirm()
    _sum_all(writing, grant, generation)
    assert writing.side.live[KEY].sums == {}
    _sum_all(writing)
    assert writing.state() is TargetState.STOPPING, "all sums are in, and the source has sent none"


def test_what_was_summed_is_summed_again_after_a_retraction() -> None:
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    for generation in (1, 2):
        writing.ranks.sums.clear()
        writing.announce(0, 1, 2, generation=generation)
        writing.finish_prefill(generation=generation)
        writing.confirm(generation=generation)
        assert {order.copy.generation for _, order in writing.ranks.sums} == {generation}


def test_without_checksums_no_rank_is_asked_for_one(rig: Rig) -> None:
    rig.fill()
    assert rig.ranks.sums == []


def test_what_arrives_of_a_hand_off_that_is_ending_is_not_summed() -> None:
    reading = Rig(settings=HandoffSettings(integrity=Integrity.FULL))
    reading.side.sum_size = 1
    reading.grant()
    reading.announce(0, 1)
    reading.ranks.finish(reading.ranks.moves[0])
    assert len(reading.ranks.sums) == 1
    reading.side.cancel(KEY, "the client is gone")
    reading.ranks.finish_all()
    assert len(reading.ranks.sums) == 1


def test_a_confirmation_of_what_is_ending_has_nothing_summed() -> None:
    writing = Rig(writes=True, settings=HandoffSettings(integrity=Integrity.FULL))
    writing.grant()
    writing.announce(0, 1, 2)
    writing.finish_prefill()
    writing.side.cancel(KEY, "the client is gone")
    writing.confirm()
    assert writing.ranks.sums == []


def test_an_end_without_a_grant_counts_only_from_the_source(rig: Rig) -> None:
    rig.grant()
    rig.side.on_over(S2, Over(KEY, 0, Outcome.CANCELLED, "the client is gone"))
    assert rig.state() is TargetState.GRANTED


@pytest.mark.parametrize("is_counted_first", [False, True])
def test_more_spans_than_the_source_counts_fail_the_hand_off_with_both(rig: Rig, is_counted_first: bool) -> None:
    rig.grant()
    rig.announce(*((0,) if is_counted_first else (0, 1, 2)))
    rig.finish_prefill(count=2)
    if is_counted_first:
        rig.announce(1, 2)
    rig.ranks.quiet_all()
    assert rig.take_events() == [TargetEnded(KEY, Outcome.FAILED, "the source announced 3 spans and counts 2")]


def test_every_rank_notes_what_was_moved(rig: Rig) -> None:
    rig.fill()
    moved = [note for note in rig.notes if note.stage is Stage.MOVED]
    assert sorted((note.rank, note.first_token) for note in moved) == [
        (rank, span) for rank in range(RANKS) for span in range(TOKENS)
    ]
