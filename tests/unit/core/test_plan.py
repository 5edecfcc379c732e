"""Plans against a slow oracle that goes byte by byte through the strides; joining; and what is refused, with both values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from caches import Case, cases, compact_group, layout_of, reshaped
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.core import plan
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.plan import Runs, pair_layouts, plan_blocks, plan_layers, plan_runs
from kvbaton.core.strips import unroll
from kvbaton.errors import Incompatible, RangeError


def _plan(case: Case) -> Runs:
    pair = pair_layouts(case.source.layout, case.target.layout)
    return plan_runs(pair, case.source.blocks, case.target.blocks, case.first_token, case.tokens, total_tokens=case.total)


def _copied(runs: Runs) -> dict[int, int]:
    copied: dict[int, int] = {}
    for source_at, target_at, count in runs.tolist():
        assert count > 0
        for byte in range(count):
            assert target_at + byte not in copied, "a target byte is written twice"
            copied[target_at + byte] = source_at + byte
    return copied


def _fewest(copies: dict[int, int]) -> int:
    """How many runs these copies are, when all that are neighbours on both sides are joined."""
    return sum(copies.get(target - 1) != source - 1 for target, source in copies.items())


def _fewest_per_layer(case: Case) -> int:
    """The same with each layer of each plane counted by itself."""
    places = dict(case.source.elements(case.first_token, case.tokens, case.total))
    layers: dict[tuple[int, ...], dict[int, int]] = {}
    for element, here in case.target.elements(case.first_token, case.tokens, case.total):
        if element in places:
            for byte in range(case.target.element_bytes(element)):
                layers.setdefault(element[:3], {})[here + byte] = places[element] + byte
    return sum(map(_fewest, layers.values()))


@pytest.mark.parametrize("part", range(5))
@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_every_byte_comes_from_the_right_place_exactly_once_and_no_other_is_touched(case: Case, part: int) -> None:
    # Few blocks are planned without NumPy, and these cases have few; with every second part they count as many.
    with mock.patch.object(plan, "_FEW_BLOCKS", 0 if part % 2 else plan._FEW_BLOCKS):
        assert _copied(_plan(case)) == case.copies()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_few_blocks_are_planned_as_many_are(case: Case) -> None:
    few = _plan(case)
    with mock.patch.object(plan, "_FEW_BLOCKS", 0):
        assert _plan(case).tolist() == few.tolist()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_runs_stay_within_both_regions(case: Case) -> None:
    runs = _plan(case)
    assert runs.dtype == np.uint64
    assert runs.shape == (len(runs), 3)
    if len(runs):
        assert int((runs[:, 0] + runs[:, 2]).max()) <= case.source.layout.region_bytes
        assert int((runs[:, 1] + runs[:, 2]).max()) <= case.target.layout.region_bytes


@settings(max_examples=300, deadline=None)
@given(cases())
def test_all_neighbours_within_a_layer_are_joined(case: Case) -> None:
    runs = _plan(case)
    assert _fewest(case.copies()) <= len(runs) <= _fewest_per_layer(case)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_chunks_and_layers_in_parts_are_the_same_copies_as_the_whole(case: Case, data: st.DataObject) -> None:
    whole = dataclasses.replace(case, first_token=0, tokens=case.total)
    cuts = sorted({0, case.total, *data.draw(st.lists(st.integers(0, case.total), max_size=3))})
    pair = pair_layouts(case.source.layout, case.target.layout)
    copied: dict[int, int] = {}
    for first, end in itertools.pairwise(cuts) if case.total else [(0, 0)]:
        blocks = plan_blocks(pair, case.source.blocks, case.target.blocks, first, end, case.total)
        for layers in (range(1), range(1, 3)):
            part = _copied(unroll(plan_layers(pair, blocks, layers)))
            assert not part.keys() & copied.keys()
            copied |= part
    assert copied == whole.copies()


def _heads_outside_tokens() -> Layout:
    group = compact_group(layers=1, planes=1, blocks=8, block_tokens=4, heads=3, head_size=2)
    return layout_of(reshaped(group, token_stride=4, head_stride=16))


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
    assert int(runs[:, 2].sum()) == 3 * 155 * layout.groups[0].token_bytes


def test_no_layers_are_not_taken_for_all_of_them() -> None:
    layout = layout_of(compact_group(layers=3, planes=2, blocks=64))
    pair, blocks = pair_layouts(layout, layout), (tuple(range(8)),)
    for layers, count in ((range(0), 0), (None, 6), (range(0), 0)):
        assert len(plan_runs(pair, blocks, blocks, 0, 32, layers=layers)) == count


def test_blocks_that_are_reversed_on_both_sides_are_one_run() -> None:
    layout = layout_of(compact_group(layers=1, planes=1, blocks=8))
    backwards = tuple(reversed(range(8)))
    assert plan_runs(pair_layouts(layout, layout), (backwards,), (backwards,), 0, 32).tolist() == [[0, 0, 384]]


def test_blocks_that_are_reversed_on_one_side_are_one_run_each() -> None:
    layout = layout_of(compact_group(layers=1, planes=1, blocks=8))
    backwards = tuple(reversed(range(8)))
    assert len(plan_runs(pair_layouts(layout, layout), (backwards,), (tuple(range(8)),), 0, 32)) == 8


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


GROUP_VALUES = {"kind": "sliding", "window": 7, "whole_blocks": True}
PLANE_VALUES = {"name": "x", "dtype": "bfloat16", "element_bytes": 1, "total_heads": 4}


@pytest.mark.parametrize(("field", "value"), [*GROUP_VALUES.items(), *PLANE_VALUES.items()])
def test_layouts_that_differ_are_refused_with_the_field_and_both_values(field: str, value: Any) -> None:
    ours = compact_group()
    change = msgspec.structs.replace if field in GROUP_VALUES else reshaped
    theirs = change(ours, **{field: value})
    with pytest.raises(Incompatible, match=f"layout group 0 .*{field}") as caught:
        pair_layouts(layout_of(theirs), layout_of(ours))
    assert (caught.value.ours, caught.value.theirs) == (getattr(ours.planes[0], field, getattr(ours, field, None)), value)


def test_another_head_size_is_refused_with_both() -> None:
    with pytest.raises(Incompatible, match="plane k head_size is 3 here and 5 there"):
        pair_layouts(layout_of(compact_group(head_size=5)), layout_of(compact_group(head_size=3)))


def test_another_number_of_planes_is_refused_with_their_names() -> None:
    with pytest.raises(Incompatible, match="planes is 'k, v' here and 'kv' there"):
        pair_layouts(layout_of(compact_group(planes=1)), layout_of(compact_group()))


def test_a_state_and_a_cache_by_token_do_not_fit() -> None:
    group = compact_group(block_tokens=1)
    state = msgspec.structs.replace(group, block_tokens=0, page_tokens=0)
    with pytest.raises(Incompatible, match="block_tokens is 1 here and 0 there"):
        pair_layouts(layout_of(state), layout_of(group))


@pytest.mark.parametrize(("field", "value"), [("block_tokens", 8), ("page_tokens", 2)])
def test_blocks_that_are_moved_whole_must_be_of_one_size(field: str, value: int) -> None:
    ours = msgspec.structs.replace(compact_group(), whole_blocks=True)
    theirs = msgspec.structs.replace(ours, **{field: value, "page_tokens": value})
    with pytest.raises(Incompatible, match="moved whole"):
        pair_layouts(Layout(10**6, (theirs,)), Layout(10**6, (ours,)))


def test_the_second_group_is_checked_too() -> None:
    ours = compact_group()
    theirs = msgspec.structs.replace(ours, kind="sliding")
    with pytest.raises(Incompatible, match="layout group 1 kind is 'full' here and 'sliding' there"):
        pair_layouts(layout_of(ours, theirs), layout_of(ours, ours))


def test_another_number_of_groups_is_refused_with_both() -> None:
    group = compact_group()
    with pytest.raises(Incompatible, match=r"layout groups is '1 \(full\)' here and '2 \(full, full\)' there"):
        pair_layouts(layout_of(group, group), layout_of(group))


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_places_than_of_layers_is_refused(count: int) -> None:
    group = compact_group()
    wrong = reshaped(group, layer_offsets=(0,) * count)
    for source, target in ((group, wrong), (wrong, group)):
        with pytest.raises(Incompatible, match=f"layer_offsets {count} for 2 layers"):
            pair_layouts(Layout(10**6, (source,)), Layout(10**6, (target,)))


ESCAPES = {"layer_offsets": (0, 10**6), "block_stride": 10**6, "head_stride": 2**64 - 1}


@pytest.mark.parametrize(("field", "value"), [*ESCAPES.items(), ("layer_offsets", (-1, 0)), ("block_stride", -24)])
def test_a_layout_that_leaves_its_region_is_refused(field: str, value: object) -> None:
    """Strides come from a peer's card; what they reach is checked before any address is used."""
    group = compact_group(heads=2)
    size = layout_of(group).region_bytes
    wild = Layout(size, (reshaped(group, **{field: value}),))
    for source, target in ((wild, layout_of(group)), (layout_of(group), wild)):
        with pytest.raises(Incompatible, match=r"layout is .*group 0: "):
            pair_layouts(source, target)


def test_a_region_beyond_64_bits_is_refused() -> None:
    group = compact_group(blocks=2)
    wild = Layout(2**64 - 1, (reshaped(group, block_stride=2**63),))
    with pytest.raises(Incompatible, match="group 0"):
        pair_layouts(wild, layout_of(group))


def test_a_layout_cut_too_finely_is_refused_before_anything_is_allocated() -> None:
    group = compact_group(layers=1, planes=1, blocks=1, block_tokens=1, heads=1)
    wild = reshaped(group, heads=(HeadRange(0, 1 << 40),), total_heads=1 << 40, head_stride=8)
    with pytest.raises(Incompatible, match="runs per token"):
        pair_layouts(Layout(1 << 50, (wild,)), Layout(1 << 50, (wild,)))
