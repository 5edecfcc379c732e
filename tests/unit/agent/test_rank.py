"""Rank agents: real bytes between two of them over the memory transport, and every end a copy can have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from agent_rig import Clock, card_of, key_of, layout_of_tokens

from kvbaton.agent.rank import RankAgent, RankControls, _neighbours
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    Connect,
    CopyFailed,
    CopyId,
    CopyStopped,
    Disconnect,
    MoveSpans,
    OpenCopy,
    PeerFenced,
    PoisonBlocks,
    RankReport,
    ReadAux,
    RegionFenced,
    ResetRegion,
    RevokePeer,
    SpansMoved,
    StopCopy,
    encode_copy,
)
from kvbaton.core import plan
from kvbaton.core.card import Card, Endpoint, RankCard
from kvbaton.core.handoff import BlockLists, Executor, Incarnation, Span
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.strips import Plan, Runs, unroll
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import (
    BATCH_BYTES,
    AfterEvent,
    Arrival,
    Batch,
    Completion,
    Direction,
    LateWrites,
    PagesMoved,
    PeerRank,
    Region,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.runs import Loops, Pages, load_loops
from watching import wait_until

LAYERS, BLOCKS = 2, 16
LAYOUT = layout_of_tokens(LAYERS, BLOCKS)
POISON = 0xEE
SOURCE_BLOCKS = ((3, 9, 4, 1),)
TARGET_BLOCKS = ((8, 2, 5, 11),)
COPY = CopyId(key_of("k"), 1, 1)
PEER = Incarnation("source")
START = OpenCopy(copy=COPY, peer=PEER, executor=Executor.TARGET_READS, epoch=1, target_blocks=TARGET_BLOCKS, cached_tokens=0)
WHOLE = Span(0, 0, 4, 0, LAYERS)

LOOPS = load_loops()
needs_compiler = pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")

ReportT = TypeVar("ReportT", bound=RankReport)


def card_with(name: str, *endpoints: Endpoint) -> Card:
    """The card of an instance with one rank that can be reached like that."""
    return msgspec.structs.replace(card_of(name), ranks=(RankCard(0, LAYOUT, endpoints),))


class PagingFaulty(FaultyTransport):
    """It plans a few pages in the call that reads them, and fails on command all the same."""

    loops: Loops

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        runs = self.loops.plan_pages(pages, 512)
        return None if runs is None else PagesMoved(self.post(Batch(peer, Direction.READ, runs)), len(runs))


class Rig:
    """A target rank with poisoned memory that can reach a source rank with known content."""

    def __init__(self, loops: Loops | None = None, *, moves_pages: bool = False) -> None:
        hub = MemoryHub()
        self.source_memory = np.arange(1, LAYERS * BLOCKS + 1, dtype=np.uint8)
        self.memory = np.full(LAYERS * BLOCKS, POISON, np.uint8)
        self.source = MemoryTransport(Region.of(self.source_memory), hub, TransportSettings(incarnation=PEER))
        region = Region.of(self.memory)
        inner = MemoryTransport(region, hub, TransportSettings(incarnation=Incarnation("target")))
        self.transport = (PagingFaulty if moves_pages else FaultyTransport)(inner, region, Faults())
        if isinstance(self.transport, PagingFaulty) and loops is not None:
            self.transport.loops = loops
        self.reports: list[RankReport] = []
        report = self.reports.append
        self.agent = RankAgent(0, LAYOUT, self.transport, report, clock=time.monotonic, transfer_timeout=30.0, loops=loops)
        self.agent.handle(Connect(card_with("source", self.source.endpoint())))

    def close(self) -> None:
        self.transport.close()
        self.source.close()

    def wait_for(self, kind: type[ReportT]) -> ReportT:
        """The next report of that kind."""

        def has_come() -> bool:
            self.agent.poll()
            return any(isinstance(report, kind) for report in self.reports)

        wait_until(has_come, f"a {kind.__name__}")
        return next(report for report in self.reports if isinstance(report, kind))

    def wait_for_reports(self, count: int) -> None:
        """Until so many things were reported."""

        def have_come() -> bool:
            self.agent.poll()
            return len(self.reports) == count

        wait_until(have_come, f"{count} reports")

    def expected(self, tokens: range, layers: range) -> npt.NDArray[np.uint8]:
        """Target memory when these tokens of these layers have arrived, and nothing else."""
        memory = np.full(LAYERS * BLOCKS, POISON, np.uint8)
        for token in tokens:
            for layer in layers:
                at = layer * BLOCKS
                memory[at + TARGET_BLOCKS[0][token]] = self.source_memory[at + SOURCE_BLOCKS[0][token]]
        return memory


@pytest.fixture(params=["loop", "runs", "plans", "pages"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Four rigs: with the loop in C that plans a few pages, where there is a compiler; without it; one whose few runs are
    posted in short form, as many are; and one whose transport plans a few pages itself."""
    if request.param == "plans":
        monkeypatch.setattr(plan, "_FEW_RUNS", 0)
    loops = load_loops() if request.param in ("loop", "pages") else None
    rig = Rig(loops, moves_pages=request.param == "pages" and loops is not None)
    yield rig
    rig.close()


