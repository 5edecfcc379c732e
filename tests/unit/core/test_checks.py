"""Checksums: the same content gives the same sum however it is laid out, and what is covered is what should be."""

from __future__ import annotations

import zlib
from itertools import pairwise, permutations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from caches import compact_group, element_offset, layout_of, plan_pieces, reshaped
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.core.checks import ONE_IN, PIECE_TOKENS, PiecePlanner, sums_problem
from kvbaton.core.handoff import HandoffKey, Integrity, Span, TransferId
from kvbaton.core.layout import Group, Layout
from kvbaton.errors import RangeError

KEY = HandoffKey(TransferId("tx"))
LAYERS, PLANES, HEADS, HEAD_BYTES = 3, 2, 2, 4
ORDERS = [order for order in permutations(range(5)) if order.index(3) > order.index(2)]

Content = npt.NDArray[np.uint8]
"""(layer, plane, token, head, byte)"""


def content(tokens: int, seed: int = 1) -> Content:
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, PLANES, tokens, HEADS, HEAD_BYTES), np.uint8)


def shape(order: tuple[int, ...], blocks: int, block_tokens: int) -> Group:
    """A group whose axes (layer, plane, block, token, head) lie in this order, the last one innermost."""
    counts = (LAYERS, PLANES, blocks, block_tokens, HEADS)
    strides, step = [0] * 5, HEAD_BYTES
    for axis in reversed(order):
        strides[axis], step = step, step * counts[axis]
    names = ("block_stride", "token_stride", "head_stride")
    group = reshaped(
        compact_group(LAYERS, PLANES, blocks, block_tokens, HEADS, HEAD_BYTES // 2),
        **dict(zip(names, strides[2:], strict=True)),
    )
    offsets = [tuple(layer * strides[0] + plane * strides[1] for layer in range(LAYERS)) for plane in range(PLANES)]
    planes = [msgspec.structs.replace(plane, layer_offsets=at) for plane, at in zip(group.planes, offsets, strict=True)]
    return msgspec.structs.replace(group, planes=tuple(planes))


def placed(layout: Layout, ids: list[int], what: Content) -> bytearray:
    """A region with this content in these blocks, and something else everywhere else."""
    region = bytearray(b"\xa5" * layout.region_bytes)
    (group,) = layout.groups
    for layer, plane, token, head in np.ndindex(*what.shape[:4]):
        at = element_offset(group, plane, layer, ids[token // group.block_tokens], token % group.block_tokens, head, 0)
        region[at : at + HEAD_BYTES] = what[layer, plane, token, head].tobytes()
    return region


def crc(layout: Layout, ids: list[int], region: bytes, span: Span, cached: int, integrity: Integrity) -> int:
    value = 0
    for offset, size in plan_pieces(layout, (tuple(ids),), KEY, span, cached, integrity).tolist():
        value = zlib.crc32(region[offset : offset + size], value)
    return value


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    tokens=st.integers(1, 70),
    integrity=st.sampled_from([Integrity.SAMPLED, Integrity.FULL]),
    orders=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_two_layouts_of_the_same_content_have_the_same_sum(
    data: st.DataObject, tokens: int, integrity: Integrity, orders: tuple[tuple[int, ...], ...], sizes: tuple[int, int]
) -> None:
    first, end = sorted(data.draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    layers = sorted(data.draw(st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS))))
    span, cached = Span(3, first, end, *layers), data.draw(st.integers(0, tokens))
    what, sums = content(tokens), set()
    for order, size in zip(orders, sizes, strict=True):
        needed = -(-tokens // size)
        layout = layout_of(shape(order, needed + 2, size))
        ids = data.draw(st.permutations(range(needed + 2)))[:needed]
        sums.add(crc(layout, ids, bytes(placed(layout, ids, what)), span, cached, integrity))
    assert len(sums) == 1


def test_a_full_sum_is_that_of_all_bytes_in_order() -> None:
    what = content(20)
    layout = layout_of(shape((0, 1, 2, 3, 4), 9, 4))
    ids = [8, 1, 5, 0, 3]
    value = crc(layout, ids, bytes(placed(layout, ids, what)), Span(0, 2, 18, 1, 3), 5, Integrity.FULL)
    assert value == zlib.crc32(what[1:3, :, 5:18].tobytes())


def covered(layout: Layout, blocks: tuple[int, ...], span: Span, cached: int, integrity: Integrity) -> int:
    return int(plan_pieces(layout, (blocks,), KEY, span, cached, integrity)[:, 1].sum())


TOKEN_BYTES = HEADS * HEAD_BYTES


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 200, 1000])
def test_a_sample_is_one_in_sixteen_pieces_and_at_least_one_per_layer_and_plane(tokens: int) -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 100, 16))
    blocks = tuple(range(63))
    seen = covered(layout, blocks, Span(0, 0, tokens, 0, LAYERS), 0, Integrity.SAMPLED)
    pieces = -(-tokens // PIECE_TOKENS)
    low, high = max(1, pieces // ONE_IN), -(-pieces // ONE_IN)
    planes = LAYERS * PLANES * TOKEN_BYTES
    assert planes * min(tokens, 1) <= seen <= planes * high * min(tokens, PIECE_TOKENS)
    assert seen >= planes * (low - 1) * PIECE_TOKENS
    for layer in range(LAYERS):
        assert covered(layout, blocks, Span(0, 0, tokens, layer, layer + 1), 0, Integrity.SAMPLED) > 0


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    order=st.sampled_from(ORDERS),
    size=st.sampled_from([8, PIECE_TOKENS, 24, 32]),
    integrity=st.sampled_from([Integrity.SAMPLED, Integrity.FULL]),
    tokens=st.integers(1, 400),
)
def test_layers_that_are_planned_together_have_the_pieces_of_each(
    data: st.DataObject, order: tuple[int, ...], size: int, integrity: Integrity, tokens: int
) -> None:
    count = -(-tokens // size)
    layout = layout_of(shape(order, count + 3, size))
    ids = data.draw(st.permutations(range(count + 3)))[:count]
    first, cached = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, tokens))
    cuts = data.draw(st.sampled_from([(0, 1, 2, 3), (0, 3), (1, 3), (0, 2, 3)]))
    spans = [Span(7 + index, first, tokens, *layers) for index, layers in enumerate(pairwise(cuts))]
    planner, blocks = PiecePlanner(layout), (tuple(ids),)
    row = planner.plan_row(blocks, KEY, spans, cached, integrity, tokens)
    each = [plan_pieces(layout, blocks, KEY, span, cached, integrity, tokens) for span in spans]
    # Where it is not taken, spans are planned one by one: with blocks of 16 tokens that lie together, it always is.
    is_plain = size == PIECE_TOKENS and order.index(4) == 4 and order.index(3) == 3 and max(first, cached) < tokens
    assert row is not None or not is_plain
    if row is not None:
        assert row[0].tolist() == np.concatenate(each).tolist()
        assert row[1] == [len(pieces) for pieces in each]


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3), (0, 2, 3), (1, 3)])
@pytest.mark.parametrize("tokens", [16, 240, 256, 1024, 8192])
def test_a_sample_of_whole_blocks_is_the_same_however_many_there_are(tokens: int, cuts: tuple[int, ...]) -> None:
    """Few pieces are planned one by one, many at once; the other end may have another number of layers in a row."""
    count = tokens // PIECE_TOKENS
    layout, blocks = layout_of(shape((0, 1, 2, 3, 4), count + 3, PIECE_TOKENS)), (tuple(range(count + 2, 2, -1)),)
    spans = [Span(index, 0, tokens, *layers) for index, layers in enumerate(pairwise(cuts))]
    row = PiecePlanner(layout).plan_row(blocks, KEY, spans, 0, Integrity.SAMPLED, tokens)
    each = [plan_pieces(layout, blocks, KEY, span, 0, Integrity.SAMPLED, tokens) for span in spans]
    assert row is not None
    assert row[0].tolist() == np.concatenate(each).tolist()
    assert row[1] == [len(pieces) for pieces in each]
    assert len(row[0]) < count * (cuts[-1] - cuts[0]) * PLANES or count == 1


