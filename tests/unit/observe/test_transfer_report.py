"""Stories: two sides with clocks that cannot be compared become one timeline, in order, adding up; whatever went wrong."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.core.handoff import HandoffKey, Outcome, TransferId
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.observe.phases import Bar
from kvbaton.observe.phases import HandoffPhase as Phase
from kvbaton.observe.transfer_report import HandoffReport, SideAnswer, TransferReport, build_report
from true_notes import SPAN_BYTES, TRANSFER, Way, account, notes_of_pull, notes_of_push

SLACK_S = 1e-6
UNKNOWN = SideAnswer("decode 127.0.0.1:1", problem="it does not answer")

_short = st.floats(min_value=1e-5, max_value=0.05)
_clocks = st.floats(min_value=-1e5, max_value=1e5)
ways = st.builds(
    Way,
    source_clock=_clocks,
    target_clock=_clocks,
    queue_s=_short,
    layer_s=_short,
    message_s=_short,
    copy_s=_short,
    allocate_s=_short,
    router_s=_short,
    step_s=_short,
    chunks=st.integers(1, 4),
    layers=st.integers(1, 5),
    cached_tokens=st.sampled_from([0, 5]),
)
walks = st.sampled_from([notes_of_push, notes_of_pull])


def joined(*ways: Way) -> TransferReport:
    return build_report(TRANSFER, account(Side.SOURCE, *ways), account(Side.TARGET, *ways))


def bar(handoff: HandoffReport, phase: Phase, side: Side | None = None) -> Bar:
    return next(bar for bar in handoff.bars if bar.phase is phase and side in (None, bar.side))


def true_moment(way: Way, side: Side, stage: Stage, which: int = -1) -> float:
    return way.true[side, stage][which]


@settings(deadline=None, max_examples=40)
@given(ways, walks)
def test_the_true_offset_lies_within_the_stated_bounds(way: Way, walk: object) -> None:
    assert callable(walk)
    walk(way)
    clock = joined(way).clock
    first = {side: min(note.at for note in way.of(side)) for side in Side}
    truth = (first[Side.TARGET] - way.target_clock) - (first[Side.SOURCE] - way.source_clock)
    assert clock.is_joined
    assert clock.uncertain_s is not None
    assert clock.uncertain_s <= way.message_s + SLACK_S
    assert abs(clock.offset_s - truth) <= clock.uncertain_s + SLACK_S


@settings(deadline=None, max_examples=40)
@given(ways, walks)
def test_causes_come_before_effects_and_waits_add_up(way: Way, walk: object) -> None:
    assert callable(walk)
    walk(way)
    handoff = joined(way).handoffs[0]
    assert handoff.exposed_s is not None
    assert sum(wait.seconds for wait in handoff.waits) == pytest.approx(handoff.exposed_s, abs=SLACK_S)
    for drawn in handoff.bars:
        assert 0 <= drawn.start_s <= drawn.end_s
        assert not drawn.is_cut
    grant, wire, confirmation = (bar(handoff, phase) for phase in (Phase.GRANT, Phase.WIRE, Phase.CONFIRMATION))
    assert grant.end_s <= wire.start_s + SLACK_S
    assert wire.end_s <= confirmation.start_s + SLACK_S
    assert all(span.start_s < span.end_s for span in wire.parts)
    assert bar(handoff, Phase.FIRST_STEP).start_s == confirmation.end_s


@settings(deadline=None, max_examples=40)
@given(ways, walks)
def test_durations_are_the_true_ones_give_or_take_the_uncertainty(way: Way, walk: object) -> None:
    assert callable(walk)
    walk(way)
    report = joined(way)
    handoff = report.handoffs[0]
    give = (report.clock.uncertain_s or 0.0) + SLACK_S
    exposed = true_moment(way, Side.TARGET, Stage.FIRST_STEP) - true_moment(way, Side.SOURCE, Stage.PREFILLED)
    assert handoff.exposed_s == pytest.approx(exposed, abs=give)
    prefill = bar(handoff, Phase.PREFILL)
    started = true_moment(way, Side.SOURCE, Stage.STARTED)
    sampled = true_moment(way, Side.SOURCE, Stage.PREFILLED)
    assert prefill.end_s - prefill.start_s == pytest.approx(sampled - started, abs=SLACK_S)
    assert len(prefill.parts) == way.chunks
    assert handoff.wire_bytes == SPAN_BYTES * len(bar(handoff, Phase.WIRE).parts)


@settings(deadline=None, max_examples=15)
@given(ways)
def test_chunks_tile_the_prefill(way: Way) -> None:
    prefill = bar(joined(notes_of_push(way)).handoffs[0], Phase.PREFILL)
    for chunk in prefill.parts:
        assert (chunk.first_layer, chunk.end_layer) == (0, way.layers)
    for one, other in itertools.pairwise(prefill.parts):
        assert one.end_s == other.start_s


def test_without_the_grant_and_the_question_the_offset_has_no_upper_bound() -> None:
    """The control: messages of the target are what bounds the offset from above."""
    way = notes_of_push(Way())
    way.notes = [note for note in way.notes if note.stage not in (Stage.GRANT_SENT, Stage.FILLED)]
    clock = joined(way).clock
    assert clock.is_joined
    assert clock.uncertain_s is None


def test_a_false_offset_would_break_the_order_of_causes() -> None:
    """The control of the order: with the clocks as they are, effects come before causes."""
    way = notes_of_push(Way(source_clock=0.0, target_clock=-5.0))
    first = {side: min(note.at for note in way.of(side)) for side in Side}
    raw = first[Side.TARGET] - first[Side.SOURCE]
    clock = joined(way).clock
    assert clock.uncertain_s is not None
    assert abs(raw - clock.offset_s) > 1000 * clock.uncertain_s


def test_streaming_hides_the_wire_and_pull_shows_it() -> None:
    push = joined(notes_of_push(Way())).handoffs[0]
    pull = joined(notes_of_pull(Way())).handoffs[0]
    assert bar(push, Phase.WIRE).hidden_s > 4 * bar(push, Phase.WIRE).exposed_s
    assert bar(pull, Phase.WIRE).hidden_s == 0
    assert {wait.phase for wait in pull.waits} >= {
        Phase.ROUTER,
        Phase.QUEUE,
        Phase.GRANT,
        Phase.CONFIRMATION,
    }
    assert not [b for b in push.bars if b.phase is Phase.ROUTER]
    assert "hidden behind prefill" in push.sentence


def test_the_sentence_names_the_longest_wait() -> None:
    slow = joined(notes_of_push(Way(step_s=0.5))).sentence
    assert "500" in slow
    assert "waiting for the first step" in slow
    assert "waiting for the router" in joined(notes_of_pull(Way(router_s=0.5))).sentence


def test_a_target_alone_is_reported() -> None:
    report = build_report(TRANSFER, SideAnswer("prefill:1", problem="it is gone"), account(Side.TARGET, notes_of_push(Way())))
    handoff = report.handoffs[0]
    assert not report.clock.is_joined
    assert "source side (prefill:1) is not known: it is gone" in report.sentence
    assert "was notified of the first token" in report.sentence
    assert handoff.exposed_s is not None
    assert {b.phase for b in handoff.bars} >= {
        Phase.QUEUE,
        Phase.GRANT,
        Phase.WIRE,
        Phase.CONFIRMATION,
    }


def test_a_source_alone_is_reported() -> None:
    report = build_report(TRANSFER, account(Side.SOURCE, notes_of_push(Way())), UNKNOWN)
    handoff = report.handoffs[0]
    assert handoff.exposed_s is None
    assert bar(handoff, Phase.PREFILL).parts
    assert "target side (decode 127.0.0.1:1) is not known: it does not answer" in report.sentence


def test_without_records_nothing_is_known() -> None:
    report = build_report(TRANSFER, UNKNOWN, UNKNOWN)
    assert report.handoffs == ()
    assert report.sentence == "Nothing is known of this transfer."


def test_a_failure_states_where_when_and_why() -> None:
    way = Way()
    way.source(Stage.ARRIVED, 0.0)
    way.source(Stage.STARTED, 0.001)
    way.target(Stage.ARRIVED, 0.0)
    way.target(Stage.ALLOCATED, 0.002)
    way.target(Stage.GRANT_SENT, 0.003)
    way.target(Stage.ENDED, 30.003, outcome=Outcome.FAILED, text="no progress for 30 s")
    report = joined(way)
    assert "failed at the target after 30.00 s, in its grant: no progress for 30 s." in report.sentence
    assert not report.clock.is_joined
    assert "drawn from 0" in report.sentence
    assert bar(report.handoffs[0], Phase.GRANT).is_cut
    assert report.handoffs[0].ends[0].outcome is None
    assert [mark.label for mark in report.handoffs[0].marks] == ["failed"]


def test_a_source_that_expired_after_the_delivery_is_reported_too() -> None:
    way = notes_of_push(Way())
    way.notes = [_expired(note) if (note.side, note.stage) == (Side.SOURCE, Stage.ENDED) else note for note in way.notes]
    sentence = joined(way).sentence
    assert "The first decode step came" in sentence
    assert "expired at the source" in sentence


def _expired(note: Note) -> Note:
    return msgspec.structs.replace(note, outcome=Outcome.EXPIRED)


def test_a_hand_off_under_way_states_what_is_open() -> None:
    way = notes_of_push(Way())
    way.notes = [note for note in way.notes if note.stage not in (Stage.ENDED, Stage.FIRST_STEP, Stage.CONFIRMED)]
    sentence = joined(way).sentence
    assert "still under way" in sentence
    assert "confirmation" in sentence


def test_a_retraction_is_reported_and_the_chunk_computed_again_has_its_own_bar() -> None:
    way = Way(chunks=1)
    way.source(Stage.ARRIVED, -1.0)
    way.source(Stage.STARTED, -0.9)
    way.source(Stage.COMPUTED, -0.8, first_token=0, end_token=16, end_layer=way.layers)
    way.source(Stage.RETRACTED, -0.5)
    notes_of_push(way)
    handoff = joined(way).handoffs[0]
    assert len(bar(handoff, Phase.PREFILL).parts) == 2
    assert "was preempted once" in handoff.sentence
    assert "retracted" in [mark.label for mark in handoff.marks]


def test_several_hand_offs_share_one_timeline() -> None:
    ways = [
        notes_of_push(Way(key=HandoffKey(TransferId(TRANSFER), 0, sample), queue_s=0.002 + sample / 10)) for sample in range(3)
    ]
    report = joined(*ways)
    assert [handoff.sample_index for handoff in report.handoffs] == [0, 1, 2]
    starts = [bar(handoff, Phase.PREFILL).start_s for handoff in report.handoffs]
    assert starts == pytest.approx([0.002, 0.102, 0.202], abs=SLACK_S)
    assert report.sentence.startswith("3 hand-offs; the one that took longest")
    assert report.total_s == pytest.approx(max(max(t) for way in ways for t in way.true.values()), abs=1e-3)


def test_where_the_source_writes_the_wire_ends_with_the_confirmation() -> None:
    way = notes_of_push(Way())
    way.notes = [note for note in way.notes if note.stage not in (Stage.MOVED, Stage.FILLED)]
    handoff = joined(way).handoffs[0]
    wire, confirmation = bar(handoff, Phase.WIRE), bar(handoff, Phase.CONFIRMATION)
    assert not wire.parts
    assert wire.end_s == confirmation.end_s
    assert not wire.is_cut
    assert not confirmation.is_cut


def test_a_report_travels_as_json() -> None:
    report = joined(notes_of_push(Way()))
    assert msgspec.json.decode(msgspec.json.encode(report), type=TransferReport) == report


@settings(deadline=None, max_examples=40)
@given(ways, st.data())
def test_any_part_of_the_notes_makes_a_report(way: Way, data: st.DataObject) -> None:
    notes_of_push(way)
    keep = data.draw(st.lists(st.booleans(), min_size=len(way.notes), max_size=len(way.notes)))
    way.notes = [note for note, kept in zip(way.notes, keep, strict=True) if kept]
    accounts = {side: account(side, way) if way.of(side) else UNKNOWN for side in Side}
    report = build_report(TRANSFER, accounts[Side.SOURCE], accounts[Side.TARGET])
    assert report.sentence
    for handoff in report.handoffs:
        assert sum(wait.seconds for wait in handoff.waits) == pytest.approx(handoff.exposed_s or 0.0, abs=SLACK_S)
        assert all(drawn.end_s >= drawn.start_s for drawn in handoff.bars)