def test_a_span_arrives_where_it_belongs_and_nowhere_else(rig: Rig) -> None:
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(7, 1, 3, 1, 2),)))
    assert rig.wait_for(SpansMoved) == SpansMoved(COPY, 0, (7,), 2, 2)
    assert np.array_equal(rig.memory, rig.expected(range(1, 3), range(1, 2)))


def test_what_the_target_has_cached_is_not_moved(rig: Rig) -> None:
    rig.agent.handle(msgspec.structs.replace(START, cached_tokens=3))
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert rig.wait_for(SpansMoved).bytes_moved == LAYERS
    assert np.array_equal(rig.memory, rig.expected(range(3, 4), range(LAYERS)))


def test_a_span_that_is_cached_altogether_is_moved_at_once(rig: Rig) -> None:
    rig.agent.handle(msgspec.structs.replace(START, cached_tokens=4))
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert rig.reports == [SpansMoved(COPY, 0, (0,), 0, 0)]
    assert np.all(rig.memory == POISON)


def test_control_without_the_bytes_the_poison_stays(rig: Rig) -> None:
    rig.transport.set_faults(Faults(drop_writes=True))
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    rig.wait_for(SpansMoved)
    assert np.all(rig.memory == POISON)


def test_control_with_a_wrong_byte_memory_is_not_what_it_should_be(rig: Rig) -> None:
    rig.transport.set_faults(Faults(corrupt=True))
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    rig.wait_for(SpansMoved)
    assert not np.array_equal(rig.memory, rig.expected(range(4), range(LAYERS)))


def test_an_error_of_the_transport_fails_the_copy_once(rig: Rig) -> None:
    rig.transport.set_faults(Faults(fail_after=1))
    rig.agent.handle(START)
    for number in range(4):  # one batch each: spans of one order would be moved as one
        rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(number, number, number + 1, 0, LAYERS),)))
    failed = rig.wait_for(CopyFailed)
    assert (failed.copy, failed.rank) == (COPY, 0)
    assert "fail_after" in failed.reason
    assert rig.agent.copies == {}
    assert sum(isinstance(report, CopyFailed) for report in rig.reports) == 1


def test_a_copy_that_is_stopped_is_quiet_when_that_is_reported(rig: Rig) -> None:
    rig.transport.set_faults(Faults(stall=True))
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    rig.agent.poll()
    assert rig.reports == []
    rig.agent.handle(StopCopy(COPY))
    assert rig.wait_for(CopyStopped) == CopyStopped(COPY, 0)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert isinstance(rig.reports[-1], CopyStopped)
    assert np.all(rig.memory == POISON)


