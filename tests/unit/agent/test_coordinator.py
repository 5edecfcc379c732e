"""Two coordinators over a scripted network: handshake, refusal, restart, death, fences, and a whole hand-off both ways."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Letter, Net, Node, card_of, key_of

from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.ports import NoStamps
from kvbaton.agent.rank_orders import PeerFenced, RegionFenced
from kvbaton.config import Limits
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Mode, Outcome
from kvbaton.core.messages import Announced, Grant, HandoffMessage, Heartbeat, Hello, Refused, Stop, decode, encode
from kvbaton.errors import TransportError

KEY = key_of("k")
TOKENS = 3


class Pair:
    """A source and a target that have not met."""

    def __init__(self, executor: Executor = Executor.TARGET_READS, ranks: int = 2) -> None:
        self.net = Net()
        self.ranks = ranks
        self.source = self.net.add(card_of("s1", ranks), 1, executor)
        self.target = self.net.add(
            card_of("t1", ranks, process=msgspec.structs.replace(card_of("t1").process, pid=200)), 2, executor
        )

    def prefill(self, key: HandoffKey = KEY, node: Node | None = None) -> None:
        coordinator = (node or self.source).coordinator
        coordinator.expect_target(key, "p")
        coordinator.offer(Offer(key, BLOCKS, TOKENS, AUX))

    def fetch(self, key: HandoffKey = KEY, incarnation: str | None = None, mode: Mode = Mode.PUSH) -> None:
        named = None if incarnation is None else Incarnation(incarnation)
        wanted = SourceRequest(key, "p", self.source.address, named, mode)
        self.target.coordinator.expect_source(wanted)
        self.target.coordinator.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))

    def run(self) -> None:
        """Let everything happen that can."""
        for _ in range(10):
            self.net.deliver_all()
            for node in (self.source, self.target):
                node.ranks.finish_all()
                node.ranks.quiet_all()
                node.settle()

    def restart_source(self) -> None:
        self.source = self.net.add(card_of("s2", self.ranks), 1, self.source.ranks.executor)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_every_message_about_a_handoff_is_handled(pair: Pair) -> None:
    assert set(pair.source.coordinator.handlers) == set(get_args(HandoffMessage))


def ended(events: list[EngineEvent]) -> TargetEnded:
    """The only event, which is an end without delivery."""
    (event,) = events
    assert isinstance(event, TargetEnded)
    return event


@pytest.mark.parametrize("executor", Executor)
@pytest.mark.parametrize("mode", Mode)
def test_a_hand_off_lands(executor: Executor, mode: Mode) -> None:
    pair = Pair(executor)
    pair.prefill()
    pair.fetch(mode=mode)
    pair.run()
    (landed,) = pair.target.events
    assert isinstance(landed, Landed)
    assert landed.aux == AUX
    assert pair.source.events[-1] == SourceEnded(KEY, Outcome.DELIVERED)
    assert pair.source.ranks.copies == pair.target.ranks.copies == {}
    assert pair.target.coordinator.next_deadline() is None


def test_both_sides_know_each_other_after_one_handshake(pair: Pair) -> None:
    pair.fetch()
    pair.net.deliver_all()
    assert pair.source.ranks.connected == [Incarnation("t1")]
    assert pair.target.ranks.connected == [Incarnation("s1")]
    pair.fetch(key_of("second"))
    assert not [message for message in pair.target.sent[1:] if isinstance(message, Hello)]


def test_a_report_about_a_copy_is_late_on_no_side_when_it_belongs_to_one() -> None:
    for executor in Executor:
        pair = Pair(executor)
        pair.prefill()
        pair.fetch()
        pair.run()
        for node in (pair.source, pair.target):
            assert node.coordinator.source.late_total["copy"] == 0
            assert node.coordinator.target.late_total["copy"] == 0


@pytest.mark.parametrize(
    ("change", "here", "there"),
    [
        ({"fingerprint": "beef"}, "tiny (f00d)", "tiny (beef)"),
        ({"protocol": 9}, str(PROTOCOL), "9"),
        ({"shape": "pp2"}, "'whole'", "stages 0 and 1 are the same"),
        ({"defer_timeout": 5.0}, "transfer_timeout 30.0", "defer_timeout 5.0"),
        ({"ranks": card_of("x").ranks}, "'whole'", "1 ranks where shape tp2 has 2"),
    ],
)
def test_a_card_that_does_not_fit_is_refused_with_both_values_on_both_sides(
    change: dict[str, Any], here: str, there: str
) -> None:
    pair = Pair()
    pair.source = pair.net.add(msgspec.structs.replace(card_of("s1", 2), **change), 1)
    pair.fetch()
    pair.net.deliver_all()
    event = ended(pair.target.events)
    assert event.outcome is Outcome.FAILED
    assert here in event.reason
    assert there in event.reason
    refusals = [message for message in pair.source.sent if isinstance(message, Refused)]
    assert refusals
    assert here in refusals[0].reason
    assert there in refusals[0].reason
    assert pair.source.ranks.connected == pair.target.ranks.connected == []


def test_timeouts_are_checked_in_the_direction_that_the_cache_takes() -> None:
    """A source has to hold longer than its target waits; what it would do as a target does not matter."""
    pair = Pair()
    pair.source = pair.net.add(card_of("s1", 2, transfer_timeout=59.0), 1)
    pair.prefill()
    pair.fetch()
    pair.run()
    assert isinstance(pair.target.events[0], Landed)


def test_the_other_way_is_checked_when_it_is_gone_for_the_first_time() -> None:
    pair = Pair()
    pair.target = pair.net.add(card_of("t1", 2, defer_timeout=1.0), 2)
    pair.prefill()
    pair.fetch()
    pair.run()
    wanted = SourceRequest(key_of("back"), "p", pair.target.address)
    pair.source.coordinator.expect_source(wanted)
    pair.run()
    event = pair.source.events[-1]
    assert isinstance(event, TargetEnded)
    assert "defer_timeout 1.0" in event.reason


def test_a_refusal_by_the_source_fails_every_request_that_waits_for_it(pair: Pair) -> None:
    pair.source.ranks.refusal = TransportError("no common transport: memory here, tcp there")
    for name in ("a", "b"):
        pair.fetch(key_of(name))
    pair.net.deliver(next(letter for letter in pair.net.letters if isinstance(letter.message, Hello)))
    refusal = next(letter for letter in pair.net.letters if isinstance(letter.message, Refused))
    pair.net.deliver(refusal)
    reasons = [event.reason for event in pair.target.events if isinstance(event, TargetEnded)]
    assert len(reasons) == 2
    assert all("refused by the source: no common transport" in reason for reason in reasons)


def test_refused_cards_are_logged_once_a_second_and_as_plain_text(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(50):
        card = msgspec.structs.replace(card_of(f"evil{number}\n\x1b[31mERROR", 2), model="a\nfalse line", fingerprint="beef")
        frame = encode(card.incarnation, "", Hello(card, wants_answer=True))
        pair.target.coordinator.on_frame(decode(frame), None)
        pair.target.coordinator.on_frame(decode(encode(Incarnation("s1"), "", Refused("no\nfalse line"))), None)
    assert len(caplog.records) == 1
    assert not any(char in caplog.records[0].getMessage() for char in "\n\x1b")
    assert pair.target.coordinator.dropped_total["incompatible"] == 50


def test_a_refusal_by_a_peer_is_logged_with_its_reason(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.target.coordinator.on_frame(decode(encode(Incarnation("s1"), "", Refused("another model"))), None)
    (record,) = caplog.records
    assert "another model" in record.getMessage()


def test_a_card_in_the_name_of_another_peer_is_dropped(pair: Pair) -> None:
    frame = encode(Incarnation("impostor"), "", Hello(card_of("s1", 2), wants_answer=True))
    pair.target.coordinator.on_frame(decode(frame), None)
    assert pair.target.ranks.connected == []
    assert pair.target.coordinator.dropped_total["a card of another peer"] == 1


def test_an_unknown_peer_is_asked_for_its_card_before_its_messages_count(pair: Pair) -> None:
    pair.target.routes[Incarnation("s1")] = pair.source.address
    frame = encode(Incarnation("s1"), "t1", Stop(KEY, 1, Outcome.FAILED))
    pair.target.coordinator.on_frame(decode(frame), None)
    assert pair.target.coordinator.dropped_total["from an unknown peer"] == 1
    assert [type(message) for message in pair.target.sent] == [Hello]


def test_a_forgotten_peer_is_asked_for_its_card_once_for_all_its_frames(pair: Pair) -> None:
    """Each question makes it send everything again that it waits for; its card ends that."""
    pair.target.routes[Incarnation("s1")] = pair.source.address
    frame = decode(encode(Incarnation("s1"), "t1", Stop(KEY, 1, Outcome.FAILED)))
    for _ in range(20):
        pair.target.coordinator.on_frame(frame, None)
    assert pair.target.coordinator.dropped_total["from an unknown peer"] == 20
    assert [type(message) for message in pair.target.sent] == [Hello]
    refused = encode(Incarnation("s1"), "", Hello(card_of("s1", fingerprint="another model"), wants_answer=False))
    pair.target.coordinator.on_frame(decode(refused), None)
    pair.target.coordinator.on_frame(frame, None)
    assert [type(message) for message in pair.target.sent] == [Hello]
    card = encode(Incarnation("s1"), "", Hello(card_of("s1"), wants_answer=False))
    pair.target.coordinator.on_frame(decode(card), None)
    pair.target.coordinator.on_frame(frame, None)
    assert pair.target.coordinator.dropped_total["from an unknown peer"] == 21
    vars(pair.target.coordinator)["_peers"].forget(Incarnation("s1"))
    pair.target.coordinator.on_frame(frame, None)
    assert [type(message) for message in pair.target.sent].count(Hello) == 2


def test_a_known_card_does_not_change(pair: Pair) -> None:
    pair.fetch()
    pair.net.deliver_all()
    changed = card_of("s1", 2, process=msgspec.structs.replace(card_of("x").process, pid=999))
    pair.target.coordinator.on_frame(decode(encode(Incarnation("s1"), "t1", Hello(changed, wants_answer=False))), None)
    pair.net.dead.add(999)
    pair.net.pass_time(2.0)
    assert pair.target.events == []


def test_a_restart_on_the_same_address_ends_what_the_old_one_had_and_the_next_request_works(pair: Pair) -> None:
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    assert pair.target.coordinator.target.live
    pair.restart_source()
    pair.net.pass_time(LIMITS.retry * 2)
    pair.run()
    event = ended(pair.target.events)
    assert "s1 was replaced by s2" in event.reason
    assert pair.target.ranks.disconnected == [Incarnation("s1")]
    assert pair.source.coordinator.dropped_total["for an earlier incarnation"] > 0
    pair.prefill(key_of("next"))
    pair.fetch(key_of("next"))
    pair.run()
    assert isinstance(pair.target.events[-1], Landed)


class Forgets(NoStamps):
    """Notes which peers are followed no longer: each of them costs a mapping of its memory."""

    def __init__(self) -> None:
        self.forgotten: list[Incarnation] = []

    def forget(self, peer: Incarnation) -> None:
        self.forgotten.append(peer)


@pytest.mark.parametrize("limit", [1, 64], ids=["it made room", "it was replaced"])
def test_the_stamps_of_a_peer_are_forgotten_with_it(pair: Pair, limit: int) -> None:
    stamps = pair.target.coordinator._stamps = Forgets()
    pair.target.coordinator._peers._limit = limit
    pair.prefill()
    pair.fetch()
    pair.run()
    assert not stamps.forgotten
    if limit > 1:
        pair.restart_source()
    else:
        pair.source = pair.net.add(card_of("s2", pair.ranks), 3)
    pair.prefill(key_of("next"))
    pair.fetch(key_of("next"))
    pair.net.pass_time(LIMITS.retry * 2)
    pair.run()
    assert stamps.forgotten == [Incarnation("s1")]


def late_card(pair: Pair) -> Letter:
    """The source answers the target's first question and dies; its answer is still under way when its successor is there."""
    pair.net.deliver(pair.net.letters.pop(0))
    (late,) = pair.net.letters
    assert isinstance(late.message, Hello)
    pair.net.letters.clear()
    pair.restart_source()
    return late