@pytest.mark.parametrize("wrong", [(1, 1), (0, 9), (0, -1), (0,)])
def test_layers_that_are_planned_together_refuse_the_same_blocks(wrong: tuple[int, ...]) -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 4, PIECE_TOKENS))
    spans = [Span(layer, 0, 2 * PIECE_TOKENS, layer, layer + 1) for layer in range(LAYERS)]
    planner = PiecePlanner(layout)
    assert planner.plan_row(((2, 0),), KEY, spans, 0, Integrity.FULL) is not None
    with pytest.raises(RangeError):
        planner.plan_row((wrong,), KEY, spans, 0, Integrity.FULL)
    with pytest.raises(RangeError):
        planner.plan((wrong,), KEY, spans[0], 0, Integrity.FULL)
    for layers in ([(0, 1 << 40)], [(0, 2), (2, 1), (1, 3)], [(2, 0), (0, 3)]):
        odd = [Span(number, 0, 32, *each) for number, each in enumerate(layers)]
        assert planner.plan_row(((2, 0),), KEY, odd, 0, Integrity.SAMPLED) is None


def test_which_pieces_are_sampled_depends_on_key_span_and_layer() -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 100, 16))
    blocks = (tuple(range(100)),)
    chosen = {
        (key, number, layer): tuple(
            (
                plan_pieces(
                    layout, blocks, HandoffKey(TransferId(key)), Span(number, 0, 256, layer, layer + 1), 0, Integrity.SAMPLED
                )
            )[:, 0].tolist()
        )
        for key in ("a", "b", "c")
        for number in range(3)
        for layer in range(LAYERS)
    }
    within = {offsets[0] % (16 * TOKEN_BYTES * 100) for offsets in chosen.values()}
    assert len(within) > 3