def test_a_peer_that_is_lost_fails_the_copy(rig: Rig) -> None:
    rig.transport.set_faults(Faults(stall=True))
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    rig.agent.handle(Disconnect(PEER))
    rig.wait_for(CopyFailed)
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    failed = rig.reports[-1]
    assert isinstance(failed, CopyFailed)
    assert "not connected" in failed.reason


@pytest.mark.parametrize(
    ("blocks", "span"),
    [
        (SOURCE_BLOCKS, Span(0, 0, 5, 0, LAYERS)),
        (((3, 9, 4, BLOCKS),), WHOLE),
        (((3, 9, 4, 1 << 62),), WHOLE),
        (((3, 9),), WHOLE),
        ((), WHOLE),
        (SOURCE_BLOCKS, Span(0, 0, 1 << 62, 0, LAYERS)),
    ],
)
def test_blocks_that_do_not_exist_fail_the_copy_and_touch_nothing(
    rig: Rig, blocks: tuple[tuple[int, ...], ...], span: Span
) -> None:
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, blocks, (span,)))
    assert [type(report) for report in rig.reports] == [CopyFailed]
    assert np.all(rig.memory == POISON)


def test_a_copy_that_is_not_open_is_stopped_at_once_and_cannot_move(rig: Rig) -> None:
    rig.agent.handle(StopCopy(COPY))
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert rig.reports == [CopyStopped(COPY, 0)]


def test_a_peer_without_a_common_transport_is_refused_with_both(rig: Rig) -> None:
    with pytest.raises(TransportError, match="memory here, tcp, nixl there"):
        rig.agent.handle(Connect(card_with("other", Endpoint("tcp", 1, {}), Endpoint("nixl", 1, {}))))


class Scripted:
    """A transport that completes what and when the test orders."""

    name = "scripted"
    wakeup_fd = -1
    batch_bytes = BATCH_BYTES

    def __init__(self, late_writes: LateWrites, directions: set[Direction]) -> None:
        self.late_writes = late_writes
        self.directions = frozenset(directions)
        self.posted: dict[Ticket, Batch] = {}
        self.cancelled: list[Ticket] = []
        self.revoked: list[PeerRank] = []
        self.fenced: list[tuple[PeerRank, int]] = []
        self.epochs: list[int] = []
        self.done: list[Completion] = []
        self._tickets = 0

    def endpoint(self) -> Endpoint:
        return Endpoint(self.name, LAYOUT.region_bytes, {})

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        del peer, endpoint

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        del after
        self._tickets += 1
        self.posted[Ticket(self._tickets)] = batch
        return Ticket(self._tickets)

    def poll(self) -> list[Completion]:
        done, self.done = self.done, []
        return done

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def revoke(self, peer: PeerRank) -> None:
        self.revoked.append(peer)

    def close(self) -> None:
        return

    def finish(self, ticket: Ticket, moved: int | None = None, error: str = "") -> None:
        """Complete a batch with so many bytes, all by default."""
        batch = self.posted.pop(ticket)
        self.done.append(Completion(ticket, batch.wire_bytes if moved is None else moved, error))