def test_the_late_card_of_a_dead_source_does_not_end_what_its_successor_writes() -> None:
    """Otherwise the target would free blocks that a live source writes to."""
    pair = Pair(Executor.SOURCE_WRITES)
    pair.fetch()
    late = late_card(pair)
    pair.prefill()
    pair.net.pass_time(LIMITS.retry)
    pair.net.deliver_all()
    assert pair.source.ranks.moves
    pair.net.deliver(late)
    assert pair.target.events == []
    assert pair.target.coordinator.dropped_total["a card that may be late"] == 1
    pair.run()
    assert [type(event) for event in pair.target.events] == [Landed]


@pytest.mark.parametrize("numbers_answers", [True, False])
def test_a_late_card_that_came_first_gives_way_to_the_source_that_lives(numbers_answers: bool) -> None:
    pair = Pair()
    pair.fetch()
    late = late_card(pair)
    pair.net.deliver(late)
    if not numbers_answers:
        # A source of a release that does not number them is believed at once.
        frame = encode(Incarnation("s2"), "t1", Hello(pair.source.card, wants_answer=False))
        pair.net.letters = [Letter(pair.source.address, pair.target.address, frame)]
    pair.run()
    assert "s1 was replaced by s2" in ended(pair.target.events).reason
    asked = [message for message in pair.target.sent if isinstance(message, Hello) and message.wants_answer]
    assert len(asked) == (2 if numbers_answers else 1)
    pair.prefill(key_of("next"))
    pair.fetch(key_of("next"))
    pair.run()
    assert isinstance(pair.target.events[-1], Landed)


