"""Plans against a slow oracle that goes byte by byte through the strides; joining; and what is refused, with both values."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from caches import Case, cases, compact_group, layout_of
from hypothesis import assume, given, settings

from kvbaton.core.layout import Group, Layout
from kvbaton.core.plan import Runs, pair_layouts, plan_runs
from kvbaton.errors import Incompatible, RangeError


def _plan(case: Case) -> Runs:
    pair = pair_layouts(case.source, case.target)
    return plan_runs(pair, case.source_blocks, case.target_blocks, case.first_token, case.tokens)


def _copied(runs: Runs) -> dict[int, int]:
    copied: dict[int, int] = {}
    for source_at, target_at, count in runs.tolist():
        assert count > 0
        for byte in range(count):
            assert target_at + byte not in copied, "a target byte is written twice"
            copied[target_at + byte] = source_at + byte
    return copied


def _fewest_runs(group: Group, source_blocks: tuple[int, ...], target_blocks: tuple[int, ...], case: Case) -> int:
    """Runs per layer and plane when blocks that are neighbours on both sides, without a gap, are joined."""
    first, last = case.first_token // group.block_tokens, -(-case.tokens // group.block_tokens)
    if case.first_token >= case.tokens:
        return 0
    joints = sum(
        source_blocks[slot] == source_blocks[slot - 1] + 1 and target_blocks[slot] == target_blocks[slot - 1] + 1
        for slot in range(first + 1, last)
    )
    return last - first - joints


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_byte_comes_from_the_right_place_exactly_once_and_no_other_is_touched(case: Case) -> None:
    assert _copied(_plan(case)) == case.copies()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_runs_stay_within_both_regions(case: Case) -> None:
    runs = _plan(case)
    assert runs.dtype == np.uint64
    assert runs.shape == (len(runs), 3)
    if len(runs):
        assert int((runs[:, 0] + runs[:, 2]).max()) <= case.source.region_bytes
        assert int((runs[:, 1] + runs[:, 2]).max()) <= case.target.region_bytes


@settings(max_examples=100, deadline=None)
@given(cases())
def test_neighbours_are_joined(case: Case) -> None:
    fewest = 0
    for index, (source, target) in enumerate(zip(case.source.groups, case.target.groups, strict=True)):
        assume(source.is_token_contiguous and target.is_token_contiguous)
        full = source.block_tokens * source.token_bytes
        is_dense = source.block_stride == full and target.block_stride == full
        per_plane = _fewest_runs(source, case.source_blocks[index], case.target_blocks[index], case)
        if not is_dense:
            per_plane = -(-case.tokens // source.block_tokens) - case.first_token // source.block_tokens
            per_plane = per_plane if case.first_token < case.tokens else 0
        fewest += per_plane * len(source.layers) * source.planes
    assert len(_plan(case)) == fewest


def _heads_outside_tokens() -> Layout:
    group = compact_group(layers=1, planes=1, blocks=8, block_tokens=4, heads=3, head_size=2)
    return layout_of(msgspec.structs.replace(group, token_stride=4, head_stride=16))


def test_where_heads_lie_apart_whole_blocks_are_one_run_and_parts_one_per_head() -> None:
    layout = _heads_outside_tokens()
    pair = pair_layouts(layout, layout)
    assert plan_runs(pair, ((2, 3, 5),), ((0, 1, 7),), 0, 12).tolist() == [[96, 0, 96], [240, 336, 48]]
    assert plan_runs(pair, ((2,),), ((0,),), 1, 3).tolist() == [[100, 4, 8], [116, 20, 8], [132, 36, 8]]


def test_where_only_one_side_has_heads_apart_every_head_of_every_token_is_a_run() -> None:
    apart = _heads_outside_tokens()
    packed = layout_of(compact_group(layers=1, planes=1, blocks=8, block_tokens=4, heads=3, head_size=2))
    runs = plan_runs(pair_layouts(apart, packed), ((2,),), ((0,),), 0, 2)
    assert runs.tolist() == [[96, 0, 4], [112, 4, 4], [128, 8, 4], [100, 12, 4], [116, 16, 4], [132, 20, 4]]


def test_blocks_that_only_their_engine_understands_are_moved_whole() -> None:
    layout = layout_of(msgspec.structs.replace(compact_group(layers=1, planes=1), whole_blocks=True))
    runs = plan_runs(pair_layouts(layout, layout), ((5, 3),), ((0, 2),), 3, 5)
    assert runs.tolist() == [[240, 0, 48], [144, 96, 48]]


def test_consecutive_blocks_are_one_run_per_layer_and_plane() -> None:
    layout = layout_of(compact_group(layers=3, planes=2, blocks=64))
    runs = plan_runs(pair_layouts(layout, layout), (tuple(range(5, 45)),), (tuple(range(20, 60)),), 2, 157)
    assert len(runs) == 3 * 2
    assert int(runs[:, 2].sum()) == 3 * 2 * 155 * layout.groups[0].token_bytes


def test_reversed_blocks_are_one_run_each() -> None:
    layout = layout_of(compact_group(layers=1, planes=1, blocks=8))
    backwards = tuple(reversed(range(8)))
    assert len(plan_runs(pair_layouts(layout, layout), (backwards,), (backwards,), 0, 32)) == 8


@pytest.mark.parametrize(("first_token", "tokens"), [(0, 0), (5, 5), (9, 5)])
def test_nothing_to_copy_is_no_run(first_token: int, tokens: int) -> None:
    layout = layout_of(compact_group())
    assert plan_runs(pair_layouts(layout, layout), ((),), ((),), first_token, tokens).shape == (0, 3)


def test_a_layout_without_groups_is_no_run() -> None:
    layout = layout_of()
    assert plan_runs(pair_layouts(layout, layout), (), (), 0, 10).shape == (0, 3)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_block_that_is_listed_twice_is_refused_by_number(side: str) -> None:
    layout = layout_of(compact_group(blocks=8))
    lists = {"source": (0, 1, 2), "target": (0, 1, 2), side: (5, 6, 5)}
    whole = 3 * layout.groups[0].block_tokens
    with pytest.raises(RangeError, match=f"{side} block 5 is listed twice"):
        plan_runs(pair_layouts(layout, layout), (lists["source"],), (lists["target"],), 0, whole)


@pytest.mark.parametrize("bad", [-1, 8, 9, 2**31, 2**63, 2**64 - 1, -(2**63) - 1])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_block_that_does_not_exist_is_refused_by_number(side: str, bad: int) -> None:
    layout = layout_of(compact_group(blocks=8))
    lists = {"source": (0, 1, 2), "target": (0, 1, 2), side: (0, bad, 2)}
    with pytest.raises(RangeError, match=rf"{side} block {bad} is outside 0\.\.7"):
        plan_runs(pair_layouts(layout, layout), (lists["source"],), (lists["target"],), 0, 12)


def test_only_the_blocks_that_are_needed_are_looked_at() -> None:
    """Blocks before the first token may be anything: the target has them cached and the source may not."""
    layout = layout_of(compact_group(blocks=8))
    runs = plan_runs(pair_layouts(layout, layout), ((99, 3, 99),), ((99, 5, 99),), 4, 8)
    assert len(runs) == 4


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_short_block_list_is_refused_with_both_numbers(side: str) -> None:
    layout = layout_of(compact_group())
    lists = {"source": (0, 1, 2), "target": (0, 1, 2), side: (0, 1)}
    with pytest.raises(RangeError, match=f"{side} block list has 2 blocks where 3 are needed"):
        plan_runs(pair_layouts(layout, layout), (lists["source"],), (lists["target"],), 0, 9)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("groups", [0, 2])
def test_block_lists_for_another_number_of_groups_are_refused(side: str, groups: int) -> None:
    layout = layout_of(compact_group())
    lists = {"source": ((0,),), "target": ((0,),), side: ((0,),) * groups}
    with pytest.raises(RangeError, match=f"{side} block lists are for {groups} groups where the layout has 1"):
        plan_runs(pair_layouts(layout, layout), lists["source"], lists["target"], 0, 1)


def test_absurd_token_numbers_are_refused() -> None:
    layout = layout_of(compact_group())
    pair = pair_layouts(layout, layout)
    with pytest.raises(RangeError, match="first_token is -1"):
        plan_runs(pair, ((0, 1),), ((0, 1),), -1, 4)
    with pytest.raises(RangeError, match="has 2 blocks where"):
        plan_runs(pair, ((0, 1),), ((0, 1),), 0, 2**64 - 1)


OTHER_VALUES = {
    "kind": "sliding",
    "layers": (0, 2),
    "planes": 1,
    "dtype": "bfloat16",
    "element_bytes": 4,
    "head_size": 5,
    "total_heads": 4,
    "head_start": 2,
    "heads": 1,
    "block_tokens": 16,
    "whole_blocks": True,
}


@pytest.mark.parametrize(("field", "value"), OTHER_VALUES.items())
def test_layouts_that_differ_are_refused_with_the_field_and_both_values(field: str, value: Any) -> None:
    ours = compact_group()
    theirs = msgspec.structs.replace(ours, **{field: value})
    with pytest.raises(Incompatible, match=f"layout group 0 {field}") as caught:
        pair_layouts(layout_of(theirs), layout_of(ours))
    assert (caught.value.ours, caught.value.theirs) == (getattr(ours, field), value)


def test_the_second_group_is_checked_too() -> None:
    ours = compact_group()
    theirs = msgspec.structs.replace(ours, kind="sliding")
    with pytest.raises(Incompatible, match="layout group 1 kind is 'full' here and 'sliding' there"):
        pair_layouts(layout_of(ours, theirs), layout_of(ours, ours))


def test_another_number_of_groups_is_refused_with_both() -> None:
    group = compact_group()
    with pytest.raises(Incompatible, match="layout groups is 1 here and 2 there"):
        pair_layouts(layout_of(group, group), layout_of(group))


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_places_than_of_layers_is_refused(count: int) -> None:
    group = compact_group()
    wrong = msgspec.structs.replace(group, layer_offsets=(0,) * count)
    for source, target in ((group, wrong), (wrong, group)):
        with pytest.raises(Incompatible, match=f"layer_offsets is .*{count} for 2 layers"):
            pair_layouts(Layout(10**6, (source,)), Layout(10**6, (target,)))


ESCAPES = {
    "layer_offsets": (0, 10**6),
    "plane_stride": 10**6,
    "block_stride": 2**63,
    "head_stride": 2**64 - 1,
}


@pytest.mark.parametrize(("field", "value"), [*ESCAPES.items(), ("layer_offsets", (-1, 0)), ("block_stride", -24)])
def test_a_layout_that_leaves_its_region_is_refused(field: str, value: object) -> None:
    """Strides come from a peer's card; what they reach is checked before any address is used."""
    group = compact_group(heads=1)
    size = layout_of(group).region_bytes
    wild = Layout(size, (msgspec.structs.replace(group, **{field: value}),))
    for source, target in ((wild, layout_of(group)), (layout_of(group), wild)):
        with pytest.raises(Incompatible, match="layout group 0 bytes within their region"):
            pair_layouts(source, target)


def test_a_region_beyond_64_bits_is_refused() -> None:
    group = compact_group(blocks=1)
    wild = Layout(2**64 - 1, (msgspec.structs.replace(group, block_stride=2**63),))
    with pytest.raises(Incompatible, match="region"):
        pair_layouts(wild, layout_of(group))