class Fencing(Scripted):
    """The same, and it can fence."""

    def fence_peer(self, peer: PeerRank, epoch: int) -> None:
        self.fenced.append((peer, epoch))

    def reset_region(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Reporting(Fencing):
    """The same, and it reports what peers have written."""

    def __init__(self, late_writes: LateWrites, directions: set[Direction]) -> None:
        super().__init__(late_writes, directions)
        self.arrivals: list[Arrival] = []

    def take_arrivals(self) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals


class Full(Scripted):
    """The same with batches of one byte, and it has room for so many more."""

    batch_bytes = 1
    room = 2

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if not self.room:
            raise QueueFull("queue full")
        self.room -= 1
        return super().post(batch, after)


class Paging(Full):
    """The same with room for many, and it plans a few pages itself, unless it is to leave them alone or to refuse them."""

    batch_bytes = BATCH_BYTES
    room = 1000

    def __init__(self, late_writes: LateWrites, directions: set[Direction]) -> None:
        super().__init__(late_writes, directions)
        self.asked: list[PeerRank] = []
        self.leaves_alone = False
        self.refusal = ""

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        assert LOOPS is not None
        self.asked.append(peer)
        if self.refusal:
            raise TransportError(self.refusal)
        runs = None if self.leaves_alone else LOOPS.plan_pages(pages, 512)
        return None if runs is None else PagesMoved(super().post(Batch(peer, Direction.READ, runs)), len(runs))

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if self.refusal:
            raise TransportError(f"{self.refusal}, by name")
        return super().post(batch, after)


def scripted(
    transport: Scripted, *, unfenced_writes: bool = False, clock: Clock | None = None, loops: Loops | None = None
) -> tuple[RankAgent, list[RankReport]]:
    """An agent over a scripted transport, connected to one peer."""
    reports: list[RankReport] = []
    clock = clock or Clock()
    agent = RankAgent(
        0,
        LAYOUT,
        transport,
        reports.append,
        clock=clock,
        transfer_timeout=30.0,
        unfenced_writes=unfenced_writes,
        loops=loops,
    )
    agent.handle(Connect(card_with("source", transport.endpoint())))
    return agent, reports


BOTH = {Direction.READ, Direction.WRITE}


@pytest.mark.parametrize(
    ("late_writes", "directions", "unfenced_writes", "executor"),
    [
        (LateWrites.IMPOSSIBLE, {Direction.READ}, False, Executor.TARGET_READS),
        (LateWrites.REVOCABLE, BOTH, False, Executor.SOURCE_WRITES),
        (LateWrites.REVOCABLE, {Direction.READ}, False, Executor.TARGET_READS),
        (LateWrites.UNFENCED, BOTH, False, Executor.TARGET_READS),
        (LateWrites.UNFENCED, BOTH, True, Executor.SOURCE_WRITES),
    ],
)
def test_peers_write_only_where_they_can_be_fenced_or_the_operator_asked_for_it(
    late_writes: LateWrites, directions: set[Direction], unfenced_writes: bool, executor: Executor
) -> None:
    agent, _ = scripted(Scripted(late_writes, directions), unfenced_writes=unfenced_writes)
    assert agent.executor is executor


@pytest.mark.parametrize(
    ("transport", "unfenced_writes", "fences", "counts"),
    [
        (Reporting(LateWrites.REVOCABLE, BOTH), False, True, True),
        (Reporting(LateWrites.UNFENCED, BOTH), True, False, False),
        (Reporting(LateWrites.IMPOSSIBLE, {Direction.READ}), False, False, False),
        (Fencing(LateWrites.REVOCABLE, BOTH), False, True, False),
    ],
)
def test_what_peers_write_is_counted_where_they_write_can_be_fenced_and_are_reported(
    transport: Scripted, unfenced_writes: bool, fences: bool, counts: bool
) -> None:
    agent, _ = scripted(transport, unfenced_writes=unfenced_writes)
    assert (agent.fences_writers, agent.counts_arrivals) == (fences, counts)


def test_what_peers_have_written_is_reported_in_numbers() -> None:
    transport = Reporting(LateWrites.REVOCABLE, BOTH)
    agent, reports = scripted(transport)
    transport.arrivals = [Arrival(PeerRank(PEER), encode_copy(COPY), size) for size in (3, 4)]
    agent.poll()
    assert reports == [Arrived(COPY, PEER, 0, 1, 3), Arrived(COPY, PEER, 0, 2, 4)]


def test_a_source_that_writes_posts_the_same_runs_the_other_way_under_the_epoch_of_the_grant() -> None:
    transport = Fencing(LateWrites.REVOCABLE, BOTH)
    agent, _ = scripted(transport)
    agent.handle(msgspec.structs.replace(START, executor=Executor.SOURCE_WRITES, epoch=5))
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(0, 0, 1, 0, 1),)))
    (batch,) = transport.posted.values()
    assert (batch.direction, batch.epoch, batch.peer) == (Direction.WRITE, 5, PeerRank(PEER, 0))
    assert _rows(batch.runs) == [(SOURCE_BLOCKS[0][0], TARGET_BLOCKS[0][0], 1)]


