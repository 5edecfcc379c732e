"""Layouts: sizes, contiguity, bounds, and what `problem` refuses."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from caches import compact_group, element_offset, reshaped
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.layout import CHUNKED, SLIDING_PAGES, Axis, Group, HeadRange, Layout, TokenSplit

dimensions = st.integers(1, 3)
groups = st.builds(compact_group, dimensions, dimensions, dimensions, dimensions, dimensions, dimensions)


@given(groups)
def test_a_compact_group_fills_its_bytes_exactly_once(group: Group) -> None:
    plane = group.planes[0]
    axes = (len(group.planes), len(group.layers), group.blocks, group.block_tokens, plane.head_count, plane.head_size)
    starts = [element_offset(group, *at) for at in product(*map(range, axes))]
    taken = sorted(start + byte for start in starts for byte in range(plane.element_bytes))
    assert taken == list(range(group.end))
    assert group.problem(group.end) == ""


def test_sizes() -> None:
    group = compact_group(heads=3, head_size=5)
    assert group.planes[0].head_bytes == 10
    assert group.planes[0].token_bytes == 30
    assert group.token_bytes == 60


def test_channel_contiguity() -> None:
    (plane, _) = compact_group(heads=2).planes
    assert plane.is_channel_contiguous
    assert not msgspec.structs.replace(plane, channels=(Axis(3, 4),)).is_channel_contiguous


def test_bounds() -> None:
    group = compact_group()
    assert group.problem(group.end) == ""
    assert group.problem(group.end - 1) == f"bytes up to {group.end} of {group.end - 1}"
    assert "layer_offsets from -1" in reshaped(group, layer_offsets=(-1, 0)).problem(2 * group.end)


PROBLEMS: dict[str, tuple[Group, str]] = {
    "blocks": (msgspec.structs.replace(compact_group(), blocks=-1), "-1 blocks"),
    "pages": (msgspec.structs.replace(compact_group(), page_tokens=3), "pages of 3 tokens in blocks of 4"),
    "split": (msgspec.structs.replace(compact_group(), tokens=TokenSplit(2, 2)), "token split 2 of 2"),
    "turns": (msgspec.structs.replace(compact_group(), tokens=TokenSplit(0, 2, 1 << 62)), "token split 0 of 2 by 4611"),
    "layers": (msgspec.structs.replace(compact_group(), layers=(1, 1)), "a layer twice"),
    "layer below 0": (msgspec.structs.replace(compact_group(), layers=(-1, 0)), "layer -1"),
    "stride of one head": (reshaped(compact_group(heads=1), head_stride=1 << 63), "where 4611686018427387904 can be counted"),
    "channel of one": (reshaped(compact_group(), channels=(Axis(1, -(1 << 63)), Axis(3, 2))), "can be counted"),
    "no blocks": (
        reshaped(msgspec.structs.replace(compact_group(), blocks=0), layer_offsets=(0, 1 << 63)),
        "offsets and strides of 9223372036854775",
    ),
    "heads twice": (reshaped(compact_group(), heads=(HeadRange(0, 2), HeadRange(1, 1))), "head 1 twice"),
    "heads beyond": (reshaped(compact_group(), heads=(HeadRange(1, 2),)), "heads [(1, 3)] of 2"),
    "overlap": (reshaped(compact_group(), token_stride=11), "strides that overlap"),
    "empty heads": (reshaped(compact_group(), channels=(Axis(0, 2),)), "2 heads of 0 elements"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_description_that_makes_no_sense_says_why(name: str) -> None:
    group, words = PROBLEMS[name]
    assert words in Layout(10**6, (compact_group(), group)).problem()
    assert Layout(10**6, (compact_group(), group)).problem().startswith("group 1: ")


@pytest.mark.parametrize(
    ("tokens", "needed"), [((0, 8, 8), (3, 8)), ((4, 6, 8), (4, 6)), ((0, 2, 8), (2, 2)), ((0, 3, 3), (0, 3))]
)
def test_a_window_leaves_out_tokens_that_are_not_needed(tokens: tuple[int, int, int], needed: tuple[int, int]) -> None:
    assert msgspec.structs.replace(compact_group(), window=5).needed(*tokens) == needed


def test_blocks_that_are_moved_whole_are_needed_to_their_edges() -> None:
    group = msgspec.structs.replace(compact_group(), whole_blocks=True)
    assert group.needed(5, 7, 9) == (4, 8)
    assert msgspec.structs.replace(group, window=2).needed(0, 9, 9) == (4, 12)
    assert msgspec.structs.replace(group, tokens=TokenSplit(0, 2, 1)).needed(5, 7, 9) == (0, 8)


@pytest.mark.parametrize(
    ("tokens", "needed"),
    [((0, 9, 9), (4, 9)), ((0, 8, 8), (4, 8)), ((0, 4, 9), (4, 4)), ((8, 9, 9), (8, 9)), ((0, 3, 3), (0, 3))],
)
def test_a_window_of_whole_pages_begins_with_a_page(tokens: tuple[int, int, int], needed: tuple[int, int]) -> None:
    group = msgspec.structs.replace(compact_group(), kind=SLIDING_PAGES, window=3)
    assert group.needed(*tokens) == needed


@pytest.mark.parametrize(
    ("tokens", "needed"),
    [
        ((0, 9, 9), (4, 9)),  # the chunk of the next token begins at 6, the block at 4
        ((0, 12, 12), (12, 12)),  # the next token begins a chunk
        ((0, 4, 9), (4, 4)),
        ((0, 5, 5), (0, 5)),
        ((0, 14, 14), (12, 14)),
    ],
)
def test_of_chunks_only_that_of_the_next_token_is_needed(tokens: tuple[int, int, int], needed: tuple[int, int]) -> None:
    group = msgspec.structs.replace(compact_group(), kind=CHUNKED, window=6)
    assert group.needed(*tokens) == needed
