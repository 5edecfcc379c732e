"""Hand-offs between instances of any two shapes, and the cases that connectors of vLLM and SGLang got wrong.

Heads, replicas, stages, context-parallel ranks, states, windows, block lists. Refusals at the handshake: `test_card.py`.
"""

from __future__ import annotations

import msgspec
import pytest
from caches import Case, Rolled, Side, compact_group, draw_group, draw_model, layout_of
from instances import Instance, compact_instance, hand_off, tagged

from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane, TokenSplit
from kvbaton.core.legs import assign_legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.segments import HOLE
from kvbaton.core.topology import Shape
from kvbaton.errors import ConfigError, Incompatible, RangeError
from model_cuts import part_ranges


def _is_right(source: Instance, target: Instance) -> bool:
    found, times, _ = hand_off(source, target, assign_legs(source.layouts, target.layouts), [0, 3, 8], tagged(source, 8), 8)
    wanted = tagged(target, 8)
    return all(
        (one == other).all() and (count == (other != 0)).all() for one, other, count in zip(found, wanted, times, strict=True)
    )


class TestEqualShapes:
    def test_same_shape_moves_every_byte_and_no_other(self) -> None:
        assert _is_right(compact_instance("tp2", 4), compact_instance("tp2", 4))


class TestTensorParallelism:
    """All seven ratios, with replicated heads in both directions."""

    @pytest.mark.parametrize(
        ("prefill", "decode", "heads"), [(4, 2, 8), (2, 4, 8), (4, 2, 2), (2, 4, 2), (4, 1, 2), (1, 4, 2), (2, 8, 4)]
    )
    def test_every_target_rank_gets_its_heads(self, prefill: int, decode: int, heads: int) -> None:
        assert _is_right(compact_instance(f"tp{prefill}", heads), compact_instance(f"tp{decode}", heads))


class TestHeadsThatDoNotDivideEvenly:
    def test_three_to_two_is_not_refused_but_right(self) -> None:
        assert _is_right(compact_instance("tp3", 6), compact_instance("tp2", 6))

    def test_heads_that_cannot_be_divided_are_refused_with_both_numbers(self) -> None:
        with pytest.raises(ConfigError, match="6 heads cannot be divided for tp4"):
            compact_instance("tp4", 6)


class TestLatentsThatEveryRankHolds:
    """MLA: what all ranks hold is sent once per need, and ranks with nothing to send have no legs."""

    def test_more_sources_than_targets(self) -> None:
        source, target = compact_instance("tp4", 1, layers=1), compact_instance("tp2", 1, layers=1)
        legs = assign_legs(source.layouts, target.layouts)
        assert [(leg.source, leg.target) for leg in legs.legs] == [(0, 0), (2, 1)]
        assert _is_right(source, target)

    def test_more_targets_than_sources(self) -> None:
        assert _is_right(compact_instance("tp1", 1), compact_instance("tp4", 1))


class TestPipelineStages:
    @pytest.mark.parametrize("decode", ["pp1", "pp2", "pp4"])
    def test_every_layer_arrives_from_the_stage_that_holds_it(self, decode: str) -> None:
        source, target = compact_instance("pp2", 2), compact_instance(decode, 2)
        assert _is_right(source, target)

    def test_a_target_is_complete_when_the_leg_of_every_stage_is(self) -> None:
        legs = assign_legs(compact_instance("pp2,tp2", 2).layouts, compact_instance("tp1", 2).layouts)
        assert len(legs.of_target(0)) == 4


def _token_layouts(size: int, interleave: int, block_tokens: int = 2) -> list[Layout]:
    group = compact_group(layers=1, planes=1, blocks=32, block_tokens=block_tokens, heads=1)
    return [layout_of(msgspec.structs.replace(group, tokens=TokenSplit(rank, size, interleave))) for rank in range(size)]