def test_a_span_is_cut_into_batches_as_large_as_the_transport_has_them() -> None:
    batches = {}
    for most in (1, BATCH_BYTES):
        transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
        transport.batch_bytes = most
        agent, _ = scripted(transport)
        agent.handle(START)
        agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(0, 0, 4, 0, LAYERS),)))
        batches[most] = [_rows(batch.runs) for batch in transport.posted.values()]
    (whole,) = batches[BATCH_BYTES]
    assert len(whole) > 1
    assert batches[1] == [[run] for run in whole]


def _rows(runs: Runs | Plan) -> list[tuple[int, ...]]:
    return [tuple(int(number) for number in row) for row in unroll(runs)]


def test_a_transport_that_moves_less_than_was_posted_is_not_believed() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    transport.finish(Ticket(1), moved=7)
    agent.poll()
    (failed,) = reports
    assert isinstance(failed, CopyFailed)
    assert "7 of 8 bytes" in failed.reason


CHUNKS = (Span(0, 0, 3, 0, 1), Span(1, 0, 3, 1, 2), Span(2, 3, 4, 0, 1), Span(3, 3, 4, 1, 2))


def test_chunks_of_all_layers_are_moved_and_reported_as_one(rig: Rig) -> None:
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, CHUNKS))
    assert len(rig.agent.copies[COPY].moving) == 1
    rig.wait_for(SpansMoved)
    assert rig.reports == [SpansMoved(COPY, 0, (0, 1, 2, 3), 8, 8)]
    assert np.array_equal(rig.memory, rig.expected(range(4), range(LAYERS)))


@pytest.mark.parametrize(
    ("spans", "parts"),
    [
        (CHUNKS[:3], 2),
        (CHUNKS[1:], 2),
        ((CHUNKS[0], CHUNKS[2], CHUNKS[1], CHUNKS[3]), 2),
        ((CHUNKS[2], CHUNKS[3], CHUNKS[0], CHUNKS[1]), 2),
        ((CHUNKS[0], CHUNKS[3]), 2),
        ((Span(0, 0, 2, 0, 2), Span(1, 3, 4, 0, 2)), 2),
    ],
    ids=["a layer is missing at the end", "at the start", "by layer", "later tokens first", "diagonal", "a gap of tokens"],
)
def test_spans_that_are_no_rectangle_are_not_moved_as_one(rig: Rig, spans: tuple[Span, ...], parts: int) -> None:
    rig.agent.handle(START)
    rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, spans))
    assert len(rig.agent.copies[COPY].moving) == parts
    rig.wait_for_reports(parts)
    sizes = {span.number: (span.end_token - span.first_token) * (span.end_layer - span.first_layer) for span in spans}
    moved = [report for report in rig.reports if isinstance(report, SpansMoved)]
    assert sorted(number for report in moved for number in report.spans) == sorted(sizes)
    assert [report.bytes_moved for report in moved] == [sum(sizes[number] for number in report.spans) for report in moved]
    expected = rig.expected(range(0), range(0))
    for span in spans:
        one = rig.expected(range(span.first_token, span.end_token), range(span.first_layer, span.end_layer))
        expected = np.where(one == POISON, expected, one)
    assert np.array_equal(rig.memory, expected)


