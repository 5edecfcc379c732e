"""Sums of a rank's own memory: right, a bounded piece per turn, fair, and nothing left of what was dropped."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from agent_rig import key_of, layout_of_tokens

from kvbaton.agent.rank import RegionMemory, Summer
from kvbaton.agent.rank_orders import CopyId, SpanSummed, SumSpans
from kvbaton.core.checks import Pieces
from kvbaton.core.handoff import BlockLists, Integrity, Span
from kvbaton.core.layout import Axis, Layout
from kvbaton.core.timeline import Side

BLOCKS = 16
LAYOUT = layout_of_tokens(2, BLOCKS)
MEMORY = np.arange(2 * BLOCKS, dtype=np.uint8)
WHOLE = Span(0, 0, 4, 0, 2)


@dataclass
class Slow:
    """Memory that only counts how many pieces are summed of it at a time."""

    summed: list[int] = field(default_factory=list)

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
        copy=CopyId(key_of(name), 1, 1), side=side, blocks=blocks, spans=spans, cached_tokens=cached, integrity=Integrity.FULL
    )


def test_a_span_is_summed_over_its_blocks_in_order() -> None:
    reports: list[SpanSummed] = []
    summer = Summer(2, LAYOUT, RegionMemory(MEMORY.data), reports.append)
    summer.add(ask("k", WHOLE, Span(1, 0, 4, 1, 2), cached=2))
    assert reports == []
    summer.work()
    assert not summer.has_work
    copy = CopyId(key_of("k"), 1, 1)
    both = zlib.crc32(bytes([4, 1, BLOCKS + 4, BLOCKS + 1]))
    second = zlib.crc32(bytes([BLOCKS + 4, BLOCKS + 1]))
    assert reports == [SpanSummed(copy, Side.SOURCE, 2, 0, ((2, both),)), SpanSummed(copy, Side.SOURCE, 2, 1, ((2, second),))]


def test_a_turn_is_bounded_and_long_spans_go_on_where_they_stopped() -> None:
    rows, mib = 64, 1 << 20
    (group,) = layout_of_tokens(1, rows).groups
    names = ("block_stride", "token_stride", "head_stride")
    plane = msgspec.structs.replace(group.planes[0], channels=(Axis(mib, 1),), **dict.fromkeys(names, mib))
    wide = msgspec.structs.replace(group, planes=(plane,))
    reports: list[SpanSummed] = []
    memory = Slow()
    summer = Summer(0, Layout(rows * mib, (wide,)), memory, reports.append)
    blocks = (tuple(range(rows)),)
    summer.add(ask("long", Span(0, 0, 20, 0, 1), blocks=blocks))
    summer.add(ask("short", Span(0, 0, 1, 0, 1), blocks=blocks))
    turns = 0
    while summer.has_work:
        summer.work()
        turns += 1
        if turns == 2:
            assert [report.copy.key for report in reports] == [key_of("short")], "a long one does not hold up a short one"
    assert turns >= 10
    assert max(memory.summed) == 2
    assert sorted(report.sums for report in reports) == [((0, 1),), ((0, 20),)]


def test_what_is_dropped_is_neither_summed_nor_reported() -> None:
    reports: list[SpanSummed] = []
    memory = Slow()
    summer = Summer(0, LAYOUT, memory, reports.append)
    summer.add(ask("k", WHOLE))
    summer.add(ask("k", WHOLE, side=Side.TARGET))
    summer.drop(Side.SOURCE, key_of("k"))
    summer.drop(Side.SOURCE, key_of("unknown"))
    summer.work()
    assert [report.side for report in reports] == [Side.TARGET]
    assert not summer.has_work


def test_what_cannot_be_summed_is_reported_at_once() -> None:
    reports: list[SpanSummed] = []
    Summer(0, LAYOUT, None, reports.append).add(ask("k", WHOLE))
    Summer(0, LAYOUT, Slow(), reports.append).add(ask("k", Span(4, 0, 5, 0, 1)))
    assert [(report.span, report.error[:9]) for report in reports] == [(0, "checksum:"), (4, "checksum:")]
    assert "no memory" in reports[0].error
    assert "4 blocks where 5 are needed" in reports[1].error
