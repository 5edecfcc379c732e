"""Decline notices: a source learns at once that no target will fetch its cache, whether the two know each other or not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Clock, Letter, Net, Node, Post, card_of, key_of
from driver_rig import AUX as DRIVER_AUX
from driver_rig import pair
from driver_rig import wanted as driver_wanted

from kvbaton.agent.card_requests import CardRequests
from kvbaton.agent.decline_notices import DeclineNotices
from kvbaton.agent.engine_port import Allocation, EngineEvent, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Incarnation, Mode, Outcome
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.messages import Grant, Heartbeat, Hello, Message, Stop, encode

KEY = key_of("k")
TOKENS = 3
ADDRESS = ControlAddress.of("127.0.0.1", 1)
S1, S2 = Incarnation("s1"), Incarnation("s2")


def wanted(name: str = "k", incarnation: Incarnation | None = None, prompt: str = "p") -> SourceRequest:
    return SourceRequest(key_of(name), prompt, ADDRESS, incarnation, Mode.PUSH)


@dataclass
class Rig:
    """Decline notices and what they send; handshakes are counted."""

    limit: int = 4096
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)

    def __post_init__(self) -> None:
        self.card_requests = CardRequests(card_of("t1"), LIMITS, self.clock, self.post)
        self.decline_notices = DeclineNotices(LIMITS, self.clock, self.post, self.card_requests, self.limit)

    @property
    def dialled(self) -> list[Incarnation | ControlAddress]:
        return [address for address, message in self.post.sent if isinstance(message, Hello)]

    def send(self, name: str = "k", incarnation: Incarnation | None = None, source: Incarnation | None = None) -> None:
        self.decline_notices.send(wanted(name, incarnation), Outcome.CANCELLED, "why", source)

    def pass_time(self, seconds: float, step: float = 0.25) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += step
            self.decline_notices.tick()

    def stops(self) -> list[Message]:
        return [message for message in self.post.take() if isinstance(message, Stop)]


STOP = Stop(KEY, 0, Outcome.CANCELLED, "why", "p")


def test_a_known_source_is_notified_at_once_and_again_until_it_answers() -> None:
    rig = Rig()
    rig.send(source=S1)
    assert rig.stops() == [STOP]
    assert rig.decline_notices.next_deadline() == rig.clock.now + LIMITS.retry
    rig.pass_time(3 * LIMITS.retry)
    assert rig.stops() == [STOP, STOP]
    assert not rig.decline_notices.on_stopped(S2, KEY), "only the peer that got it can answer"
    assert rig.decline_notices.on_stopped(S1, KEY)
    assert not rig.decline_notices
    assert rig.decline_notices.next_deadline() is None


def test_an_unknown_source_is_dialled_and_notified_when_its_card_is_there() -> None:
    rig = Rig()
    rig.send()
    assert rig.dialled == [ADDRESS]
    rig.pass_time(LIMITS.retry)
    assert rig.dialled == [ADDRESS, ADDRESS]
    assert rig.stops() == []
    rig.decline_notices.on_card(card_of("s1"), ControlAddress.of("127.0.0.1", 2))
    assert rig.stops() == []
    rig.decline_notices.on_card(card_of("s1"), ADDRESS)
    assert rig.stops() == [STOP]
    rig.decline_notices.resend_to(S2)
    assert rig.stops() == [], "it is no notice to that source"
    rig.decline_notices.resend_to(S1)
    assert rig.stops() == [STOP]


def test_a_late_card_of_another_incarnation_ends_no_notice_and_the_question_is_repeated() -> None:
    rig = Rig()
    rig.send(incarnation=S2)
    rig.decline_notices.on_card(card_of("s1"), ADDRESS, answers=0)
    assert rig.decline_notices.unanswered() == {ADDRESS}
    assert rig.card_requests.asked == 1, "the first question is still under way, and its answer will do"
    rig.pass_time(LIMITS.retry)
    rig.decline_notices.on_card(card_of("s2"), ADDRESS, answers=2)
    assert rig.stops() == [STOP]


def test_a_notice_ends_when_another_incarnation_answers_what_was_asked_for_it() -> None:
    rig = Rig()
    rig.send(incarnation=S2)
    rig.decline_notices.on_card(card_of("s1"), ADDRESS, answers=1)
    assert not rig.decline_notices


def test_no_peer_is_notified_in_place_of_another_incarnation() -> None:
    rig = Rig()
    rig.send(incarnation=S2)
    rig.decline_notices.on_card(card_of("s1"), ADDRESS)
    assert not rig.decline_notices
    assert rig.stops() == []


def test_it_is_given_up_after_transfer_timeout() -> None:
    rig = Rig()
    rig.send(source=S1)
    rig.pass_time(LIMITS.transfer_timeout - 1)
    assert rig.decline_notices
    rig.pass_time(1)
    assert not rig.decline_notices
    assert rig.decline_notices.given_up_total == 1


def test_a_peer_that_is_refused_or_gone_need_not_be_notified() -> None:
    rig = Rig()
    rig.send("known", source=S1)
    rig.send("unknown")
    rig.decline_notices.on_refused_peer(ADDRESS)
    assert len(rig.decline_notices) == 1
    rig.decline_notices.on_peer_gone(S2)
    assert len(rig.decline_notices) == 1
    rig.decline_notices.on_peer_gone(S1)
    assert not rig.decline_notices


def test_a_peer_that_is_refused_and_has_shown_who_it_is_is_notified_once() -> None:
    rig = Rig()
    rig.send("known", source=S1)
    rig.send()
    rig.stops()
    rig.decline_notices.on_refused_peer(ADDRESS, S2)
    assert rig.post.sent == [(S2, STOP)]
    rig.stops()
    assert len(rig.decline_notices) == 1
    rig.pass_time(LIMITS.retry)
    assert STOP not in rig.stops(), "a refused peer owes no answer"


def test_the_table_is_bounded_and_the_oldest_goes_first() -> None:
    rig = Rig(limit=3)
    for number in range(5):
        rig.send(f"k{number}", source=S1)
    assert (len(rig.decline_notices), rig.decline_notices.given_up_total) == (3, 2)
    assert [rig.decline_notices.on_stopped(S1, key_of(f"k{number}")) for number in range(5)] == [False, False, True, True, True]


class Two:
    """A source and a target that have not met."""

    def __init__(self) -> None:
        self.net = Net()
        self.source = self.net.add(card_of("s"), 1)
        self.target = self.net.add(card_of("t"), 2)

    def decline(self, prompt: str = "p") -> None:
        self.target.coordinator.decline(wanted(prompt=prompt), "the queue is full")
        self.net.deliver_all()

    def expect(self, prompt: str = "p") -> None:
        self.source.coordinator.expect_target(KEY, prompt)

    def offer(self) -> None:
        self.source.coordinator.offer(Offer(KEY, BLOCKS, TOKENS, AUX))

    def state(self) -> SourceState | None:
        record = self.source.coordinator.source.live.get(KEY)
        return None if record is None else record.state

    @staticmethod
    def ends(node: Node) -> list[tuple[Outcome, str]]:
        return [(event.outcome, event.reason) for event in node.events if isinstance(event, SourceEnded | TargetEnded)]


REFUSED = (Outcome.FAILED, "the target failed: the queue is full")


@pytest.mark.parametrize("is_held", [False, True])
def test_what_is_queued_or_held_ends_at_once_when_its_request_is_declined(is_held: bool) -> None:
    two = Two()
    two.expect()
    if is_held:
        two.offer()
    assert two.state() is (SourceState.HELD if is_held else SourceState.QUEUED)
    two.decline()
    assert two.ends(two.source) == [REFUSED]
    assert two.target.events == [], "no event follows at the target"
    assert not two.target.coordinator.target.decline_notices, "it was answered"


def test_a_request_that_is_cancelled_before_the_source_is_known_lets_the_source_go() -> None:
    two = Two()
    two.expect()
    two.offer()
    two.target.coordinator.expect_source(wanted())
    two.net.letters.clear()
    two.target.coordinator.cancel(KEY)
    assert two.ends(two.target) == [(Outcome.CANCELLED, "the request was cancelled")]
    two.net.pass_time(2 * LIMITS.retry)
    assert two.ends(two.source) == [(Outcome.CANCELLED, "the target cancelled: the request was cancelled")]
    assert not two.target.coordinator.target.decline_notices
    assert two.target.coordinator.next_deadline() is None


def test_a_prefill_that_comes_after_the_refusal_ends_at_once_and_only_once() -> None:
    two = Two()
    two.decline()
    two.expect("another prompt")
    assert two.ends(two.source) == []
    two.source.coordinator.cancel(KEY)
    two.source.events.clear()
    two.expect()
    assert two.ends(two.source) == [(Outcome.CANCELLED, REFUSED[1])]
    two.expect()
    assert two.state() is SourceState.QUEUED, "the notice counts once"


def test_a_refusal_is_forgotten_after_defer_timeout() -> None:
    two = Two()
    two.decline()
    two.net.clock.now += LIMITS.defer_timeout + 1
    two.expect()
    assert two.state() is SourceState.QUEUED


@pytest.mark.parametrize("comes_back", ["grant", "heartbeat"])
def test_a_target_that_comes_after_all_takes_its_refusal_back(comes_back: str) -> None:
    two = Two()
    two.decline()
    two.target.coordinator.expect_source(wanted())
    if comes_back == "grant":
        two.target.coordinator.allocated(Allocation(wanted(), BLOCKS, TOKENS, 0))
    two.net.pass_time(LIMITS.beat_s + 1)
    kinds = {type(message) for message in two.target.sent}
    assert (Grant if comes_back == "grant" else Heartbeat) in kinds
    two.expect()
    assert two.state() in (SourceState.QUEUED, SourceState.STREAMING)


def test_a_live_handoff_is_not_stopped_by_a_refusal_of_another_request_of_the_same_key() -> None:
    two = Two()
    two.expect()
    two.target.coordinator.expect_source(wanted())
    two.target.coordinator.allocated(Allocation(wanted(), BLOCKS, TOKENS, 0))
    two.net.deliver_all()
    assert two.state() is SourceState.STREAMING
    two.decline()
    assert not two.target.coordinator.target.decline_notices
    two.target.coordinator.target.decline_notices.send(wanted(), Outcome.FAILED, "late", Incarnation("s"))
    two.net.deliver_all()
    assert two.state() is SourceState.STREAMING, "a late decline notice does not stop what has a grant"


def test_another_prompt_of_the_same_key_is_left_alone() -> None:
    two = Two()
    two.expect("one prompt")
    two.decline("another prompt")
    assert two.state() is SourceState.QUEUED


def test_a_parked_grant_ends_with_its_target() -> None:
    two = Two()
    two.target.coordinator.expect_source(wanted())
    two.target.coordinator.allocated(Allocation(wanted(), BLOCKS, TOKENS, 0))
    two.net.deliver_all()
    assert two.state() is SourceState.PARKED
    two.source.coordinator.source.on_stop(Incarnation("t"), STOP)
    assert two.state() is None


@pytest.mark.parametrize("grant", [0, 1])
def test_a_target_that_was_refused_can_decline_what_it_was_sent_for_and_nothing_else(grant: int) -> None:
    net = Net()
    source = net.add(card_of("s"), 1)
    target = net.add(card_of("t", fingerprint="another model"), 2)
    source.coordinator.expect_target(KEY, "p")
    target.coordinator.target.card_requests.dial(source.address)
    net.deliver_all()
    assert source.coordinator.dropped_total["incompatible"] == 1
    stop = Stop(KEY, grant, Outcome.FAILED, "why", "p", sequence=grant)
    net.letters.append(Letter(target.address, source.address, encode(Incarnation("t"), "s", stop)))
    net.deliver_all()
    assert (KEY in source.coordinator.source.live) is bool(grant)
    assert source.coordinator.dropped_total["from an unknown peer"] == grant


def test_only_an_admitted_peer_can_stop_anything() -> None:
    two = Two()
    two.expect()
    unknown = Incarnation("unknown")
    two.net.letters.append(Letter(two.target.address, two.source.address, encode(unknown, "s", STOP)))
    two.net.deliver_all()
    assert two.state() is SourceState.QUEUED
    assert two.source.coordinator.dropped_total["from an unknown peer"] == 1


def test_over_real_sockets_a_source_is_released_by_a_target_it_does_not_know() -> None:
    with pair() as (source, target):
        key = HandoffKey(driver_wanted(source.driver.address, "k").key.transfer_id)
        source.driver.expect_target(key, "prompt")
        source.driver.offer(Offer(key, ((1, 5, 2),), 10, DRIVER_AUX))
        target.driver.decline(driver_wanted(source.driver.address, "k"), "the queue is full")
        ended: EngineEvent = source.wait_for(SourceEnded, key)
        assert ended == SourceEnded(key, *REFUSED)


def test_a_notice_to_a_source_that_is_known_needs_no_answer_from_its_address() -> None:
    rig = Rig()
    rig.send(source=S1)
    assert rig.decline_notices.unanswered() == set()


def test_a_notice_that_replaces_another_one_is_not_repeated_when_that_was_due() -> None:
    rig = Rig()
    rig.send(source=S1)
    rig.clock.now += 0.9 * LIMITS.retry
    rig.send(source=S1)
    rig.stops()
    rig.clock.now += 0.2 * LIMITS.retry
    rig.decline_notices.tick()
    assert rig.stops() == []