def test_layers_with_a_gap_between_them_are_no_row() -> None:
    spans = (Span(0, 0, 4, 0, 1), Span(1, 0, 4, 2, 3), Span(2, 0, 4, 3, 4))
    assert list(_neighbours(spans)) == [spans[:1], spans[1:]]


def test_an_aux_record_that_could_not_be_read_is_reported_with_the_reason() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    order = ReadAux(copy=COPY, peer=PEER, offset=1, slot=2, size_bytes=3)
    for error in ("PeerLost: gone", ""):
        agent.handle(order)
        transport.finish(next(iter(transport.posted)), error=error)
        agent.poll()
    assert reports == [
        AuxRead(COPY, 2, b"", "PeerLost: gone"),
        AuxRead(COPY, 2, b"", "this rank has no memory to read from"),
    ]


def test_a_failed_copy_is_reported_when_the_rest_of_it_is_quiet() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(START)
    for span in (Span(0, 0, 2, 0, LAYERS), Span(1, 2, 4, 0, LAYERS)):  # one batch each: in one order they would be moved as one
        agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (span,)))
    transport.finish(Ticket(1), moved=0, error="the cable is cut")
    agent.poll()
    assert reports == []
    assert transport.cancelled == [Ticket(2)]
    transport.finish(Ticket(2))
    agent.poll()
    assert reports == [CopyFailed(COPY, 0, "the cable is cut")]


def test_a_stop_in_the_middle_of_a_failure_is_answered_when_all_is_quiet() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(START)
    for span in (Span(0, 0, 2, 0, LAYERS), Span(1, 2, 4, 0, LAYERS)):  # one batch each: in one order they would be moved as one
        agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (span,)))
    transport.finish(Ticket(1), moved=0, error="the cable is cut")
    agent.poll()
    agent.handle(StopCopy(COPY))
    assert reports == []
    transport.finish(Ticket(2), moved=0, error="cancelled")
    agent.poll()
    assert reports == [CopyStopped(COPY, 0)]


def test_what_completes_after_a_stop_is_not_reported_as_moved() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    agent.handle(StopCopy(COPY))
    transport.finish(Ticket(1))
    agent.poll()
    assert reports == [CopyStopped(COPY, 0)]
    assert agent.copies == {}


def test_a_fence_is_reported_and_holds_for_the_epochs_before_it() -> None:
    transport = Fencing(LateWrites.REVOCABLE, BOTH)
    agent, reports = scripted(transport)
    agent.handle(RevokePeer(PEER, 4))
    assert reports == [PeerFenced(PEER, 4, 0)]
    assert transport.fenced == [(PeerRank(PEER, 0), 4)]
    agent.handle(RevokePeer(PEER, 5))
    assert transport.fenced[-1] == (PeerRank(PEER, 0), 5), "without a session it is fenced all the same"
    agent.handle(ResetRegion(5))
    assert reports[-1] == RegionFenced(5, 0)
    assert transport.epochs == [5]


def test_a_session_is_torn_down_where_no_epoch_can_be_fenced() -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(RevokePeer(PEER, 3))
    assert set(transport.revoked) == {PeerRank(PEER)}
    assert reports == [PeerFenced(PEER, 3, 0)]


def test_blocks_are_spoiled_where_a_control_asks_for_that() -> None:
    spoiled: list[tuple[BlockLists, int]] = []
    controls = RankControls(poison=lambda blocks, cached_tokens: spoiled.append((blocks, cached_tokens)))
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent = RankAgent(0, LAYOUT, transport, print, clock=time.monotonic, transfer_timeout=30.0, controls=controls)
    agent.handle(PoisonBlocks(((1, 2),), 3))
    assert spoiled == [(((1, 2),), 3)]


def test_a_transport_that_cannot_fence_does_not_claim_to_and_keeps_working() -> None:
    transport = Scripted(LateWrites.UNFENCED, BOTH)
    agent, reports = scripted(transport, unfenced_writes=True)
    agent.handle(RevokePeer(PEER, 4))
    agent.handle(ResetRegion(5))
    assert reports == []
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert len(transport.posted) == 1


