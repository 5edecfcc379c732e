"""The source side alone: what it sends, holds, confirms and returns, and which messages it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Clock, Post, ScriptedRanks, key_of

from kvbaton.agent.engine_port import Drained, EngineEvent, Granted, Offer, SourceEnded
from kvbaton.agent.rank_orders import SpansSummed
from kvbaton.agent.source import SourceSide
from kvbaton.core.grants import REACH
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.messages import (
    MAX_REASON,
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
    decode,
    encode,
)
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.errors import IllegalTransition

KEY = key_of("k")
TOKENS = 3
T1, T2 = Incarnation("t1"), Incarnation("t2")
SPANS = tuple(Span(number, number, number + 1, 0, 1) for number in range(TOKENS))
WHOLE = Span(0, 0, TOKENS, 0, 1)

MessageT = TypeVar("MessageT", bound=Message)


def grant(number: int = 1, key: HandoffKey = KEY, *, writes: bool = False, mode: Mode = Mode.PUSH, prompt: str = "p") -> Grant:
    """A grant as a target sends it."""
    executor = Executor.SOURCE_WRITES if writes else Executor.TARGET_READS
    return Grant(key, number, prompt, mode, executor, 1, BLOCKS if writes else (), 0, number)


@dataclass
class Rig:
    """A source side and everything it sends."""

    ranks_count: int = 2
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)
    ranks: ScriptedRanks = field(default_factory=ScriptedRanks)
    events: list[EngineEvent] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.side = SourceSide(
            self.ranks_count, LIMITS, self.clock, self.post, self.ranks, self.events.append, observe=self.notes.append
        )
        self.ranks.report = self.side.on_copy  # type: ignore[assignment]
        self.ranks.count = self.ranks_count

    def sent(self, kind: type[MessageT]) -> list[MessageT]:
        """Messages of one kind that were sent since the last look."""
        return [message for message in self.post.take() if isinstance(message, kind)]

    def take_events(self) -> list[EngineEvent]:
        """Events that the engine got since the last look."""
        events = list(self.events)
        self.events.clear()
        return events

    def expect(self, prompt: str = "p") -> None:
        self.side.expect(KEY, prompt)

    def compute(self, *numbers: int) -> None:
        self.side.spans_ready(KEY, BLOCKS, tuple(SPANS[number] for number in numbers))

    def offer(self) -> None:
        self.side.offer(Offer(KEY, BLOCKS, TOKENS, AUX), lambda: WHOLE)

    def serve(self, *, writes: bool = False) -> None:
        """Up to the point where everything is announced."""
        self.expect()
        self.side.on_grant(T1, grant(writes=writes))
        self.compute(0, 1, 2)
        self.offer()

    def state(self) -> SourceState | None:
        record = self.side.live.get(KEY)
        return None if record is None else record.state

    @property
    def generation(self) -> int:
        return self.side.live[KEY].generation


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_pull_is_announced_confirmed_and_released(rig: Rig) -> None:
    rig.expect()
    rig.offer()
    assert rig.state() is SourceState.HELD
    assert rig.post.take() == []
    rig.side.on_grant(T1, grant(mode=Mode.PULL))
    announced, prefilled, aux = rig.post.take()
    assert announced == Announced(KEY, 1, rig.generation, BLOCKS, (WHOLE,))
    assert prefilled == Prefilled(KEY, 1, rig.generation, 1, TOKENS, 0.0)
    assert aux == AuxSent(KEY, 1, AUX)
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))
    assert rig.post.take() == [Confirmed(KEY, 1, rig.generation, 1)]
    rig.side.on_release(T1, Release(KEY, 1))
    assert rig.take_events() == [SourceEnded(KEY, Outcome.DELIVERED)]
    assert not rig.side.live


def test_a_push_announces_each_span_when_it_is_computed(rig: Rig) -> None:
    rig.expect()
    rig.compute(0)
    assert rig.post.take() == []
    rig.side.on_grant(T1, grant())
    assert [announced.spans for announced in rig.sent(Announced)] == [SPANS[:1]]
    rig.compute(1, 2)
    assert [announced.spans for announced in rig.sent(Announced)] == [SPANS[1:]]
    rig.offer()
    assert [type(message) for message in rig.post.take()] == [Prefilled, AuxSent]
    assert rig.take_events() == [Granted(KEY)]


def test_a_grant_that_comes_before_the_request_is_kept_for_it(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    assert rig.state() is SourceState.PARKED
    assert rig.take_events() == []
    rig.expect()
    assert rig.take_events() == [Granted(KEY)]
    rig.compute(0)
    assert len(rig.sent(Announced)) == 1


def test_a_grant_that_no_prefill_takes_up_expires_and_its_target_is_notified(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    rig.clock.now += LIMITS.defer_timeout
    rig.side.tick()
    assert [over.outcome for over in rig.sent(Over)] == [Outcome.EXPIRED]
    assert rig.take_events() == []
    assert not rig.side.live


def test_a_parked_grant_for_another_prompt_does_not_meet_the_request(rig: Rig) -> None:
    rig.side.on_grant(T1, grant(prompt="other"))
    rig.expect()
    assert "another prompt" in rig.sent(Over)[0].reason
    assert rig.state() is SourceState.QUEUED
    assert rig.take_events() == []


def test_in_pull_nothing_is_kept_for_a_request_that_is_not_there(rig: Rig) -> None:
    rig.side.on_grant(T1, grant(mode=Mode.PULL))
    refused = rig.sent(Refused)[0]
    assert (refused.key, refused.grant, refused.stale) == (KEY, 1, False)
    assert not rig.side.live


def test_parked_grants_are_bounded(rig: Rig) -> None:
    for number in range(1, 4098):
        rig.side.on_grant(T1, grant(number, key_of(f"k{number}")))
    assert len(rig.side.live) == 4096
    assert "4096 grants wait" in rig.sent(Refused)[0].reason


def test_a_repeated_grant_repeats_what_was_announced_and_nothing_else(rig: Rig) -> None:
    rig.serve()
    first = rig.post.take()
    rig.side.on_grant(T1, grant())
    assert [type(message) for message in rig.post.take()] == [Announced, Prefilled, AuxSent]
    assert sum(isinstance(message, Announced) for message in first) == 1
    assert rig.take_events() == [Granted(KEY)]


def test_a_finished_hand_off_does_not_come_back(rig: Rig) -> None:
    rig.serve()
    rig.side.cancel(KEY, "enough")
    rig.post.take()
    rig.side.on_grant(T1, grant())
    assert rig.post.take() == [Over(KEY, 1, Outcome.CANCELLED, "enough")], "a target that missed the end gets it again"
    rig.expect()
    rig.side.on_grant(T1, grant())
    assert rig.post.take() == [Over(KEY, 1, Outcome.CANCELLED, "enough")]
    assert rig.side.live[KEY].grant is None


def test_a_stop_that_overtakes_its_grant_voids_it(rig: Rig) -> None:
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert rig.post.take() == [Stopped(KEY, 1)]
    rig.side.on_grant(T1, grant())
    assert rig.sent(Refused)[0].stale
    assert not rig.side.live


def test_a_stop_that_overtakes_a_later_grant_leaves_what_holds_an_earlier_one_alone(rig: Rig) -> None:
    rig.serve()
    rig.post.take()
    rig.side.on_stop(T1, Stop(KEY, 2, Outcome.CANCELLED, sequence=2))
    assert rig.side.live[KEY].grant_number == 1
    assert rig.side.live[KEY].state is SourceState.SERVING
    rig.side.on_grant(T1, grant(2))
    assert rig.sent(Refused)[0].stale, "the later one is void"
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert KEY not in rig.side.live


FAR = [2 + REACH, 1 << 40, 1 << 62]


@pytest.mark.parametrize("sequence", FAR)
def test_a_grant_too_far_ahead_leaves_the_next_ones_of_the_real_target_alone(rig: Rig, sequence: int) -> None:
    rig.serve()
    forged = msgspec.structs.replace(grant(9, key_of("forged")), sequence=sequence)
    rig.side.on_grant(T1, forged)
    refused = rig.sent(Refused)[0]
    assert (refused.grant, refused.stale, refused.used_up_to) == (9, True, 1)
    assert str(sequence) in refused.reason
    assert "2" in refused.reason, "the number that would be accepted"
    assert key_of("forged") not in rig.side.live
    other = key_of("other")
    rig.side.expect(other, "p")
    rig.side.on_grant(T1, grant(2, other))
    assert rig.side.live[other].grant_number == 2


def test_a_target_that_was_overtaken_by_a_forged_grant_learns_where_to_go_on(rig: Rig) -> None:
    rig.expect()
    forged = msgspec.structs.replace(grant(9, key_of("forged"), mode=Mode.PULL), sequence=100_000)
    rig.side.on_grant(T1, forged)
    rig.post.take()
    rig.side.on_grant(T1, grant())
    refused = rig.sent(Refused)[0]
    assert (refused.stale, refused.used_up_to) == (True, 100_000)
    rig.side.on_grant(T1, msgspec.structs.replace(grant(2), sequence=refused.used_up_to + 1))
    assert rig.side.live[KEY].grant_number == 2


@pytest.mark.parametrize("sequence", FAR)
def test_a_stop_too_far_ahead_is_no_promise_and_uses_nothing_up(rig: Rig, sequence: int) -> None:
    rig.serve()
    rig.post.take()
    rig.side.on_stop(T1, Stop(key_of("other"), 7, Outcome.CANCELLED, sequence=sequence))
    assert rig.post.take() == []
    assert rig.side.late_total["stop"] == 1
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=sequence))
    assert rig.post.take() == [Stopped(KEY, 1)], "what holds the grant is stopped, whatever the number in sequence"
    rig.side.expect(KEY, "p")
    rig.side.on_grant(T1, grant(2))
    assert rig.side.live[KEY].grant_number == 2


def test_a_new_grant_is_refused_only_when_copies_under_the_old_one_are_quiet(rig: Rig) -> None:
    """Both may be for the same blocks, and the target takes a refusal as the promise that they are not written to."""
    rig.expect()
    rig.side.on_grant(T1, grant(1, writes=True))
    rig.side.spans_ready(KEY, BLOCKS, (Span(0, 0, 1, 0, 1),))
    rig.post.take()
    rig.side.on_grant(T1, grant(2, writes=True))
    assert rig.side.live[KEY].state is SourceState.STOPPING
    assert rig.sent(Refused) == []
    rig.ranks.quiet_all()
    assert [(refused.grant, refused.stale) for refused in rig.sent(Refused)] == [(2, False)]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_stop_whose_grant_never_came_ends_what_it_was_for(rig: Rig, is_claimed: bool) -> None:
    rig.expect()
    rig.offer()
    if is_claimed:
        rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    rig.side.on_stop(T1, Stop(KEY, 5, Outcome.CANCELLED, "the client is gone", sequence=5))
    assert [event.outcome for event in rig.take_events() if isinstance(event, SourceEnded)] == [Outcome.CANCELLED]
    assert not rig.side.live


def test_the_stop_of_an_earlier_attempt_does_not_end_the_next_one(rig: Rig) -> None:
    rig.serve()
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    rig.expect()
    rig.post.take()
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert rig.post.take() == [Stopped(KEY, 1)]
    assert rig.state() is SourceState.QUEUED


def test_a_hand_off_belongs_to_the_first_target_that_asks_for_it(rig: Rig) -> None:
    rig.serve()
    rig.post.take()
    rig.side.on_grant(T2, grant())
    assert "another target" in rig.sent(Refused)[0].reason
    rig.side.on_confirm_ask(T2, ConfirmAsk(KEY, 1, rig.generation))
    assert [over.outcome for over in rig.sent(Over)] == [Outcome.FAILED]
    rig.side.on_release(T2, Release(KEY, 1))
    rig.side.on_stop(T2, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert rig.state() is SourceState.SERVING


def test_a_target_with_another_prompt_is_refused_and_gives_its_claim_up(rig: Rig) -> None:
    rig.expect()
    rig.side.on_heartbeat(T2, Heartbeat(False, ((KEY, 0),)))
    rig.side.on_grant(T2, grant(prompt="other"))
    assert "another prompt" in rig.sent(Refused)[0].reason
    rig.side.on_grant(T1, grant())
    assert rig.state() is SourceState.STREAMING


def test_a_heartbeat_reserves_nothing_from_a_target_that_has_the_prompt(rig: Rig) -> None:
    rig.expect()
    rig.side.on_heartbeat(T2, Heartbeat(False, ((KEY, 0),)))
    rig.side.on_grant(T1, grant())
    assert rig.sent(Refused) == []
    assert rig.state() is SourceState.STREAMING
    rig.side.on_grant(T2, grant())
    assert "another target" in rig.sent(Refused)[0].reason
    assert rig.side.live[KEY].target == T1


def test_a_new_grant_of_the_same_target_means_that_it_gave_the_old_one_up(rig: Rig) -> None:
    rig.serve()
    rig.post.take()
    rig.side.on_grant(T1, grant(2))
    assert [refused.grant for refused in rig.sent(Refused)] == [2]
    assert next(event for event in rig.take_events() if isinstance(event, SourceEnded)).outcome is Outcome.FAILED


def test_a_lease_runs_from_the_last_sign_of_life(rig: Rig) -> None:
    rig.expect()
    rig.clock.now += LIMITS.queue_timeout - 1
    rig.side.tick()
    assert rig.state() is SourceState.QUEUED, "computing is not waiting for a target"
    rig.offer()
    rig.clock.now += LIMITS.defer_timeout - 1
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    rig.clock.now += LIMITS.defer_timeout - 1
    rig.side.tick()
    assert rig.state() is SourceState.HELD
    rig.clock.now += 1
    assert rig.side.next_deadline() == rig.clock.now
    rig.side.tick()
    ended = [event for event in rig.take_events() if isinstance(event, SourceEnded)]
    assert [event.outcome for event in ended] == [Outcome.EXPIRED]
    assert "60 s while held" in ended[0].reason


def test_a_target_that_asks_after_the_end_learns_how_it_ended(rig: Rig) -> None:
    rig.serve()
    generation = rig.generation
    rig.side.cancel(KEY, "the client is gone")
    rig.post.take()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, generation))
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 1),)))
    overs = rig.sent(Over)
    assert [(over.outcome, over.reason) for over in overs] == [(Outcome.CANCELLED, "the client is gone")] * 2


def test_the_end_of_one_target_is_not_sent_to_another(rig: Rig) -> None:
    rig.serve()
    rig.side.cancel(KEY, "the client is gone")
    rig.post.take()
    rig.side.on_heartbeat(T2, Heartbeat(False, ((KEY, 1),)))
    assert rig.post.take() == []


def test_a_target_that_waits_for_what_ended_before_any_grant_is_notified(rig: Rig) -> None:
    rig.expect()
    rig.side.cancel(KEY, "the client is gone")
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    assert [(over.grant, over.outcome) for over in rig.sent(Over)] == [(0, Outcome.CANCELLED)]


def test_a_retraction_voids_what_was_announced_and_frees_the_blocks(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant())
    rig.compute(0)
    before = rig.generation
    rig.post.take()
    rig.side.retract(KEY)
    assert rig.generation > before
    assert rig.post.take() == [Retracted(KEY, 1, rig.generation)]
    assert rig.take_events() == [Granted(KEY), Drained(KEY)]
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, before))
    assert rig.post.take() == [Retracted(KEY, 1, rig.generation)]
    rig.compute(0, 1, 2)
    assert [(announced.generation, announced.spans) for announced in rig.sent(Announced)] == [(rig.generation, SPANS)]


def test_a_retraction_while_writing_waits_for_every_rank(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant(writes=True))
    rig.compute(0)
    old = rig.side.live[KEY].copy
    rig.side.retract(KEY)
    assert rig.state() is SourceState.RETRACTING
    rig.compute(1)
    rig.ranks.quiet(0, old)
    assert Drained(KEY) not in rig.take_events()
    rig.ranks.quiet(1, old)
    assert rig.take_events() == [Drained(KEY)]
    rig.compute(0)
    assert {move.copy for move in rig.ranks.moves} == {rig.side.live[KEY].copy}


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_an_end_while_retracting_waits_for_the_writes_of_the_old_generation(rig: Rig, how: str) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant(writes=True))
    rig.compute(0)
    old = rig.side.live[KEY].copy
    rig.side.retract(KEY)
    rig.post.take()
    rig.take_events()
    if how == "cancel":
        rig.side.cancel(KEY, "the client is gone")
    else:
        rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert rig.post.take() == [], "nothing may be called stopped while a write of it is in flight"
    assert rig.take_events() == []
    rig.ranks.quiet(0, old)
    rig.ranks.quiet(1, old)
    assert [type(message) for message in rig.post.take()] == [Over if how == "cancel" else Stopped]
    assert [type(event) for event in rig.take_events()] == [SourceEnded]


def test_a_source_that_writes_confirms_when_every_rank_has_moved_everything(rig: Rig) -> None:
    rig.serve(writes=True)
    copy = rig.side.live[KEY].copy
    assert [announced.blocks for announced in rig.sent(Announced)] == [()]
    *rest, last = list(rig.ranks.moves)
    for move in rest:
        rig.ranks.finish(move)
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, copy.generation))
    assert rig.sent(Confirmed) == []
    rig.ranks.finish(last)
    assert rig.sent(Confirmed) == [Confirmed(KEY, 1, copy.generation, TOKENS)]
    rig.side.on_grant(T1, grant(writes=True))
    assert rig.sent(Confirmed) == [Confirmed(KEY, 1, copy.generation, TOKENS)]
    rig.side.on_release(T1, Release(KEY, 1))
    assert rig.ranks.copies == {}
    assert rig.take_events()[-1] == SourceEnded(KEY, Outcome.DELIVERED)


def test_a_source_that_has_written_everything_before_it_is_offered_confirms_with_the_offer(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant(writes=True))
    rig.compute(0, 1, 2)
    for move in list(rig.ranks.moves):
        rig.ranks.finish(move)
    assert rig.sent(Confirmed) == []
    rig.offer()
    assert rig.sent(Confirmed) == [Confirmed(KEY, 1, rig.generation, TOKENS)]


def test_a_source_that_writes_is_asked_in_vain_before_its_last_byte(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, msgspec.structs.replace(grant(writes=True), integrity=Integrity.FULL))
    rig.compute(0, 1, 2)
    rig.offer()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))
    copy = rig.side.live[KEY].copy
    for rank in range(rig.ranks_count):
        rig.side.on_summed_spans(SpansSummed(copy, Side.SOURCE, rank, {span.number: ((rank, 1),) for span in SPANS}))
    assert rig.sent(Confirmed) == [], "everything is summed, and nothing is written"
    for move in list(rig.ranks.moves):
        rig.ranks.finish(move)
    assert len(rig.sent(Confirmed)) == 1


def test_a_copy_is_owned_by_the_side_that_opened_it(rig: Rig) -> None:
    """An instance that hands off to itself has both sides of one key."""
    rig.serve()
    assert not rig.side.owns_copy(rig.side.live[KEY].copy), "the target reads"


def test_a_decline_of_what_is_live_with_a_grant_is_not_kept_for_the_next_one(rig: Rig) -> None:
    rig.serve()
    rig.side.on_stop(T1, Stop(KEY, 0, Outcome.FAILED, "late", "p"))
    assert rig.sent(Stopped) == [Stopped(KEY, 0)]
    rig.side.cancel(KEY, "the client left")
    rig.take_events()
    rig.expect()
    assert rig.take_events() == []
    assert rig.state() is SourceState.QUEUED


def test_one_failed_rank_fails_all_and_the_others_stop_first(rig: Rig) -> None:
    rig.serve(writes=True)
    copy = rig.side.live[KEY].copy
    rig.post.take()
    rig.ranks.fail(1, copy, "the cable is cut")
    assert rig.ranks.stops == [(0, copy)]
    assert rig.sent(Over) == []
    rig.ranks.quiet_all()
    assert [(over.outcome, over.reason) for over in rig.sent(Over)] == [(Outcome.FAILED, "the cable is cut")]
    assert rig.take_events()[-1] == SourceEnded(KEY, Outcome.FAILED, "the cable is cut")


def test_what_a_copy_of_another_generation_reports_is_counted_and_ignored(rig: Rig) -> None:
    rig.serve(writes=True)
    copy = rig.side.live[KEY].copy
    other = type(copy)(copy.key, copy.grant, copy.generation + 1)
    rig.ranks.copies[0, other] = rig.ranks.copies[0, copy]
    rig.ranks.quiet(0, other)
    assert rig.side.late_total["copy"] == 1
    assert rig.side.live[KEY].open_copies == {0: copy, 1: copy}


def test_a_release_before_the_confirmation_is_ignored(rig: Rig) -> None:
    rig.serve()
    rig.side.on_release(T1, Release(KEY, 1))
    assert rig.state() is SourceState.SERVING
    assert rig.side.late_total["release"] == 1


def test_a_target_that_stopped_it_gets_stopped(rig: Rig) -> None:
    rig.serve()
    rig.post.take()
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, "the client is gone", sequence=1))
    assert rig.post.take() == [Stopped(KEY, 1)]
    assert rig.take_events()[-1] == SourceEnded(KEY, Outcome.CANCELLED, "the target cancelled: the client is gone")
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, sequence=1))
    assert rig.post.take() == [Stopped(KEY, 1)]


def test_a_target_that_is_gone_ends_what_it_had(rig: Rig) -> None:
    rig.serve()
    rig.side.on_peer_gone(T2, "dead")
    assert rig.state() is SourceState.SERVING
    assert rig.side.peers() == {T1}
    rig.side.on_peer_gone(T1, "dead")
    assert rig.take_events()[-1] == SourceEnded(KEY, Outcome.FAILED, "dead")


def test_a_grant_that_came_during_a_step_gets_heartbeats_until_the_engine_takes_requests_again(rig: Rig) -> None:
    rig.side.busy_since = rig.clock.now
    rig.side.on_grant(T1, grant(1))
    assert rig.side.beat() == {T1: Heartbeat(True, ((KEY, 1),))}
    rig.clock.now += 100.0
    assert rig.side.beat(), "the step may take longer than a target waits"
    rig.side.busy_since = rig.clock.now
    assert rig.side.beat() == {}, "the engine has taken requests since, and this was not among them"
    rig.side.busy_since = math.inf
    assert rig.side.beat() == {}, "an idle engine takes requests at once"


def test_a_call_of_the_engine_about_a_parked_grant_is_ignored(rig: Rig) -> None:
    """It is about the hand-off before this one, whose end it has not received yet."""
    rig.side.on_grant(T1, grant())
    rig.compute(0)
    rig.side.retract(KEY)
    rig.offer()
    assert rig.state() is SourceState.PARKED
    assert rig.side.live[KEY].spans == []
    assert rig.take_events() == []


@pytest.mark.parametrize("is_granted", [False, True])
def test_an_offer_that_cannot_be_raises_and_changes_nothing(rig: Rig, is_granted: bool) -> None:
    rig.expect()
    if is_granted:
        rig.side.on_grant(T1, grant())
    rig.offer()
    record = rig.side.live[KEY]
    before = (record.state, record.blocks, list(record.spans), record.offer)
    with pytest.raises(IllegalTransition, match="prefilled in state"):
        rig.side.offer(Offer(KEY, ((9,),), TOKENS, AUX), lambda: WHOLE)
    with pytest.raises(IllegalTransition, match="preempted in state"):
        rig.side.retract(KEY)
    assert (record.state, record.blocks, record.spans, record.offer) == before


@pytest.mark.parametrize("computed", [(0, 1), (1, 2), (0, 1, 1, 2)])
def test_spans_that_are_not_the_whole_cache_fail_the_hand_off(rig: Rig, computed: tuple[int, ...]) -> None:
    rig.expect()
    rig.compute(*computed)
    rig.offer()
    ended = rig.take_events()[-1]
    assert isinstance(ended, SourceEnded)
    assert ended.outcome is Outcome.FAILED
    assert "not the whole cache" in ended.reason


def test_a_second_request_of_the_same_key_fails_and_leaves_the_first_alone(rig: Rig) -> None:
    rig.expect()
    rig.expect()
    assert [type(event) for event in rig.take_events()] == [SourceEnded]
    assert rig.state() is SourceState.QUEUED


def test_an_endless_reason_is_cut_to_what_the_wire_takes(rig: Rig) -> None:
    rig.serve()
    rig.side.cancel(KEY, "x" * 100_000)
    over = rig.sent(Over)[-1]
    assert len(over.reason) == MAX_REASON
    assert decode(encode(T1, "", over)).message == over


def test_heartbeats_go_to_the_targets_that_wait(rig: Rig) -> None:
    rig.side.on_grant(T2, grant(3, key_of("parked")))
    rig.expect()
    assert rig.side.beat() == {}
    rig.side.on_heartbeat(T1, Heartbeat(False, ((KEY, 0),)))
    assert rig.side.beat() == {T1: Heartbeat(True, ((KEY, 0),))}
    rig.side.on_grant(T1, grant())
    assert rig.side.beat() == {T1: Heartbeat(True, ((KEY, 1),))}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("on_confirm_ask", ConfirmAsk(KEY, 1, 1)),
        ("on_release", Release(KEY, 1)),
        ("on_stop", Stop(KEY, 1, Outcome.FAILED)),
        ("on_heartbeat", Heartbeat(False, ((KEY, 1), (KEY, 0)))),
    ],
)
def test_messages_about_nothing_do_nothing(rig: Rig, method: str, message: Any) -> None:
    getattr(rig.side, method)(T1, message)
    assert rig.take_events() == []
    assert not rig.side.live


def test_the_engine_is_notified_how_much_its_target_has_cached(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, msgspec.structs.replace(grant(), cached_tokens=2))
    assert rig.take_events() == [Granted(KEY, cached_tokens=2)]


def test_opaque_bytes_of_the_aux_record_arrive_as_they_are(rig: Rig) -> None:
    aux = msgspec.structs.replace(AUX, opaque=bytes(range(256)))
    rig.expect()
    rig.side.on_grant(T1, grant())
    rig.side.offer(Offer(KEY, BLOCKS, TOKENS, aux), lambda: WHOLE)
    (sent,) = rig.sent(AuxSent)
    assert decode(encode(T1, "", sent)).message == sent
    assert sent.aux is not None
    assert sent.aux.opaque == bytes(range(256))


def test_a_parked_grant_that_was_stopped_ends_the_request_that_comes_for_it(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, "the client left", sequence=1))
    assert not rig.side.live
    rig.expect()
    (ended,) = rig.take_events()
    assert isinstance(ended, SourceEnded)
    assert (ended.outcome, "the client left" in ended.reason) == (Outcome.CANCELLED, True)
    # A new grant for the same room is another attempt.
    rig.side.on_grant(T1, grant(2))
    rig.expect()
    assert rig.take_events() == [Granted(KEY)]


def test_a_grant_that_comes_after_its_request_was_cancelled_leaves_no_decline_for_the_next_one(rig: Rig) -> None:
    rig.expect()
    rig.side.cancel(KEY, "the client left")
    rig.side.on_grant(T1, grant())
    assert rig.state() is SourceState.PARKED
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, "the client left", sequence=1))
    assert rig.sent(Stopped) == [Stopped(KEY, 1)]
    rig.take_events()
    rig.expect()
    assert rig.take_events() == []
    assert rig.state() is SourceState.QUEUED


def test_the_timeline_of_a_request_whose_target_has_gone_before_it_came_has_an_end(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, "the client left", sequence=1))
    rig.notes.clear()
    rig.expect()
    (ended,) = rig.take_events()
    assert isinstance(ended, SourceEnded)
    assert [(note.stage, note.outcome, note.text) for note in rig.notes] == [(Stage.ENDED, Outcome.CANCELLED, ended.reason)]


def test_another_prompt_under_the_key_of_a_stopped_parked_grant_is_not_ended(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    rig.side.on_stop(T1, Stop(KEY, 1, Outcome.CANCELLED, "the client left", sequence=1))
    rig.expect("another")
    assert rig.take_events() == []
    assert rig.state() is SourceState.QUEUED


def test_one_grant_is_refused_for_a_request_that_the_engine_refused_before(rig: Rig) -> None:
    rig.side.refuse(KEY, "too long")
    rig.side.on_grant(T1, grant())
    assert KEY not in rig.side.live
    rig.side.on_grant(T1, grant())
    first, again = rig.sent(Over)
    assert first == again, "the first answer may be lost"
    assert (first.outcome, first.reason) == (Outcome.FAILED, "too long")
    rig.side.on_grant(T2, grant())
    assert rig.state() is SourceState.PARKED, "a later one is about another request of the same key"


def test_a_long_reason_of_a_refusal_is_cut(rig: Rig) -> None:
    rig.side.refuse(KEY, "x" * 10_000)
    rig.side.on_grant(T1, grant())
    (end,) = rig.sent(Over)
    assert len(end.reason) == MAX_REASON


def test_what_the_engine_refused_is_forgotten_in_time_and_when_it_is_asked_for_again(rig: Rig) -> None:
    rig.side.refuse(KEY, "too long")
    rig.clock.now += LIMITS.defer_timeout
    rig.side.on_grant(T1, grant())
    assert rig.state() is SourceState.PARKED
    rig.side.refuse(KEY, "too long")
    assert KEY not in rig.side.live, "the grant that waited is over"
    rig.side.refuse(KEY, "too long")
    rig.expect()
    rig.side.on_grant(T2, grant())
    assert rig.state() is SourceState.STREAMING
