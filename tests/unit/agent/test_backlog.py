"""A full queue: what it refuses waits and is posted again, other peers go on, and patience has an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from agent_rig import Clock, card_of, key_of, layout_of_tokens
from driver_rig import is_equal, landed, pair

from kvbaton.agent.rank import Backlog, Part, RankAgent
from kvbaton.agent.rank_orders import (
    Connect,
    CopyFailed,
    CopyId,
    CopyStopped,
    Disconnect,
    MoveSpans,
    OpenCopy,
    RankReport,
    SpansMoved,
    StopCopy,
)
from kvbaton.core.card import RankCard
from kvbaton.core.handoff import Executor, Incarnation, Span
from kvbaton.errors import QueueFull
from kvbaton.transport.base import PeerRank, Region, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from watching import wait_until

P1, P2 = PeerRank(Incarnation("p1")), PeerRank(Incarnation("p2"))
RUNS = np.zeros((1, 3), np.uint64)
TIMEOUT_S = 30.0


def part(name: str, span: int = 0) -> Part:
    return Part(CopyId(key_of(name), 1, 1), span, RUNS)


@dataclass
class Queue:
    """A transport that has room for so many parts of each peer."""

    room: dict[PeerRank, int] = field(default_factory=dict)
    taken: list[tuple[str, int]] = field(default_factory=list)
    asked: int = 0

    def offer(self, peer: PeerRank, part: Part) -> None:
        self.asked += 1
        if not self.room.get(peer, 0):
            raise QueueFull("queue full")
        self.room[peer] -= 1
        self.taken.append((part.copy.key.transfer_id, part.span))


def test_what_is_refused_waits_in_order_and_others_go_on() -> None:
    queue = Queue({P1: 1, P2: 5})
    backlog = Backlog(TIMEOUT_S, queue.offer)
    for span in range(3):
        backlog.add(P1, part("a", span), 0.0)
    backlog.add(P2, part("b"), 0.0)
    assert queue.taken == [("a", 0), ("b", 0)]
    assert len(backlog) == 2
    queue.room[P1] = 5
    backlog.add(P1, part("c"), 0.0)
    assert queue.taken[2:] == [], "none overtakes those that wait"
    assert backlog.offer_again(0.0005, at_once=False) == []
    assert len(backlog) == 3, "it is not due yet"
    assert backlog.offer_again(0.001, at_once=False) == []
    assert queue.taken[2:] == [("a", 1), ("a", 2), ("c", 0)]
    assert (len(backlog), backlog.next_deadline()) == (0, None)


def test_each_refusal_doubles_the_wait_up_to_50_ms_and_a_completion_cuts_it_short() -> None:
    queue = Queue()
    backlog = Backlog(TIMEOUT_S, queue.offer)
    now, waits = 0.0, []
    backlog.add(P1, part("a"), now)
    for _ in range(9):
        due = backlog.next_deadline()
        assert due is not None
        waits.append(round(1000 * (due - now)))
        now = due
        backlog.offer_again(now, at_once=False)
    assert waits == [1, 2, 4, 8, 16, 32, 50, 50, 50]
    queue.room[P1] = 1
    backlog.offer_again(now, at_once=True)
    assert queue.taken == [("a", 0)]


def test_the_timeout_ends_every_copy_with_that_peer_and_is_renewed_by_each_acceptance() -> None:
    queue = Queue({P2: 100})
    backlog = Backlog(TIMEOUT_S, queue.offer)
    for name in ("a", "a", "b"):
        backlog.add(P1, part(name), 0.0)
    queue.room[P1] = 1
    assert backlog.offer_again(TIMEOUT_S, at_once=False) == []
    assert backlog.offer_again(2 * TIMEOUT_S - 1, at_once=False) == []
    given_up = backlog.offer_again(2 * TIMEOUT_S, at_once=False)
    assert [copy.key for copy, _ in given_up] == [key_of("a"), key_of("b")]
    assert given_up[0][1] == "queue full; nothing was taken for 30 s"
    assert not len(backlog)
    queue.room[P1] = 1
    backlog.add(P1, part("c"), 100.0)
    assert queue.taken[-1] == ("c", 0)


LAYOUT = layout_of_tokens(1, 16)
WHOLE = Span(0, 0, 4, 0, 1)


class Ranks:
    """A target rank that can reach a source rank over a transport which refuses on command; time is the test's."""

    def __init__(self) -> None:
        hub = MemoryHub()
        self.source_memory = np.arange(1, 17, dtype=np.uint8)
        self.memory = np.zeros(16, np.uint8)
        source = Incarnation("source")
        self.source = MemoryTransport(Region.of(self.source_memory), hub, TransportSettings(incarnation=source))
        region = Region.of(self.memory)
        inner = MemoryTransport(region, hub, TransportSettings(incarnation=Incarnation("target")))
        self.transport = FaultyTransport(inner, region, Faults())
        self.reports: list[RankReport] = []
        self.clock = Clock()
        self.agent = RankAgent(0, LAYOUT, self.transport, self.reports.append, clock=self.clock, transfer_timeout=TIMEOUT_S)
        rank = RankCard(0, LAYOUT, (self.source.endpoint(),))
        self.agent.handle(Connect(msgspec.structs.replace(card_of("source"), ranks=(rank,))))

    def close(self) -> None:
        self.transport.close()
        self.source.close()

    def move(self, name: str, *spans: Span) -> CopyId:
        copy = CopyId(key_of(name), 1, 1)
        self.agent.handle(
            OpenCopy(
                copy=copy,
                peer=Incarnation("source"),
                executor=Executor.TARGET_READS,
                epoch=1,
                target_blocks=((8, 2, 5, 11),),
                cached_tokens=0,
            )
        )
        self.agent.handle(MoveSpans(copy, ((3, 9, 4, 1),), spans))
        return copy

    def poll_until(self, kind: type[RankReport], count: int = 1) -> None:
        def has_come() -> bool:
            self.clock.now += 0.05
            self.agent.poll()
            return sum(isinstance(report, kind) for report in self.reports) >= count

        wait_until(has_come, f"{count} {kind.__name__}: {self.reports}")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_a_refused_span_arrives_a_little_later(ranks: Ranks) -> None:
    ranks.transport.set_faults(Faults(refuse_posts=5))
    ranks.move("k", WHOLE)
    assert ranks.reports == []
    assert ranks.agent.next_deadline() == ranks.clock.now + 0.001
    ranks.poll_until(SpansMoved)
    assert [int(ranks.memory[block]) for block in (8, 2, 5, 11)] == [4, 10, 5, 2]
    assert ranks.agent.next_deadline() is None