def test_a_mistake_in_planning_fails_the_copy_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No coordinator waits for a copy that nothing moves, and the mistake is still raised."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("kvbaton.agent.rank.plan_layers", broken)
    monkeypatch.setattr("kvbaton.agent.rank.PagePlanner.pages", broken)
    rig.agent.handle(START)
    with pytest.raises(ZeroDivisionError):
        rig.agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert rig.reports == [CopyFailed(COPY, 0, "ZeroDivisionError: a mistake")]
    assert not rig.agent.copies


def test_completions_behind_one_that_raises_are_left_for_another_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Scripted(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, _ = scripted(transport)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    (ticket,) = transport.posted
    transport.finish(ticket)
    transport.done.append(Completion(Ticket(99), 0))

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(agent, "_complete", broken)
    with pytest.raises(ZeroDivisionError):
        agent.poll()
    assert agent.has_work
    agent.poll()
    assert not agent.has_work


def test_what_waits_for_a_full_queue_is_not_posted_once_its_copy_is_being_stopped() -> None:
    transport = Full(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    first, second = transport.posted
    agent.handle(StopCopy(COPY))
    transport.room = 8
    transport.finish(first)
    agent.poll()
    assert list(transport.posted) == [second]
    transport.finish(second)
    agent.poll()
    assert reports == [CopyStopped(COPY, 0)]


def test_a_copy_that_failed_is_reported_with_its_first_error_whatever_becomes_of_the_queue() -> None:
    transport, clock = Full(LateWrites.IMPOSSIBLE, {Direction.READ}), Clock()
    agent, reports = scripted(transport, clock=clock)
    other = CopyId(key_of("other"), 1, 1)
    for order in (START, msgspec.structs.replace(START, copy=other)):
        agent.handle(order)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(0, 0, 2, 0, 1),)))
    first, second = transport.posted
    agent.handle(MoveSpans(other, SOURCE_BLOCKS, (Span(0, 0, 1, 0, 1),)))  # it waits, and the next one behind it
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(1, 2, 3, 0, 1),)))
    transport.finish(first, moved=0, error="the cable is cut")
    agent.poll()
    assert reports == []
    clock.now += 30.0
    agent.poll()
    assert reports == [CopyFailed(other, 0, "queue full; nothing was taken for 30 s")]
    transport.finish(second, moved=0, error="cancelled")
    agent.poll()
    assert reports[1:] == [CopyFailed(COPY, 0, "the cable is cut")]


def _moved(transport: Scripted, *, loops: Loops | None) -> tuple[list[list[tuple[int, ...]]], list[RankReport], int]:
    """What is posted for a whole span, reported when it is in, and counted."""
    agent, reports = scripted(transport, loops=loops)
    agent.handle(msgspec.structs.replace(START, cached_tokens=1))
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    posted = [_rows(batch.runs) for batch in transport.posted.values()]
    for ticket in list(transport.posted):
        transport.finish(ticket)
    agent.poll()
    return posted, reports, agent.runs_total


@needs_compiler
@pytest.mark.parametrize("way", ["moves", "leaves alone"])
def test_pages_that_the_transport_plans_are_moved_reported_and_counted_as_any_others(way: str) -> None:
    ordinary = _moved(Scripted(LateWrites.IMPOSSIBLE, {Direction.READ}), loops=None)
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    transport.leaves_alone = way == "leaves alone"
    assert _moved(transport, loops=LOOPS) == ordinary
    assert ordinary[1:] == ([SpansMoved(COPY, 0, (0,), 6, 6)], 6)
    assert transport.asked == [PeerRank(PEER)]


@needs_compiler
def test_what_refuses_pages_is_named_where_they_are_posted() -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport, loops=LOOPS)
    agent.handle(START)
    transport.refusal = "the peer was revoked"
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert reports == [CopyFailed(COPY, 0, "the peer was revoked, by name")]
    assert (transport.asked, agent.runs_total) == ([PeerRank(PEER)], 0)