def test_the_late_card_of_a_dead_source_does_not_fail_a_request_that_names_its_successor() -> None:
    pair = Pair()
    pair.fetch()
    late = late_card(pair)
    pair.prefill(key_of("second"))
    pair.fetch(key_of("second"), incarnation="s2", mode=Mode.PULL)
    pair.net.letters.clear()
    pair.net.deliver(late)
    pair.net.pass_time(LIMITS.retry)
    pair.run()
    landed = [event for event in pair.target.events if isinstance(event, Landed)]
    assert [event.key for event in landed] == [key_of("second")]


def test_a_source_that_died_and_came_back_while_nothing_was_live_is_met_anew(pair: Pair) -> None:
    """In push no request names the incarnation: what is remembered of the address is of a dead process."""
    pair.prefill()
    pair.fetch()
    pair.run()
    pair.net.dead.add(pair.source.card.process.pid)
    new = card_of("s2", pair.ranks)
    pair.source = pair.net.add(msgspec.structs.replace(new, process=msgspec.structs.replace(new.process, pid=300)), 1)
    pair.prefill(key_of("next"))
    pair.fetch(key_of("next"))
    pair.run()
    assert isinstance(pair.target.events[-1], Landed)
    assert pair.target.ranks.disconnected == [Incarnation("s1")]


