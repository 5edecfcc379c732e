"""Thousands of hand-offs at once: a turn of the coordinator looks only at what it concerns, not at everything that lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_rig import BLOCKS, LIMITS, Clock, Post, ScriptedRanks, card_of, key_of

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Allocation, EngineEvent, Granted, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Mode, Outcome
from kvbaton.core.lifecycle import SourceEffect
from kvbaton.core.messages import Envelope, Grant, Heartbeat, Hello, Refused
from kvbaton.core.timeline import Note, Side, Stage

MANY = 2000
PEER = Incarnation("s1")
ADDRESS = ControlAddress.of("127.0.0.1", 7000)


class Watched(dict[HandoffKey, Any]):
    """A table of live hand-offs that counts how often all of it is iterated over."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def __iter__(self) -> Iterator[HandoffKey]:
        self.walks += 1
        return super().__iter__()


class Node:
    """A coordinator with everything it sends and reports."""

    def __init__(self) -> None:
        self.clock, self.post, self.ranks = Clock(), Post(), ScriptedRanks(Executor.TARGET_READS)
        self.events: list[EngineEvent] = []
        self.notes: list[Note] = []
        self.coordinator = Coordinator(
            card_of("t1", 1),
            "scripted",
            LIMITS,
            self.clock,
            self.post,
            self.ranks,
            self.events.append,
            observe=self.notes.append,
        )
        self.sources, self.targets = Watched(), Watched()
        self.coordinator.source.live = self.sources
        self.coordinator.target.live = self.targets

    def receive(self, message: object, via: ControlAddress | None = None) -> None:
        envelope = Envelope(PROTOCOL, PEER, "", message)  # type: ignore[arg-type]
        self.coordinator.on_frame(envelope, via)

    def walks_of(self, work: Callable[[], None]) -> int:
        """How often `work` has walked over a table of live hand-offs."""
        self.sources.walks = self.targets.walks = 0
        work()
        return self.sources.walks + self.targets.walks

    def turn(self) -> None:
        """What a driver does with nothing new to report."""
        self.coordinator.tick()
        assert self.coordinator.next_deadline() is not None


def wanted(index: int) -> SourceRequest:
    return SourceRequest(key_of(f"k{index}"), "p", ADDRESS, None, Mode.PUSH)


def grant(index: int) -> Grant:
    return Grant(key_of(f"k{index}"), index + 1, "p", Mode.PUSH, Executor.TARGET_READS, 1, (), 0, index + 1)


def test_one_handshake_does_for_every_request_that_waits_for_the_same_source() -> None:
    node = Node()
    for index in range(MANY):
        node.coordinator.expect_source(wanted(index))
    assert sum(isinstance(message, Hello) for message in node.post.take()) == 1
    node.clock.now += LIMITS.retry
    node.coordinator.tick()
    assert sum(isinstance(message, Hello) for message in node.post.take()) == 1
    node.receive(Hello(card_of("s1", 1), wants_answer=False), ADDRESS)
    assert all(record.source == PEER for record in dict.values(node.targets))


def test_a_refused_address_is_dialled_anew_for_the_next_request() -> None:
    node = Node()
    node.coordinator.expect_source(wanted(0))
    node.receive(Refused("no"), ADDRESS)
    assert [event.outcome for event in node.events if isinstance(event, TargetEnded)] == [Outcome.FAILED]
    node.post.take()
    node.coordinator.expect_source(wanted(1))
    assert [type(message) for message in node.post.take()] == [Hello]


def test_a_turn_of_a_target_looks_at_nothing_that_is_not_due() -> None:
    node = Node()
    node.coordinator.expect_source(wanted(0))
    node.receive(Hello(card_of("s1", 1), wants_answer=False), ADDRESS)
    for index in range(1, MANY):
        node.coordinator.expect_source(wanted(index))
    assert node.walks_of(node.turn) == 0
    granted = node.walks_of(lambda: node.coordinator.allocated(Allocation(wanted(7), BLOCKS, 3, 0)))
    assert granted == 0