@needs_compiler
def test_a_refusal_that_is_over_when_the_runs_are_posted_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})

    def refuse(peer: PeerRank, pages: Pages) -> PagesMoved | None:
        del pages
        raise TransportError(f"{peer} is not connected")

    monkeypatch.setattr(transport, "move_pages", refuse)
    assert _moved(transport, loops=LOOPS) == _moved(Scripted(LateWrites.IMPOSSIBLE, {Direction.READ}), loops=None)


@needs_compiler
def test_pages_are_not_believed_to_have_moved_when_bytes_are_missing() -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport, loops=LOOPS)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    transport.finish(Ticket(1), moved=7)
    agent.poll()
    assert reports == [CopyFailed(COPY, 0, "7 of 8 bytes of span 0 were moved without an error")]
    assert transport.asked


@needs_compiler
def test_a_transport_that_plans_pages_is_not_asked_for_writes() -> None:
    transport = Paging(LateWrites.REVOCABLE, BOTH)
    agent, _ = scripted(transport, loops=LOOPS)
    agent.handle(msgspec.structs.replace(START, executor=Executor.SOURCE_WRITES))
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert [batch.direction for batch in transport.posted.values()] == [Direction.WRITE]
    assert transport.asked == []


@needs_compiler
def test_pages_do_not_overtake_batches_that_wait_for_room() -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport, loops=LOOPS)
    agent.handle(START)
    transport.leaves_alone, transport.room = True, 0
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(0, 0, 2, 0, LAYERS),)))
    assert (len(transport.asked), len(transport.posted)) == (1, 0)
    transport.leaves_alone, transport.room = False, 2
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (Span(1, 2, 4, 0, LAYERS),)))
    assert (len(transport.asked), len(transport.posted)) == (1, 0), "it waits behind the first"
    agent.handle(Disconnect(Incarnation("another")))  # what waits is offered again
    for ticket in list(transport.posted):
        transport.finish(ticket)
    agent.poll()
    assert reports == [SpansMoved(COPY, 0, (number,), 4, 4) for number in (0, 1)]
    assert len(transport.asked) == 1


def _stage(layer: int) -> Layout:
    """One layer of LAYOUT."""
    tensors = split_layers(dense_tensor((1, BLOCKS, 1, 1, 1), "uint8", 1))
    axes, heads = ("block", "token", "head", "channel"), (HeadRange(0, 1),)
    group = tensor_group("full", range(layer, layer + 1), tensors, axes, heads=heads, total_heads=1, planes=("kv",))
    return Layout(BLOCKS, (group,))


@needs_compiler
def test_pages_of_several_ranks_are_planned_here() -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, _ = scripted(transport, loops=LOOPS)
    stages = tuple(RankCard(number, _stage(number), (transport.endpoint(),)) for number in range(LAYERS))
    agent.handle(Connect(msgspec.structs.replace(card_of("source"), shape="pp2", ranks=stages)))
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    assert {batch.peer for batch in transport.posted.values()} == {PeerRank(PEER, number) for number in range(LAYERS)}
    assert transport.asked == []


@needs_compiler
def test_pages_that_complete_after_a_stop_are_not_reported_as_moved() -> None:
    transport = Paging(LateWrites.IMPOSSIBLE, {Direction.READ})
    agent, reports = scripted(transport, loops=LOOPS)
    agent.handle(START)
    agent.handle(MoveSpans(COPY, SOURCE_BLOCKS, (WHOLE,)))
    agent.handle(StopCopy(COPY))
    assert (transport.cancelled, reports) == ([Ticket(1)], [])
    transport.finish(Ticket(1))
    agent.poll()
    assert reports == [CopyStopped(COPY, 0)]
    assert transport.asked