def test_a_request_that_names_the_successor_of_a_known_source_is_not_failed_by_the_known_card(pair: Pair) -> None:
    pair.prefill()
    pair.fetch()
    pair.run()
    pair.restart_source()
    pair.prefill(key_of("next"))
    pair.fetch(key_of("next"), incarnation="s2")
    pair.run()
    assert [(type(event), event.key) for event in pair.target.events] == [(Landed, KEY), (Landed, key_of("next"))]


def test_a_request_for_an_incarnation_that_is_gone_fails_at_once_with_both(pair: Pair) -> None:
    pair.restart_source()
    pair.fetch(incarnation="s1")
    pair.net.deliver_all()
    event = ended(pair.target.events)
    assert "s1" in event.reason
    assert "s2" in event.reason


@pytest.mark.parametrize("dead", ["source", "target"])
def test_a_dead_process_is_noticed_within_seconds(pair: Pair, dead: str) -> None:
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    node, survivor = (pair.source, pair.target) if dead == "source" else (pair.target, pair.source)
    pair.net.dead.add(node.card.process.pid)
    del pair.net.nodes[node.address]
    pair.net.letters.clear()
    survivor.events.clear()
    pair.net.pass_time(1.5)
    survivor.ranks.quiet_all()
    survivor.settle()
    (event,) = survivor.events
    assert isinstance(event, SourceEnded | TargetEnded)
    assert event.outcome is Outcome.FAILED
    assert f"process {node.card.process.pid} of the peer is dead" in event.reason