class TestContextParallelRanks:
    """Context-parallel ranks: no gap, no overlap, whatever the length; in several chunks too."""

    @pytest.mark.parametrize("total", [1, 2, 3, 5, 16, 17])
    @pytest.mark.parametrize(("source", "target"), [((4, 0), (1, 0)), ((1, 0), (4, 2)), ((3, 1), (2, 0)), ((2, 2), (2, 2))])
    def test_every_token_is_moved_once(self, total: int, source: tuple[int, int], target: tuple[int, int]) -> None:
        sources, targets = _token_layouts(*source), _token_layouts(*target)
        blocks = (tuple(range(32)),)
        moved = 0
        for leg in assign_legs(sources, targets).legs:
            pair = pair_layouts(sources[leg.source], targets[leg.target], leg.share)
            for first, end in ((0, total // 2), (total // 2, total)):
                moved += int(plan_runs(pair, blocks, blocks, first, end, total_tokens=total)[:, 2].sum())
        assert moved == total * sources[0].groups[0].token_bytes


def _conv(tp_size: int, tp_rank: int, rows: int = 1) -> Layout:
    """Conv state `[q|k|v]` of 4, 4 and 8 channels, each divided by itself; `rows` planes of all channels."""
    ranges = part_ranges((4, 4, 8), tp_size, tp_rank)
    count = sum(each.count for each in ranges)
    planes = tuple(
        Plane(f"row{row}", "u8", 1, ranges, 16, (Axis(1, 1),), (row * count,), rows * count, 0, 0, 1) for row in range(rows)
    )
    return layout_of(Group("conv", (0,), 3, 0, 0, planes))


class TestMambaStates:
    def test_conv_is_cut_part_by_part_in_both_directions(self) -> None:
        pair = pair_layouts(_conv(1, 0), _conv(2, 1))
        assert plan_runs(pair, ((0,),), ((0,),), 0, 5).tolist() == [[2, 0, 2], [6, 2, 2], [12, 4, 4]]
        back = pair_layouts(_conv(2, 1), _conv(1, 0))
        assert plan_runs(back, ((0,),), ((0,),), 0, 5).tolist() == [[0, 2, 2], [2, 6, 2], [4, 12, 4]]

    def test_rows_outside_the_channels_are_cut_each(self) -> None:
        pair = pair_layouts(_conv(1, 0, rows=3), _conv(2, 0, rows=3))
        assert len(plan_runs(pair, ((1,),), ((2,),), 0, 5)) == 9

    @pytest.mark.parametrize("ids", [(), (0, 1)])
    def test_a_state_is_exactly_one_block(self, ids: tuple[int, ...]) -> None:
        pair = pair_layouts(_conv(1, 0), _conv(1, 0))
        with pytest.raises(RangeError, match=f"has {len(ids)} blocks; the state of a request is exactly one"):
            plan_runs(pair, (ids,), ((0,),), 0, 5)

    def test_it_travels_with_the_last_chunk_only_and_after_a_full_prefix_hit_too(self) -> None:
        pair = pair_layouts(_conv(1, 0), _conv(1, 0))
        assert len(plan_runs(pair, ((0,),), ((0,),), 0, 4, total_tokens=5)) == 0
        assert len(plan_runs(pair, ((0,),), ((0,),), 4, 5, total_tokens=5)) == 1
        assert len(plan_runs(pair, ((0,),), ((0,),), 5, 5, total_tokens=5)) == 1

    def test_dimensions_that_differ_are_refused(self) -> None:
        wide = _conv(1, 0).groups[0]
        plane = msgspec.structs.replace(wide.planes[0], total_heads=20)
        with pytest.raises(Incompatible, match="total_heads is 20 here and 16 there"):
            pair_layouts(_conv(1, 0), layout_of(msgspec.structs.replace(wide, planes=(plane,))))


class TestSlidingWindows:
    """Tokens outside the window are not moved, and their blocks may be holes."""

    group = msgspec.structs.replace(compact_group(layers=1, planes=1, block_tokens=4, heads=1), window=6)

    @pytest.mark.parametrize(("total", "cached", "tokens"), [(16, 0, 6), (16, 12, 4), (5, 0, 5), (6, 0, 6), (16, 16, 0)])
    def test_at_page_edges_short_sequences_and_with_a_prefix_in_the_window(self, total: int, cached: int, tokens: int) -> None:
        pair = pair_layouts(layout_of(self.group), layout_of(self.group))
        blocks = (tuple(range(4)),)
        assert int(plan_runs(pair, blocks, blocks, cached, total)[:, 2].sum()) == tokens * self.group.token_bytes

    def test_holes_are_fine_outside_and_refused_inside(self) -> None:
        pair = pair_layouts(layout_of(self.group), layout_of(self.group))
        assert len(plan_runs(pair, ((HOLE, HOLE, 5, 1),), ((HOLE, HOLE, 0, 3),), 0, 16)) == 2
        with pytest.raises(RangeError, match="target block list of full has an entry without a block"):
            plan_runs(pair, ((HOLE, HOLE, 5, 1),), ((HOLE, HOLE, HOLE, 3),), 0, 16)

    def test_lists_of_unequal_length_are_an_error(self) -> None:
        pair = pair_layouts(layout_of(self.group), layout_of(self.group))
        with pytest.raises(RangeError, match="source block list has 3 blocks where 4 are needed"):
            plan_runs(pair, ((0, 1, 2),), ((0, 1, 2, 3),), 0, 16)


class TestLegNumbers:
    def test_completions_are_counted_by_leg_and_each_leg_has_its_own_number(self) -> None:
        legs = assign_legs(compact_instance("pp2,tp2", 4).layouts, compact_instance("tp1", 4).layouts)
        assert [leg.number for leg in legs.legs] == list(range(4))
        assert {leg.number for leg in legs.of_target(0)} == {0, 1, 2, 3}
        numbers = {Shape(pp=2, tp=2, cp=3).number(at) for at in Shape(pp=2, tp=2, cp=3).all()}
        assert numbers == set(range(12))


class TestBlockIdsOutsideTheCache:
    @pytest.mark.parametrize("bad", [-1, 8, 2**31, 2**63])
    def test_an_index_outside_is_named(self, bad: int) -> None:
        layout = layout_of(compact_group())
        with pytest.raises(RangeError, match=f"target block {bad} is outside"):
            plan_runs(pair_layouts(layout, layout), ((0,),), ((bad,),), 0, 4)


class TestLegsPerTargetRank:
    """Which ranks exchange data, and how many legs each target rank has; 3:2 is planned, not refused."""

    @pytest.mark.parametrize(
        ("prefill", "decode", "heads", "answers"),
        [
            (2, 2, 8, [1, 1]),
            (1, 4, 8, [1] * 4),
            (4, 1, 8, [4]),
            (4, 2, 1, [2, 2]),
            (2, 4, 1, [1] * 4),
            (3, 2, 6, [2, 2]),
            (4, 2, 2, [2, 2]),
        ],
    )
    def test_each_ratio_has_the_right_number_of_legs(self, prefill: int, decode: int, heads: int, answers: list[int]) -> None:
        source, target = compact_instance(f"tp{prefill}", heads), compact_instance(f"tp{decode}", heads)
        legs = assign_legs(source.layouts, target.layouts)
        assert [len(legs.of_target(rank)) for rank in range(decode)] == answers
        assert sum(len(legs.of_source(rank)) for rank in range(prefill)) == sum(answers)
        assert _is_right(source, target)


class TestGroupsWithTheirOwnBlockLists:
    """Groups have block lists of their own; each is planned from its own."""

    @pytest.mark.parametrize("seed", range(20))
    def test_groups_are_planned_apart(self, seed: int) -> None:
        choose = Rolled(seed)
        models = [draw_model(choose) for _ in range(3)]
        sides = []
        for _ in range(2):
            groups: list[Group] = []
            lists: list[tuple[int, ...]] = []
            end = 0
            for model in models:
                heads = [(HeadRange(0, plane.total_heads),) for plane in model.planes]
                group, ids = draw_group(choose, model, model.layers, heads, TokenSplit(), 9, end)
                end = max(end, group.end)
                groups.append(group)
                lists.append(ids)
            sides.append(Side(Layout(end, tuple(groups)), tuple(lists)))
        case = Case(sides[0], sides[1], 0, 9, 9)
        runs = plan_runs(pair_layouts(sides[0].layout, sides[1].layout), sides[0].blocks, sides[1].blocks, 0, 9)
        copied = {target + byte: source + byte for source, target, count in runs.tolist() for byte in range(count)}
        assert copied == case.copies()


class TestUnequalBlocks:
    @pytest.mark.parametrize(("source", "target"), [(16, 24), (24, 16), (16, 64), (64, 16), (1, 16)])
    def test_any_block_size_to_any_other(self, source: int, target: int) -> None:
        one, two = (compact_group(layers=1, planes=1, blocks=99, block_tokens=size, heads=1) for size in (source, target))
        runs = plan_runs(pair_layouts(layout_of(one), layout_of(two)), (tuple(range(99)),), (tuple(range(99)),), 3, 90)
        assert runs.tolist() == [[18, 18, 522]]
        scattered = plan_runs(
            pair_layouts(layout_of(one), layout_of(two)), (tuple(range(98, -1, -1)),), (tuple(range(99)),), 0, 48
        )
        assert int(scattered[:, 2].sum()) == 48 * 6


def test_layers_that_share_memory_are_moved_once() -> None:
    group = compact_group(layers=3, planes=1)
    shared = msgspec.structs.replace(
        group, planes=tuple(msgspec.structs.replace(plane, layer_offsets=(0, 192, 0)) for plane in group.planes)
    )
    layout = layout_of(shared)
    assert len(plan_runs(pair_layouts(layout, layout), ((0,),), ((1,),), 0, 4)) == 2
    with pytest.raises(Incompatible, match="memory of layers 0 and 2 is 'shared' here and 'apart' there"):
        pair_layouts(layout_of(group), layout)
    assert len(plan_runs(pair_layouts(layout, layout_of(group)), ((0,),), ((1,),), 0, 4)) == 3
