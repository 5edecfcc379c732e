"""Rank agents behind channels: orders go out, reports come back, and a rank that is gone is reported once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest
from agent_rig import card_of, key_of

from kvbaton.agent.channel import Channel, channel_pair
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    CloseCopy,
    Connect,
    CopyFailed,
    CopyId,
    CopyStopped,
    Disconnect,
    DropSums,
    MoveSpans,
    OpenCopy,
    PeerFenced,
    PoisonBlocks,
    PutAux,
    RankOrder,
    RankReport,
    ReadAux,
    RegionFenced,
    Reports,
    ResetRegion,
    RevokePeer,
    SpansMoved,
    SpansPlanned,
    SpansSummed,
    StopCopy,
    SumSpans,
    decode_order,
    decode_reports,
    encode_order,
    encode_reports,
)
from kvbaton.agent.rank_sets import RankLoop, RemoteRanks
from kvbaton.core.card import RankCard
from kvbaton.core.handoff import Executor, Incarnation, Integrity, Span
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.timeline import Side
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.memory import MemoryHub, MemoryTransport

COPY = CopyId(key_of("remote"), 1, 1)
SOURCE, TARGET = Incarnation("source"), Incarnation("target")
WAIT_S = 20.0
GROUP = tensor_group(
    "full",
    (0, 1),
    split_layers(dense_tensor((2, 2, 4, 4, 2, 4), "float32", 4)),
    ("plane", "block", "token", "head", "channel"),
    heads=(HeadRange(0, 2),),
    total_heads=2,
)
LAYOUT = Layout(2048, (GROUP,))
SPAN = Span(0, 0, 8, 0, 2)
OPEN = OpenCopy(
    copy=COPY,
    peer=SOURCE,
    executor=Executor.TARGET_READS,
    epoch=0,
    target_blocks=((2, 0),),
    cached_tokens=0,
    total_tokens=8,
)
SUM = SumSpans(
    copy=COPY, side=Side.TARGET, blocks=((2, 0),), spans=(SPAN,), cached_tokens=0, integrity=Integrity.FULL, peer=SOURCE
)


class Rig:
    """A target whose only rank is a loop behind a channel, and a source rank with known content."""

    def __init__(self) -> None:
        hub = MemoryHub()
        self.source_memory = np.random.default_rng(3).integers(0, 255, 2048, np.uint8)
        self.memory = np.zeros(2048, np.uint8)
        self.source = MemoryTransport(Region.of(self.source_memory), hub, TransportSettings(incarnation=SOURCE))
        transport = MemoryTransport(Region.of(self.memory), hub, TransportSettings(incarnation=TARGET))
        here, there = channel_pair()
        self.channel = Channel(here, "rank 0")
        self.loop = RankLoop(0, [LAYOUT], transport, Channel(there, "the coordinator"), 5.0, self.memory.data)
        self.lost: list[str] = []
        executor, fences = self.loop.agent.executor, self.loop.agent.fences_writers
        self.ranks = RemoteRanks([self.channel], "memory", executor, self.lost.append, fences_writers=fences)
        rank = RankCard(0, LAYOUT, (self.source.endpoint(),))
        self.card = msgspec.structs.replace(card_of(SOURCE), incarnation=SOURCE, ranks=(rank,))
        self.loop.start()

    def wait(self, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not is_there():
            assert time.monotonic() < until
            self.ranks.poll()

    def close(self) -> None:
        self.loop.close()
        self.ranks.close()
        self.source.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def open_copy(rig: Rig) -> None:
    rig.ranks.send(0, OPEN)


def test_a_copy_is_moved_by_the_rank_at_the_other_end(rig: Rig) -> None:
    rig.ranks.send_all(Connect(rig.card))
    open_copy(rig)
    rig.ranks.send(0, MoveSpans(COPY, ((1, 3),), (SPAN,)))
    rig.wait(lambda: bool(rig.ranks.reports))
    assert list(rig.ranks.reports) == [SpansMoved(COPY, 0, (0,), 1024, 1024)]
    assert rig.ranks.runs_total == 8
    blocks = [memory.reshape(4, 4, 128) for memory in (rig.memory, rig.source_memory)]
    np.testing.assert_array_equal(blocks[0][:, [2, 0]], blocks[1][:, [1, 3]])
    assert not blocks[0][:, [1, 3]].any()


def test_sums_and_stops_come_back_too(rig: Rig) -> None:
    rig.ranks.send(0, SUM)
    rig.wait(lambda: bool(rig.ranks.reports))
    rig.ranks.send(0, DropSums(Side.TARGET, COPY.key))
    open_copy(rig)
    rig.ranks.send(0, StopCopy(COPY))
    rig.ranks.send(0, CloseCopy(COPY))
    rig.wait(lambda: len(rig.ranks.reports) == 2)
    assert [type(report) for report in rig.ranks.reports] == [SpansSummed, CopyStopped]


def test_an_order_that_fails_is_reported_when_its_peer_is_used_and_the_rank_continues(rig: Rig) -> None:
    nowhere = msgspec.structs.replace(rig.card, ranks=(RankCard(0, LAYOUT, ()),))
    rig.ranks.send_all(Connect(nowhere))
    open_copy(rig)
    rig.ranks.send(0, MoveSpans(COPY, ((1, 3),), (SPAN,)))
    rig.wait(lambda: bool(rig.ranks.reports))
    (report,) = rig.ranks.reports
    assert isinstance(report, CopyFailed)
    assert "no common transport" in report.reason
    rig.ranks.reports.clear()
    test_a_copy_is_moved_by_the_rank_at_the_other_end(rig)


def test_a_rank_that_is_gone_is_reported_once_and_orders_to_it_are_quiet(rig: Rig) -> None:
    rig.loop.close()
    rig.wait(lambda: bool(rig.lost))
    open_copy(rig)
    rig.ranks.poll()
    assert len(rig.lost) == 1
    assert "rank 0 is gone" in rig.lost[0]
    assert rig.ranks.wakeups == []


def test_every_report_survives_its_frame() -> None:
    reports: list[RankReport] = [
        SpansMoved(COPY, 1, (2, 5), 3, 4),
        SpansPlanned(COPY, 1, (2, 3), 4),
        Arrived(COPY, SOURCE, 1, 2, 4),
        CopyFailed(COPY, 1, "why"),
        CopyStopped(COPY, 1),
        SpansSummed(COPY, Side.SOURCE, 1, {2: ((4, 3), (5, 6)), 3: ()}, ""),
        AuxRead(COPY, 0, b"aux"),
        PeerFenced(SOURCE, 3, 1),
        RegionFenced(3, 1),
    ]
    assert decode_reports(encode_reports(Reports(9, reports))) == Reports(9, reports)


def test_every_order_survives_its_frame(rig: Rig) -> None:
    orders: list[RankOrder] = [
        Connect(rig.card),
        Disconnect(SOURCE),
        RevokePeer(SOURCE, 2),
        ResetRegion(3),
        OPEN,
        MoveSpans(COPY, ((1, 3),), (SPAN,)),
        StopCopy(COPY),
        CloseCopy(COPY),
        SUM,
        DropSums(Side.SOURCE, COPY.key),
        PutAux(7, b"aux"),
        ReadAux(copy=COPY, peer=SOURCE, offset=1, slot=2, size_bytes=3),
        PoisonBlocks(((1, 2),), 3),
    ]
    assert {type(order) for order in orders} == set(get_args(RankOrder)), "a new order belongs into this list"
    assert [decode_order(encode_order(order)) for order in orders] == orders