def test_a_silent_peer_is_not_called_dead(pair: Pair) -> None:
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    pair.net.pass_time(LIMITS.transfer_timeout - 1, lose=True)
    assert pair.target.events == []


def test_heartbeats_keep_a_queue_alive_for_as_long_as_it_takes(pair: Pair) -> None:
    pair.prefill()
    wanted = SourceRequest(KEY, "p", pair.source.address)
    pair.target.coordinator.expect_source(wanted)
    pair.net.pass_time(5 * LIMITS.defer_timeout)
    assert pair.source.events == []
    pair.target.coordinator.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
    pair.run()
    assert isinstance(pair.target.events[0], Landed)


def test_heartbeats_are_frequent_enough_for_a_target_with_a_short_timeout() -> None:
    """The target gives up after 2 s without a message, while the source by itself would send one every 5 s."""
    pair = Pair()
    limits = Limits(transfer_timeout=2.0, defer_timeout=4.0, retry=1.0)
    pair.target = pair.net.add(card_of("t1", 2, transfer_timeout=2.0), 2, limits=limits)
    pair.source.coordinator.expect_target(KEY, "p")
    pair.fetch()
    pair.net.pass_time(20.0, step=0.1)
    assert pair.target.events == []


def test_a_long_heartbeat_is_sent_in_frames_that_are_read(pair: Pair) -> None:
    pair.fetch()
    pair.net.deliver_all()
    long = "é" * 250
    for number in range(5000):
        wanted = SourceRequest(key_of(f"{long}{number}"), "p", pair.source.address)
        pair.target.coordinator.expect_source(wanted)
    pair.net.clock.now += LIMITS.beat_s
    pair.target.sent.clear()
    pair.target.coordinator.tick()
    beats = [message for message in pair.target.sent if isinstance(message, Heartbeat)]
    assert sum(len(beat.live) for beat in beats) == 5001
    for beat in beats:
        decode(encode(Incarnation("t1"), "s1", beat))


@pytest.mark.parametrize("hangs", [False, True], ids=["works", "hangs"])
def test_heartbeats_keep_a_target_only_while_the_engine_of_its_source_takes_steps(pair: Pair, hangs: bool) -> None:
    pair.source.coordinator.expect_target(KEY, "p")
    pair.fetch()
    pair.net.deliver_all()
    pair.source.engine_hangs = hangs
    pair.net.pass_time(LIMITS.transfer_timeout - 1)
    assert pair.target.events == [], "not a second too early"
    pair.net.pass_time(1 + LIMITS.beat_s)
    ends = [(event.outcome, event.reason) for event in pair.target.events if isinstance(event, TargetEnded)]
    assert ends == ([(Outcome.EXPIRED, "no progress for 30 s while granted")] if hangs else [])
    assert bool(pair.source.events[1:]) is hangs, "and its source with it"


