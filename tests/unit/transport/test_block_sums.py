"""Sums of blocks in short form: the loop in C gives what the planned pieces give, or leaves it to them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transport_sums import HERE, OneWay

from kvbaton.agent.rank import RegionMemory, Summer
from kvbaton.agent.rank_orders import CopyId, SpansSummed, SumSpans
from kvbaton.core.checks import ONE_IN, PIECE_TOKENS, BlockSums, PiecePlanner
from kvbaton.core.handoff import HandoffKey, Incarnation, Integrity, Span, TransferId
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import LayerTensor, split_layers, tensor_group
from kvbaton.core.timeline import Side
from kvbaton.transport.runs import Loops, RegionSummer

Region = npt.NDArray[np.uint8]
KEY, PEER = HandoffKey(TransferId("tx")), Incarnation("peer")
LAYERS, PLANES, BLOCKS, TOKEN_BYTES = 3, 2, 70, 12
PIECE_BYTES = PIECE_TOKENS * TOKEN_BYTES
CACHE: npt.NDArray[np.uint8] = np.random.default_rng(5).integers(
    0, 256, (LAYERS, PLANES, BLOCKS, PIECE_TOKENS, TOKEN_BYTES), np.uint8
)
BOTH = [Integrity.SAMPLED, Integrity.FULL]
COMPILED = pytest.mark.parametrize("loops", HERE, ids=lambda loops: loops.name)


def layout() -> Layout:
    layers = split_layers(LayerTensor(0, CACHE.shape, CACHE.strides, "uint8", 1))
    axes, heads = ("plane", "block", "token", "head*channel"), (HeadRange(0, 1),)
    group = tensor_group("full", range(LAYERS), layers, axes, heads=heads, total_heads=1, sizes={"channel": TOKEN_BYTES})
    return Layout(region_bytes=CACHE.nbytes, groups=(group,))


PLANNER = PiecePlanner(layout())


def short(ids: Sequence[int], spans: Sequence[Span], integrity: Integrity = Integrity.FULL, cached: int = 0) -> BlockSums:
    blocks = PLANNER.block_sums((tuple(ids),), KEY, tuple(spans), cached, integrity)
    assert blocks is not None
    return blocks


def sum_blocks(
    loops: OneWay, blocks: BlockSums, most_bytes: int = 8 << 20, region: Region = CACHE
) -> tuple[list[int], int] | None:
    return RegionSummer(region.data.cast("B"), cast(Loops, loops)).sum_blocks(blocks, most_bytes)


def planned(ids: Sequence[int], spans: Sequence[Span], integrity: Integrity, cached: int = 0) -> tuple[list[int], int]:
    """By zlib, over the pieces that are planned one by one."""
    flat, sums, total = CACHE.reshape(-1), [], 0
    for span in spans:
        parts = PLANNER.plan((tuple(ids),), KEY, span, cached, integrity, BLOCKS * PIECE_TOKENS)
        pieces = [piece for part in parts for piece in part.tolist()]
        sums.append(zlib.crc32(b"".join(flat[offset : offset + size].tobytes() for offset, size in pieces)))
        total += sum(size for _, size in pieces)
    return sums, total


@COMPILED
@settings(max_examples=150, deadline=None)
@given(data=st.data(), integrity=st.sampled_from(BOTH), numbers=st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_spans_of_blocks_have_the_sums_of_their_pieces(
    loops: OneWay, data: st.DataObject, integrity: Integrity, numbers: list[int]
) -> None:
    ids = data.draw(st.permutations(range(BLOCKS)))[: data.draw(st.integers(1, BLOCKS))]
    tokens = len(ids) * PIECE_TOKENS
    cached = data.draw(st.one_of(st.just(0), st.integers(0, tokens - 1)))
    spans = []
    for number in numbers:
        first = data.draw(st.integers(0, tokens - 1))
        end = data.draw(st.one_of(st.just(tokens), st.integers(max(first, cached) + 1, tokens)))
        layers = sorted(data.draw(st.lists(st.integers(0, LAYERS), min_size=2, max_size=2, unique=True)))
        spans.append(Span(number, first, end, *layers))
    assert sum_blocks(loops, short(ids, spans, integrity, cached)) == planned(ids, spans, integrity, cached)


@COMPILED
@pytest.mark.parametrize("count", range(1, 2 * ONE_IN + 2))
def test_a_sample_is_the_same_for_every_number_of_blocks(loops: OneWay, count: int) -> None:
    spans = [Span(number, 0, count * PIECE_TOKENS, 0, LAYERS) for number in range(40)]
    assert sum_blocks(loops, short(range(count), spans, Integrity.SAMPLED)) == planned(range(count), spans, Integrity.SAMPLED)


@COMPILED
@pytest.mark.parametrize("first", range(PIECE_TOKENS + 1))
def test_spans_that_are_cut_within_blocks_anywhere(loops: OneWay, first: int) -> None:
    spans = [Span(number, first, end, 0, LAYERS) for number, end in enumerate(range(first + 1, 3 * PIECE_TOKENS + 1))]
    for integrity in BOTH:
        assert sum_blocks(loops, short((9, 2, 5), spans, integrity)) == planned((9, 2, 5), spans, integrity)


@COMPILED
def test_control_every_byte_that_changes_shows_in_the_sum_of_its_span_alone(loops: OneWay) -> None:
    ids, tokens = (4, 0, 69), 2 * PIECE_TOKENS
    spans = (Span(0, 0, tokens, 0, 2), Span(1, 0, tokens, 2, 3), Span(2, tokens, tokens + PIECE_TOKENS, 1, 3))
    covers = [(range(2), ids[:2]), (range(2, 3), ids[:2]), (range(1, 3), ids[2:])]
    blocks, changed = short(ids, spans), CACHE.copy()
    taken = sum_blocks(loops, blocks)
    assert taken is not None
    for place in np.ndindex(LAYERS, PLANES, *(1,) * 3):
        for block in (4, 0, 69, 5):
            for token, byte in [(0, 0), (7, 5), (PIECE_TOKENS - 1, TOKEN_BYTES - 1)]:
                at = (*place[:2], block, token, byte)
                changed[at] ^= 1
                found = sum_blocks(loops, blocks, region=changed)
                changed[at] ^= 1
                assert found is not None
                differs = [here != there for here, there in zip(found[0], taken[0], strict=True)]
                assert differs == [place[0] in layers and block in some for layers, some in covers]


@COMPILED
def test_more_than_is_summed_with_the_interpreters_lock(loops: OneWay) -> None:
    spans = [Span(number, 0, BLOCKS * PIECE_TOKENS, 0, LAYERS) for number in range(4)]
    expected = planned(range(BLOCKS), spans, Integrity.FULL)
    assert expected[1] > 256 << 10
    assert sum_blocks(loops, short(range(BLOCKS), spans)) == expected


@COMPILED
def test_no_more_is_summed_than_may_be(loops: OneWay) -> None:
    spans = [Span(0, 0, 5 * PIECE_TOKENS, 0, 2), Span(1, 0, 3 * PIECE_TOKENS, 0, 1)]
    blocks, total = short(range(5), spans), (5 * 2 + 3) * PLANES * PIECE_BYTES
    taken = sum_blocks(loops, blocks, total)
    assert taken is not None
    assert taken[1] == total
    assert sum_blocks(loops, blocks, total - 1) is None
    assert sum_blocks(loops, blocks, 0) is None


@COMPILED
@pytest.mark.parametrize(
    ("ids", "span", "cached"),
    [
        ((1, 2, 1), Span(0, 0, 48, 0, 1), 0),
        ((1, 2, BLOCKS), Span(0, 0, 48, 0, 1), 0),
        ((1, 2, -1), Span(0, 0, 48, 0, 1), 0),
        ((1, 2, 1 << 62), Span(0, 0, 48, 0, 1), 0),
        ((1, 2, (1 << 64) + 3), Span(0, 0, 48, 0, 1), 0),
        ((1, 2), Span(0, 0, 48, 0, 1), 0),
        ((), Span(0, 0, 16, 0, 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 0, 1), 48),
        ((1, 2, 3), Span(0, 32, 16, 0, 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 1, 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 2, 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 0, LAYERS + 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 0, 1 << 62), 0),
        ((1, 2, 3), Span(0, 0, 1 << 62, 0, 1), 0),
        ((1, 2, 3), Span(0, 0, 48, 1 << 62, 1 << 62), 0),
    ],
)
@pytest.mark.parametrize("integrity", BOTH)
def test_what_is_wrong_is_left_to_those_who_name_it(
    loops: OneWay, ids: tuple[int, ...], span: Span, cached: int, integrity: Integrity
) -> None:
    whole = Span(1, 0, PIECE_TOKENS, 0, 1)
    assert sum_blocks(loops, short(ids, (span,), integrity, cached)) is None
    assert sum_blocks(loops, short(ids, (whole, span), integrity, cached)) is None


@COMPILED
def test_a_grid_that_leaves_the_region_is_not_summed(loops: OneWay) -> None:
    blocks = short((0,), (Span(0, 0, PIECE_TOKENS, 0, 1),))
    assert sum_blocks(loops, blocks) is not None
    assert sum_blocks(loops, blocks, region=CACHE.reshape(-1)[:-1]) is None


def test_without_the_loop_pieces_are_planned() -> None:
    blocks = short((0,), (Span(0, 0, PIECE_TOKENS, 0, 1),))
    assert RegionSummer(CACHE.data.cast("B"), None).sum_blocks(blocks, 8 << 20) is None


class _Planned(RegionMemory):
    """Memory that leaves everything to those who plan pieces."""

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> None:
        del blocks, most_bytes


@pytest.mark.parametrize("turn_bytes", [8 << 20, 5 * PIECE_BYTES])
@pytest.mark.parametrize("tokens", [640, 631])
@pytest.mark.parametrize("integrity", BOTH)
def test_a_rank_reports_the_same_sums_in_either_way(integrity: Integrity, tokens: int, turn_bytes: int) -> None:
    spans = tuple(
        Span(number, first, end, layer, layer + 1)
        for number, (first, end, layer) in enumerate(
            (first, end, at) for first, end in ((0, 320), (320, tokens)) for at in range(LAYERS)
        )
    )
    order = SumSpans(
        copy=CopyId(KEY, 1, 1),
        side=Side.SOURCE,
        blocks=(tuple(range(BLOCKS - 1, -1, -1)),),
        spans=spans,
        cached_tokens=0,
        integrity=integrity,
        peer=PEER,
        total_tokens=tokens,
    )
    found: list[dict[int, tuple[tuple[int, int], ...]]] = []
    for memory in (RegionMemory(CACHE.data.cast("B")), _Planned(CACHE.data.cast("B"))):
        reports: list[SpansSummed] = []
        summer = Summer(0, memory, reports.append)
        summer.turn_bytes = turn_bytes
        summer.add(order, {0: PLANNER})
        while summer.has_work:
            summer.work()
        found.append({span: sums for report in reports for span, sums in report.sums.items()})
        assert sorted(found[-1]) == [span.number for span in spans]
    assert found[0] == found[1]


def test_blocks_that_do_not_exist_are_named_whoever_finds_them() -> None:
    reports: list[SpansSummed] = []
    summer = Summer(0, RegionMemory(CACHE.data.cast("B")), reports.append)
    span = Span(0, 0, 2 * PIECE_TOKENS, 0, 1)
    copy = CopyId(KEY, 1, 1)
    full = Integrity.FULL
    order = SumSpans(
        copy=copy, side=Side.SOURCE, blocks=((3, BLOCKS),), spans=(span,), cached_tokens=0, integrity=full, peer=PEER
    )
    summer.add(order, {0: PLANNER})
    while summer.has_work:
        summer.work()
    (report,) = reports
    assert report.sums == {}
    assert report.error.startswith("checksum: own block")


class _Broken(RegionMemory):
    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> None:
        raise MemoryError(f"{len(blocks.ids)} blocks, {most_bytes} bytes")


def test_a_sum_that_breaks_is_reported_and_not_tried_for_ever() -> None:
    reports: list[SpansSummed] = []
    summer = Summer(0, _Broken(CACHE.data.cast("B")), reports.append)
    span, copy, full = Span(0, 0, 2 * PIECE_TOKENS, 0, 1), CopyId(KEY, 1, 1), Integrity.FULL
    order = SumSpans(copy=copy, side=Side.SOURCE, blocks=((3, 4),), spans=(span,), cached_tokens=0, integrity=full, peer=PEER)
    with pytest.raises(MemoryError):
        summer.add(order, {0: PLANNER})
    assert [report.error for report in reports] == ["checksum: MemoryError: 2 blocks, 262144 bytes"]
    summer.work()
    assert len(reports) == 1
    assert not summer.has_work