def test_control_a_span_that_is_never_taken_never_arrives_and_fails_once_with_the_reason(ranks: Ranks) -> None:
    ranks.transport.set_faults(Faults(refuse_posts=1 << 30))
    copy = ranks.move("k", Span(0, 0, 2, 0, 1), Span(1, 2, 4, 0, 1))
    ranks.clock.now += TIMEOUT_S - 1
    ranks.agent.poll()
    assert ranks.reports == []
    ranks.clock.now += 1
    ranks.agent.poll()
    (failed,) = ranks.reports
    assert isinstance(failed, CopyFailed)
    assert failed.copy == copy
    assert failed.reason.endswith("nothing was taken for 30 s")
    assert not ranks.memory.any()
    assert ranks.agent.copies == {}


def test_a_copy_that_is_stopped_while_it_waits_is_quiet_at_once(ranks: Ranks) -> None:
    ranks.transport.set_faults(Faults(refuse_posts=1 << 30))
    stopped = ranks.move("stopped", WHOLE)
    ranks.agent.handle(StopCopy(stopped))
    assert ranks.reports == [CopyStopped(stopped, 0)]
    ranks.transport.set_faults(Faults())
    ranks.poll_until(CopyStopped)
    assert ranks.agent.next_deadline() is None
    assert not ranks.memory.any()


def test_a_peer_that_is_gone_ends_the_waiting(ranks: Ranks) -> None:
    ranks.transport.set_faults(Faults(refuse_posts=1))
    ranks.move("k", WHOLE)
    ranks.agent.handle(Disconnect(Incarnation("source")))
    (failed,) = ranks.reports
    assert isinstance(failed, CopyFailed)
    assert "not connected" in failed.reason


def test_over_real_drivers_a_full_queue_only_delays() -> None:
    with pair(faults=Faults(refuse_posts=20)) as (source, target):
        landed(source, target, "k")
        assert is_equal(source, target)