def test_control_a_byte_that_is_covered_changes_the_sum_and_one_beside_it_does_not() -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 4, 4))
    ids, what = [2, 0], content(8)
    region = placed(layout, ids, what)
    whole = Span(0, 0, 7, 0, LAYERS)
    before = crc(layout, ids, bytes(region), whole, 0, Integrity.FULL)
    for at in range(len(region)):
        changed = bytearray(region)
        changed[at] ^= 1
        pieces = plan_pieces(layout, (tuple(ids),), KEY, whole, 0, Integrity.FULL).tolist()
        is_covered = any(offset <= at < offset + size for offset, size in pieces)
        assert (crc(layout, ids, bytes(changed), whole, 0, Integrity.FULL) != before) is is_covered


def test_nothing_is_summed_that_is_cached_or_switched_off() -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 4, 4))
    assert covered(layout, (0, 1), Span(0, 0, 8, 0, LAYERS), 8, Integrity.FULL) == 0
    assert covered(layout, (0, 1), Span(0, 0, 8, 0, LAYERS), 0, Integrity.OFF) == 0
    assert covered(layout, (0, 1), Span(0, 0, 8, 7, 9), 0, Integrity.FULL) == 0


@pytest.mark.parametrize("integrity", [Integrity.SAMPLED, Integrity.FULL])
@pytest.mark.parametrize(
    ("blocks", "end"), [(((0,),), 8), (((0, 4),), 8), (((0, -1),), 8), ((), 8), (((0, 1),), 1 << 62), (((0, 1 << 63),), 8)]
)
def test_blocks_that_do_not_exist_are_refused(blocks: tuple[tuple[int, ...], ...], end: int, integrity: Integrity) -> None:
    layout = layout_of(shape((0, 1, 2, 3, 4), 4, 4))
    with pytest.raises(RangeError):
        plan_pieces(layout, blocks, KEY, Span(0, 0, end, 0, 1 << 62), 0, integrity)


def test_what_differs_is_named_with_both_values() -> None:
    spans = (Span(0, 0, 4, 0, 1), Span(1, 4, 9, 2, 3))
    ours = {(rank, span.number): 10 * rank + span.number for rank in range(2) for span in spans}
    assert sums_problem(spans, ours, dict(ours)) == ""
    wrong = sums_problem(spans, ours, {**ours, (1, 1): 0xABC})
    assert wrong.startswith("checksum of span 1 (tokens 4 to 9, layers 2 to 3) in leg 1 is 0000000b at the target and 00000abc")
    missing = {where: value for where, value in ours.items() if where != (0, 1)}
    assert "is missing at the target and 00000001 at the source" in sums_problem(spans, missing, ours)
    assert "missing at the source" in sums_problem(spans, ours, missing)


def test_windows_and_states_are_summed_as_they_are_moved() -> None:
    window = msgspec.structs.replace(compact_group(layers=1, planes=1, heads=1), window=5)
    state = msgspec.structs.replace(compact_group(layers=1, planes=1, heads=1, block_tokens=1), block_tokens=0, page_tokens=0)
    layout = layout_of(window, state)
    blocks = ((0, 1, 2), (3,))

    def sizes(first: int, end: int) -> int:
        span = Span(0, first, end, 0, 1)
        return int(plan_pieces(layout, blocks, KEY, span, 0, Integrity.FULL, 12)[:, 1].sum())

    token = window.token_bytes
    assert [sizes(0, 6), sizes(6, 11), sizes(11, 12)] == [0, 4 * token, token + state.token_bytes]