def test_a_turn_of_a_source_looks_at_nothing_that_is_not_due() -> None:
    node = Node()
    node.receive(Hello(card_of("s1", 1), wants_answer=False))

    def park() -> None:
        for index in range(MANY):
            node.receive(grant(index))

    def expect() -> None:
        for index in range(MANY):
            node.coordinator.expect_target(key_of(f"k{index}"), "p")

    parked, expected = node.walks_of(park), node.walks_of(expect)
    assert (parked, expected, len(node.sources)) == (0, 0, MANY)
    assert node.walks_of(node.turn) == 0


def test_the_count_of_parked_grants_is_that_of_the_parked_ones() -> None:
    node = Node()
    node.receive(Hello(card_of("s1", 1), wants_answer=False))
    for index in range(10):
        node.receive(grant(index))
    for index in range(4):
        node.coordinator.expect_target(key_of(f"k{index}"), "p")
    node.coordinator.expect_target(key_of("k4"), "another prompt")
    assert node.coordinator.source._parked == 5
    node.clock.now += LIMITS.defer_timeout
    node.coordinator.tick()
    assert node.coordinator.source._parked == 0
    assert not any(isinstance(record.state, str) and record.state == "parked" for record in dict.values(node.sources))


def test_every_deadline_still_rings_with_thousands_alive() -> None:
    node = Node()
    node.receive(Hello(card_of("s1", 1), wants_answer=False))
    for index in range(MANY):
        node.receive(grant(index))
        node.coordinator.expect_target(key_of(f"k{index}"), "p")
        node.clock.now += LIMITS.defer_timeout / MANY / 2
    last = node.clock.now + LIMITS.defer_timeout
    while node.sources:
        due = node.coordinator.next_deadline()
        assert due is not None
        assert due <= last
        node.clock.now = max(node.clock.now, due)
        node.coordinator.tick()
    ends = [event for event in node.events if isinstance(event, SourceEnded)]
    assert [event.outcome for event in ends] == [Outcome.EXPIRED] * MANY
    ended = [note for note in node.notes if note.stage is Stage.ENDED and note.side is Side.SOURCE]
    assert [(note.key, note.outcome) for note in ended] == [(event.key, event.outcome) for event in ends]


def test_no_peer_is_given_up_while_its_frames_wait_to_be_read() -> None:
    node = Node()
    node.receive(Hello(card_of("s1", 1), wants_answer=False))
    node.receive(grant(0))
    node.coordinator.expect_target(key_of("k0"), "p")
    node.clock.now += LIMITS.defer_timeout
    node.coordinator.tick(is_behind=True)
    assert node.events == [Granted(key_of("k0"))]
    assert any(isinstance(message, Heartbeat) for message in node.post.take()), "and we send that we live"
    node.coordinator.tick()
    assert isinstance(node.events[-1], SourceEnded)


def test_a_side_that_walked_over_everything_would_be_seen() -> None:
    class Walking(TargetSide):
        def tick(self) -> None:
            assert [record for record in self.live.values() if record.retry.at < 0] == []
            super().tick()

    class Coordinating(Coordinator):
        source_side = SourceSide
        target_side = Walking

    node = Node()
    node.coordinator.__class__ = Coordinating
    node.coordinator.target.__class__ = Walking
    node.coordinator.expect_source(wanted(0))
    assert node.walks_of(node.turn) == 1


def test_an_error_with_one_hand_off_leaves_the_others_their_deadlines() -> None:
    node = Node()
    node.receive(Hello(card_of("s1", 1), wants_answer=False))
    for index in range(3):
        node.receive(grant(index))
        node.coordinator.expect_target(key_of(f"k{index}"), "p")
    returned = node.coordinator.source.return_blocks
    broken = [key_of("k0")]

    def failing(record: SourceRecord) -> None:
        if record.key in broken:
            raise OSError("a bug of ours")
        returned(record)

    node.coordinator.source.effects[SourceEffect.RETURN_BLOCKS] = failing
    node.clock.now += LIMITS.defer_timeout
    with pytest.raises(OSError, match="a bug of ours"):
        node.coordinator.tick()
    node.coordinator.tick()
    assert {event.key for event in node.events if isinstance(event, SourceEnded)} == {key_of("k1"), key_of("k2")}
