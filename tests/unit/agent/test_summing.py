"""Sums of a rank's own memory: right, a bounded piece per turn, fair, and nothing left of what was dropped."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from agent_rig import key_of, layout_of_tokens

from kvbaton.agent.rank import RegionMemory, Summer
from kvbaton.agent.rank_orders import CopyId, SpansSummed, SumSpans
from kvbaton.core.checks import BlockSums, PiecePlanner, Pieces
from kvbaton.core.handoff import BlockLists, Incarnation, Integrity, Span
from kvbaton.core.layout import Axis, Layout
from kvbaton.core.timeline import Side

BLOCKS = 16
LAYOUT = layout_of_tokens(2, BLOCKS)
MEMORY = np.arange(2 * BLOCKS, dtype=np.uint8)
WHOLE = Span(0, 0, 4, 0, 2)
PEER = Incarnation("peer")
ONE_LEG = {0: PiecePlanner(LAYOUT)}


@dataclass
class Slow:
    """Memory that only counts how many pieces are summed of it at a time."""

    summed: list[int] = field(default_factory=list)

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        del blocks, most_bytes
        return None

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        self.summed.append(len(pieces))
        counts = [end - first for first, end in zip([0, *ends], ends, strict=False)]
        return [value + counts[0], *counts[1:]]

    def read(self, offset: int, size_bytes: int) -> bytes:
        raise AssertionError((offset, size_bytes))

    def write(self, offset: int, data: bytes) -> None:
        raise AssertionError((offset, data))


def ask(name: str, *spans: Span, side: Side = Side.SOURCE, blocks: BlockLists = ((3, 9, 4, 1),), cached: int = 0) -> SumSpans:
    return SumSpans(
        copy=CopyId(key_of(name), 1, 1),
        side=side,
        blocks=blocks,
        spans=spans,
        cached_tokens=cached,
        integrity=Integrity.FULL,
        peer=PEER,
    )


def test_a_span_is_summed_over_its_blocks_in_order() -> None:
    reports: list[SpansSummed] = []
    summer = Summer(2, RegionMemory(MEMORY.data), reports.append)
    summer.add(ask("k", WHOLE, Span(1, 0, 4, 1, 2), cached=2), {2: PiecePlanner(LAYOUT)})
    assert reports == []
    summer.work()
    assert not summer.has_work
    copy = CopyId(key_of("k"), 1, 1)
    both = zlib.crc32(bytes([4, 1, BLOCKS + 4, BLOCKS + 1]))
    second = zlib.crc32(bytes([BLOCKS + 4, BLOCKS + 1]))
    assert reports == [SpansSummed(copy, Side.SOURCE, 2, {0: ((2, both),), 1: ((2, second),)})]


def test_a_turn_is_bounded_and_long_spans_go_on_where_they_stopped() -> None:
    rows, mib = 64, 1 << 20
    (group,) = layout_of_tokens(1, rows).groups
    names = ("block_stride", "token_stride", "head_stride")
    plane = msgspec.structs.replace(group.planes[0], channels=(Axis(mib, 1),), **dict.fromkeys(names, mib))
    wide = msgspec.structs.replace(group, planes=(plane,))
    reports: list[SpansSummed] = []
    memory = Slow()
    summer = Summer(0, memory, reports.append)
    blocks, legs = (tuple(range(rows)),), {0: PiecePlanner(Layout(rows * mib, (wide,)))}
    summer.add(ask("long", Span(0, 0, 60, 0, 1), blocks=blocks), legs)
    summer.add(ask("short", Span(0, 0, 1, 0, 1), blocks=blocks), legs)
    turns = 0
    while summer.has_work:
        summer.work()
        turns += 1
        if turns == 2:
            assert [report.copy.key for report in reports] == [key_of("short")], "a long one does not hold up a short one"
    assert turns >= 7
    assert max(memory.summed) == 8
    assert [report.sums for report in reports] == [{0: ((0, 1),)}, {0: ((0, 60),)}]


@dataclass
class InBlocks(Slow):
    """Memory that sums whole orders, as the loop in C does; `taken` has how many orders each call of `work` has summed."""

    taken: list[int] = field(default_factory=list)

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        size = 16 * len(blocks.spans)
        if size > most_bytes:
            return None
        self.taken[-1] += 1
        return [7] * len(blocks.spans), size


def in_blocks_of_16() -> dict[int, PiecePlanner]:
    """One leg with two blocks of 16 tokens each, of which whole orders are summed."""
    (group,) = layout_of_tokens(1, BLOCKS).groups
    (plane,) = group.planes
    plane = msgspec.structs.replace(plane, block_stride=16)
    group = msgspec.structs.replace(group, block_tokens=16, page_tokens=16, blocks=2, planes=(plane,))
    return {0: PiecePlanner(Layout(32, (group,)))}


def test_whole_orders_are_summed_within_what_is_left_of_a_turn() -> None:
    reports: list[SpansSummed] = []
    memory = InBlocks()
    summer = Summer(0, memory, reports.append)
    summer.at_once_bytes = 0
    summer.turn_bytes = 40
    for name in "abc":
        summer.add(ask(name, Span(0, 0, 16, 0, 1), blocks=((0,),)), in_blocks_of_16())
    while summer.has_work:
        memory.taken.append(0)
        summer.work()
    assert memory.taken == [2, 1]
    assert [report.sums for report in reports] == [{0: ((0, 7),)}] * 3


def test_an_order_that_is_too_long_for_any_turn_is_summed_piece_by_piece() -> None:
    reports: list[SpansSummed] = []
    memory = InBlocks()
    summer = Summer(0, memory, reports.append)
    summer.at_once_bytes = 0
    summer.turn_bytes = 15
    summer.add(ask("k", Span(0, 0, 16, 0, 1), blocks=((0,),)), in_blocks_of_16())
    summer.work()
    assert not summer.has_work
    assert (memory.taken, memory.summed) == ([], [1])
    assert [report.sums for report in reports] == [{0: ((0, 1),)}]


def test_spans_of_one_order_are_reported_when_they_are_summed_each_once() -> None:
    reports: list[SpansSummed] = []
    memory = Slow()
    summer = Summer(0, memory, reports.append)
    summer.turn_bytes = 3
    spans = (Span(0, 0, 2, 0, 1), Span(1, 2, 4, 0, 1), Span(2, 0, 4, 1, 2))
    summer.add(ask("k", *spans), ONE_LEG)
    while summer.has_work:
        summer.work()
    assert [list(report.sums) for report in reports] == [[0], [1], [2]]
    assert memory.summed == [3, 3, 2]
    assert [sums for report in reports for sums in report.sums.values()] == [((0, 2),), ((0, 2),), ((0, 4),)]


def test_a_rank_without_a_leg_has_nothing_to_sum_and_reports_that() -> None:
    reports: list[SpansSummed] = []
    summer = Summer(0, Slow(), reports.append)
    summer.add(ask("k", WHOLE, Span(1, 0, 4, 1, 2)), {})
    summer.work()
    assert [report.sums for report in reports] == [{0: (), 1: ()}]
    assert not summer.has_work


def test_several_legs_are_summed_in_turns_span_by_span() -> None:
    reports: list[SpansSummed] = []
    whole = PiecePlanner(LAYOUT)
    summer = Summer(0, RegionMemory(MEMORY.data), reports.append)
    summer.turn_bytes = 5
    spans = (Span(0, 0, 4, 0, 1), Span(1, 0, 4, 1, 2))
    summer.add(ask("k", *spans), {3: whole, 5: whole})
    while summer.has_work:
        summer.work()
    sums = [zlib.crc32(bytes([first + each for each in (3, 9, 4, 1)])) for first in (0, BLOCKS)]
    found = {span: legs for report in reports for span, legs in report.sums.items()}
    assert found == {number: ((3, value), (5, value)) for number, value in enumerate(sums)}


def test_what_is_dropped_is_neither_summed_nor_reported() -> None:
    reports: list[SpansSummed] = []
    memory = Slow()
    summer = Summer(0, memory, reports.append)
    summer.add(ask("k", WHOLE), ONE_LEG)
    summer.add(ask("k", WHOLE, side=Side.TARGET), ONE_LEG)
    summer.drop(Side.SOURCE, key_of("k"))
    summer.drop(Side.SOURCE, key_of("unknown"))
    summer.work()
    assert [report.side for report in reports] == [Side.TARGET]
    assert not summer.has_work


def test_what_cannot_be_summed_is_reported_at_once() -> None:
    reports: list[SpansSummed] = []
    without, slow = Summer(0, None, reports.append), Summer(0, Slow(), reports.append)
    without.add(ask("k", WHOLE), ONE_LEG)
    slow.add(ask("k", Span(4, 0, 5, 0, 1)), ONE_LEG)
    assert not without.has_work
    assert not slow.has_work
    assert [(report.sums, report.error[:9]) for report in reports] == [({}, "checksum:"), ({}, "checksum:")]
    assert "no memory" in reports[0].error
    assert "4 blocks where 5 are needed" in reports[1].error


def test_what_is_written_into_a_region_is_read_there_and_nowhere_else() -> None:
    region = bytearray(range(32))
    memory = RegionMemory(memoryview(region))
    memory.write(8, b"record")
    assert memory.read(8, 6) == b"record"
    assert bytes(region) == bytes(range(8)) + b"record" + bytes(range(14, 32))
