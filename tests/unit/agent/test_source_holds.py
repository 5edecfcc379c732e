"""How long a source holds what it has for a target, what shows that target that it does, and what it remembers afterwards."""

from __future__ import annotations

import msgspec
import pytest
from agent_rig import AUX, LIMITS, card_of
from test_source import KEY, SPANS, T1, T2, TOKENS, WHOLE, Rig, grant

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Drained, SourceEnded, SourceRequest
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.aux_area import AuxArea
from kvbaton.core.handoff import AuxChannel, Integrity, Mode, Outcome
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.messages import Announced, AuxSent, ConfirmAsk, Confirmed, Heartbeat, Over, Prefilled, Stop

LATER_S = 0.7 * LIMITS.defer_timeout


def waits(number: int = 1) -> Heartbeat:
    return Heartbeat(from_source=False, live=((KEY, number),))


def is_there_after(rig: Rig, wait_s: float) -> bool:
    rig.clock.now += wait_s
    rig.side.tick()
    return rig.state() not in (None, SourceState.STOPPING)


def _taken_up(rig: Rig) -> None:
    rig.side.on_grant(T1, grant())
    rig.clock.now += LATER_S
    rig.expect()


def _granted(rig: Rig) -> None:
    rig.expect()
    rig.clock.now += LATER_S
    rig.side.on_grant(T1, grant())


def _granted_when_complete(rig: Rig) -> None:
    rig.expect()
    rig.offer()
    rig.clock.now += LATER_S
    rig.side.on_grant(T1, grant())


def _complete(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant())
    rig.clock.now += LATER_S
    rig.offer()


def _asked_about(rig: Rig) -> None:
    _complete(rig)
    rig.clock.now += LATER_S
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))


def _asked_before_it_is_summed(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, msgspec.structs.replace(grant(), integrity=Integrity.FULL))
    rig.offer()
    rig.clock.now += LATER_S
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))


@pytest.mark.parametrize(
    "step", [_taken_up, _granted, _granted_when_complete, _complete, _asked_about, _asked_before_it_is_summed]
)
def test_the_silence_of_a_target_counts_from_the_last_thing_that_it_got_or_asked_for(step: object, rig: Rig) -> None:
    assert callable(step)
    step(rig)
    assert is_there_after(rig, LATER_S)
    assert not is_there_after(rig, LIMITS.defer_timeout - LATER_S)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_heartbeat_that_names_a_grant_which_is_still_on_its_way_keeps_what_it_is_for(rig: Rig) -> None:
    rig.expect()
    rig.offer()
    rig.clock.now += LATER_S
    rig.side.on_heartbeat(T1, waits())
    assert list(rig.side.beat()) == [T1], "it is known by now who waits for it"
    assert is_there_after(rig, LATER_S)


def test_a_heartbeat_that_its_grant_has_overtaken_shows_that_the_target_is_alive(rig: Rig) -> None:
    rig.serve()
    rig.clock.now += LATER_S
    rig.side.on_heartbeat(T1, waits(0))
    assert is_there_after(rig, LATER_S)


def test_what_is_being_stopped_gets_no_heartbeats(rig: Rig) -> None:
    rig.serve(writes=True)
    assert list(rig.side.beat()) == [T1]
    rig.side.cancel(KEY, "enough")
    assert rig.state() is SourceState.STOPPING
    assert rig.side.beat() == {}


def test_a_prefill_of_which_nothing_was_reported_is_announced_when_it_is_complete(rig: Rig) -> None:
    rig.expect()
    rig.side.on_grant(T1, grant())
    rig.offer()
    announced, prefilled, _ = rig.post.take()
    assert isinstance(announced, Announced)
    assert announced.spans == (WHOLE,)
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.span_count, prefilled.tokens) == (1, TOKENS)


def test_what_was_computed_before_the_grant_and_preempted_is_not_announced(rig: Rig) -> None:
    rig.expect()
    rig.compute(0)
    before = rig.generation
    rig.side.retract(KEY)
    assert rig.take_events() == [Drained(KEY)]
    assert rig.generation > before
    rig.compute(0, 1, 2)
    rig.offer()
    assert rig.state() is SourceState.HELD, "the spans of the first try would not fit those of the second"
    rig.side.on_grant(T1, grant())
    (announced,) = rig.sent(Announced)
    assert announced.spans == SPANS