@pytest.mark.parametrize("hangs", [False, True], ids=["works", "hangs"])
def test_heartbeats_keep_a_source_only_while_the_engine_of_its_target_takes_steps(pair: Pair, hangs: bool) -> None:
    pair.prefill()
    pair.target.coordinator.expect_source(SourceRequest(KEY, "p", pair.source.address, None, Mode.PULL))
    pair.net.deliver_all()
    pair.target.engine_hangs = hangs
    pair.net.pass_time(LIMITS.defer_timeout - 1)
    assert pair.source.events == [], "not a second too early"
    pair.net.pass_time(1 + LIMITS.beat_s)
    ends = [event.outcome for event in pair.source.events if isinstance(event, SourceEnded)]
    assert ends == ([Outcome.EXPIRED] if hangs else [])


@pytest.mark.parametrize("hangs", [False, True], ids=["works", "hangs"])
def test_grants_that_are_repeated_keep_a_source_only_while_the_engine_of_its_target_takes_steps(
    pair: Pair, hangs: bool
) -> None:
    """What is announced is lost, so the grant is repeated; agents do that although their engine or a rank is stopped."""
    pair.prefill()
    pair.fetch()
    pair.net.loses = lambda message: isinstance(message, Announced)
    pair.net.deliver_all()
    pair.target.engine_hangs = hangs
    pair.target.sent.clear()
    pair.net.pass_time(LIMITS.defer_timeout - 1)
    assert any(isinstance(message, Grant) for message in pair.target.sent)
    assert pair.source.events == [], "not a second too early"
    pair.net.pass_time(1 + LIMITS.beat_s)
    ends = [event.outcome for event in pair.source.events if isinstance(event, SourceEnded)]
    assert ends == ([Outcome.EXPIRED] if hangs else [])


def test_an_engine_that_goes_on_is_counted_on_again(pair: Pair) -> None:
    pair.source.coordinator.expect_target(KEY, "p")
    pair.fetch()
    pair.net.deliver_all()
    for _ in range(5):
        pair.source.engine_hangs = True
        pair.net.pass_time(LIMITS.transfer_timeout - LIMITS.beat_s - 1)
        pair.source.engine_hangs = False
        pair.net.pass_time(LIMITS.beat_s + 1)
    assert pair.target.events == []


def test_a_fence_counts_when_every_rank_has_put_it_up() -> None:
    pair = Pair(Executor.SOURCE_WRITES)
    pair.source.coordinator.expect_target(KEY, "p")
    pair.fetch()
    pair.net.deliver_all()
    pair.target.coordinator.cancel(KEY)
    pair.net.pass_time(LIMITS.stop_timeout + 1, lose=True)
    assert pair.target.ranks.revoked == [(Incarnation("s1"), 2)]
    coordinator = pair.target.coordinator
    for _ in range(3):
        coordinator.on_rank(PeerFenced(Incarnation("s1"), 2, 0))
    assert pair.target.events == []
    coordinator.on_rank(PeerFenced(Incarnation("s1"), 2, 1))
    assert ended(pair.target.events).outcome is Outcome.CANCELLED


def test_fences_of_two_epochs_that_interleave_are_both_put_up() -> None:
    """One rank is ahead of the other: the second fence must not wait for a report that was counted for the first."""
    pair = Pair(Executor.SOURCE_WRITES)
    pair.fetch()
    pair.net.deliver_all()
    coordinator, peer = pair.target.coordinator, Incarnation("s1")
    fenced: list[int] = []
    coordinator.target.on_peer_fenced = lambda *given: fenced.append(given[1])  # type: ignore[method-assign]
    for rank, epoch in ((0, 2), (0, 3), (1, 2), (1, 3), (1, 3)):
        coordinator.on_rank(PeerFenced(peer, epoch, rank))
    assert fenced == [2, 3]