def test_the_end_of_an_earlier_one_is_not_reported_to_a_target_while_another_one_is_served(rig: Rig) -> None:
    rig.serve()
    rig.side.cancel(KEY, "enough")
    rig.expect()
    rig.side.on_grant(T2, grant())
    rig.post.take()
    rig.side.on_heartbeat(T1, waits())
    assert rig.sent(Over) == []


def test_a_record_that_was_asked_for_in_a_message_stays_there_when_the_first_grant_comes_again() -> None:
    rig = Rig()
    rig.side.aux_slots = type(rig.side.aux_slots)(AuxArea(0, 2, 4096))
    by_data = msgspec.structs.replace(grant(), aux_channel=AuxChannel.DATA)
    rig.expect()
    rig.side.on_grant(T1, by_data)
    rig.offer()
    (first,) = rig.sent(AuxSent)
    assert first.pointer is not None
    rig.side.on_grant(T1, grant())
    rig.side.on_grant(T1, by_data)
    assert [each.aux for each in rig.sent(AuxSent)] == [AUX, AUX]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_question_without_a_grant_about_what_has_none_changes_nothing(rig: Rig, is_claimed: bool) -> None:
    rig.expect()
    if is_claimed:
        rig.side.on_heartbeat(T1, waits(0))
    rig.post.take()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 0, rig.generation))
    assert [type(message) for message in rig.post.take()] == ([] if is_claimed else [Over])
    assert rig.state() is SourceState.QUEUED


def test_a_source_that_writes_answers_a_question_that_it_need_not_be_asked(rig: Rig) -> None:
    rig.serve(writes=True)
    rig.post.take()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))
    assert rig.post.take() == [], "not before the last byte"
    rig.ranks.finish_all()
    rig.post.take()
    rig.side.on_confirm_ask(T1, ConfirmAsk(KEY, 1, rig.generation))
    assert [type(message) for message in rig.post.take()] == [Confirmed]


def test_a_request_that_was_let_go_with_others_is_taken_when_it_comes_again(rig: Rig) -> None:
    rig.expect()
    rig.side.on_stop(T1, Stop(key=KEY, grant=0, outcome=Outcome.FAILED, reason="too long", prompt=""))
    assert [type(event) for event in rig.take_events()] == [SourceEnded]
    rig.expect()
    assert rig.state() is SourceState.QUEUED


def test_a_target_that_waits_again_after_it_declined_all_is_not_sent_the_end_of_an_earlier_request(rig: Rig) -> None:
    rig.expect()
    rig.side.cancel(KEY, "enough")
    rig.side.on_stop(T1, Stop(key=KEY, grant=0, outcome=Outcome.FAILED, reason="too long", prompt=""))
    rig.post.take()
    rig.side.on_heartbeat(T1, waits(0))
    assert rig.post.take() == [], "it would end the request that waits now"
    rig.expect()
    assert rig.state() is SourceState.QUEUED


def test_an_address_is_hung_up_on_when_the_last_request_for_it_is_over_and_nothing_else_is_live() -> None:
    hung_up: list[ControlAddress] = []

    class Dials:
        def dial(self, address: ControlAddress, message: object) -> None:
            del address, message

        def hang_up(self, address: ControlAddress) -> None:
            hung_up.append(address)

    rig, dials, address = Rig(), Dials(), ControlAddress.of("127.0.0.1", 1)
    coordinator = Coordinator(card_of("t"), "tcp", LIMITS, rig.clock, dials, rig.ranks, rig.events.append)  # type: ignore[arg-type]
    coordinator.expect_source(SourceRequest(KEY, "p", address, None, Mode.PUSH))
    coordinator.cancel(KEY)
    assert not coordinator.target.live
    coordinator.target.decline_notices.forget(KEY)
    deadline = coordinator.next_deadline()
    assert deadline == rig.clock.now + LIMITS.retry
    rig.clock.now += LIMITS.retry
    coordinator.tick()
    assert hung_up == [address]
    assert coordinator.next_deadline() is None