def test_a_fence_that_is_half_reported_is_not_the_one_that_is_forgotten() -> None:
    pair = Pair(Executor.SOURCE_WRITES)
    pair.fetch()
    pair.net.deliver_all()
    coordinator, peer = pair.target.coordinator, Incarnation("s1")
    fenced: list[int] = []
    coordinator.target.on_peer_fenced = lambda *given: fenced.append(given[1])  # type: ignore[method-assign]
    for rank in range(2):
        coordinator.on_rank(PeerFenced(peer, 2, rank))
    for number in range(1023):
        coordinator.on_rank(PeerFenced(Incarnation(f"other {number}"), 2, 0))
    coordinator.on_rank(PeerFenced(peer, 3, 0))
    coordinator.on_rank(PeerFenced(Incarnation("one more"), 2, 0))
    coordinator.on_rank(PeerFenced(peer, 3, 1))
    assert fenced == [2, 3]


def test_a_fence_ends_what_was_granted_before_it_and_nothing_that_was_granted_after() -> None:
    pair = Pair(Executor.SOURCE_WRITES)
    pair.fetch()
    pair.net.deliver_all()
    pair.target.coordinator.cancel(KEY)
    pair.net.pass_time(LIMITS.stop_timeout, lose=True)
    ((peer, epoch),) = pair.target.ranks.revoked
    pair.fetch(key_of("next"))
    for _ in range(2):
        pair.target.ranks.fence(peer, epoch, 2)
    pair.target.settle()
    assert ended(pair.target.events).key == KEY
    pair.prefill(key_of("next"))
    pair.net.pass_time(2 * LIMITS.beat_s)
    pair.run()
    assert isinstance(pair.target.events[-1], Landed)


def test_memory_is_new_when_every_rank_has_registered_its_part() -> None:
    pair = Pair(Executor.SOURCE_WRITES)
    pair.fetch()
    pair.net.deliver_all()
    coordinator = pair.target.coordinator
    coordinator.on_rank(RegionFenced(3, 0))
    coordinator.on_rank(RegionFenced(1, 1))
    assert pair.target.events == []
    coordinator.on_rank(RegionFenced(2, 1))
    assert ended(pair.target.events).outcome is Outcome.FAILED


def test_a_stop_of_the_instance_notifies_the_peers_at_once(pair: Pair) -> None:
    pair.prefill()
    pair.fetch()
    pair.net.deliver_all()
    pair.source.coordinator.stop("the instance is stopping")
    pair.run()
    assert "the instance is stopping" in ended(pair.target.events).reason


def test_prompts_and_samples_of_one_request_are_hand_offs_of_their_own(pair: Pair) -> None:
    keys = [HandoffKey(KEY.transfer_id, prompt, sample) for prompt in range(2) for sample in range(2)]
    for key in keys:
        pair.prefill(key)
        pair.fetch(key)
    pair.run()
    assert {event.key for event in pair.target.events if isinstance(event, Landed)} == set(keys)
    grants = [message.grant for message in pair.target.sent if isinstance(message, Grant)]
    assert len(set(grants)) == 4


def test_announcements_are_addressed_to_one_incarnation(pair: Pair) -> None:
    """What was meant for an earlier process at this address is not taken by the one that is there now."""
    pair.prefill()
    pair.fetch()
    pair.net.deliver(pair.net.letters.pop(0))
    pair.net.deliver_all()
    frames = [encode(Incarnation("s1"), "t0", message) for message in pair.source.sent if isinstance(message, Announced)]
    before = len(pair.target.ranks.moves)
    for frame in frames:
        pair.target.coordinator.on_frame(decode(frame), pair.source.address)
    assert frames
    assert len(pair.target.ranks.moves) == before
    assert pair.target.coordinator.dropped_total["for an earlier incarnation"] == len(frames)
