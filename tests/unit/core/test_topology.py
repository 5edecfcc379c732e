"""Shapes, rank numbers, ports and splits; and the refusal of instances whose ranks do not make up the model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import compact_instance

from kvbaton.core.layout import HeadRange, Layout, TokenSplit
from kvbaton.core.topology import (
    RankAt,
    Shape,
    collect_ranks,
    head_range,
    instance_problem,
    rank_port,
)
from kvbaton.errors import ConfigError
from model_cuts import part_ranges, stage_layers

sizes = st.integers(1, 4)
shapes = st.builds(Shape, sizes, sizes, sizes, sizes)


@given(shapes)
def test_every_rank_has_a_number_of_its_own_and_the_number_leads_back(shape: Shape) -> None:
    ranks = list(shape.all())
    assert [shape.number(at) for at in ranks] == list(range(shape.dp * shape.ranks))
    assert len(set(ranks)) == len(ranks)
    assert [shape.at(shape.number(at)) for at in ranks] == ranks


@given(shapes)
def test_a_shape_is_read_as_it_is_written(shape: Shape) -> None:
    assert Shape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "shape"), [("tp2", Shape(tp=2)), ("pp2,tp4", Shape(pp=2, tp=4)), ("tp4, pp2", Shape(pp=2, tp=4))]
)
def test_shapes(text: str, shape: Shape) -> None:
    assert Shape.parse(text) == shape


@pytest.mark.parametrize("text", ["", "tp", "tp0", "xp2", "tp2,tp4", "2", "tp-1", "dp99999,tp99999"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shape"):
        Shape.parse(text)


@pytest.mark.parametrize("at", [RankAt(tp=2), RankAt(pp=-1), RankAt(cp=1), RankAt(dp=1)])
def test_a_rank_outside_the_shape_is_refused(at: RankAt) -> None:
    with pytest.raises(ConfigError, match="is outside 0"):
        Shape(tp=2, pp=2).number(at)


class TestRankPorts:
    """Endpoints of a dp x tp x pp grid are distinct, and those of two instances on one host too."""

    def test_ports_of_a_grid_are_distinct(self) -> None:
        shape = Shape(dp=2, tp=4, pp=2)
        ports = [rank_port(20_000, shape, at) for at in shape.all()]
        assert ports == list(range(20_000, 20_016))
        assert not set(ports) & {rank_port(20_016, shape, at) for at in shape.all()}

    def test_a_grid_beyond_the_last_port_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="65535"):
            rank_port(65_530, Shape(tp=8), RankAt())


@given(st.integers(1, 6), st.integers(1, 4))
def test_heads_are_shared_out_evenly_or_each_is_held_by_as_many(heads: int, factor: int) -> None:
    each = [head_range(heads * factor, heads, rank) for rank in range(heads)]
    assert [head for held in each for head in range(held.start, held.end)] == list(range(heads * factor))
    replicated = [head_range(heads, heads * factor, rank) for rank in range(heads * factor)]
    assert [held.start for held in replicated] == [rank // factor for rank in range(heads * factor)]
    assert {held.count for held in replicated} == {1}


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (2, 3), (3, 2), (0, 2)])
def test_heads_that_neither_divide_nor_replicate_are_refused_with_both_numbers(heads: int, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} heads cannot be divided for tp{tp}"):
        head_range(heads, tp, 0)


def test_conv_channels_are_shared_out_part_by_part() -> None:
    assert part_ranges((4, 4, 8), 2, 1) == (HeadRange(2, 2), HeadRange(6, 2), HeadRange(12, 4))
    assert part_ranges((4, 4, 8), 1, 0) == (HeadRange(0, 4), HeadRange(4, 4), HeadRange(8, 8))


def test_layers_of_stages() -> None:
    assert [stage_layers(7, 3, rank) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]


class TestCollectingRanks:
    """Handshake metadata by (pp rank, tp rank): collected from all workers, and refused by name."""

    shape = Shape(pp=2, tp=2)
    whole: Mapping[tuple[int, int], str] = {(pp, tp): f"{pp}.{tp}" for pp in range(2) for tp in range(2)}

    def test_all_workers_make_one_list_in_the_order_of_numbers(self) -> None:
        parts = [{at: each} for at, each in sorted(self.whole.items(), reverse=True)]
        assert collect_ranks(self.shape, [None, *parts, {}]) == ("0.0", "0.1", "1.0", "1.1")

    def test_without_pipelines_nothing_changes(self) -> None:
        assert collect_ranks(Shape(tp=2), [{(0, 0): "a"}, {(0, 1): "b"}]) == ("a", "b")

    def test_a_missing_stage(self) -> None:
        with pytest.raises(ConfigError, match="stage 1 of shape pp2,tp2 is missing"):
            collect_ranks(self.shape, [{at: each for at, each in self.whole.items() if at[0] == 0}])

    def test_a_missing_rank(self) -> None:
        with pytest.raises(ConfigError, match="pp rank 1, tp rank 0 of shape pp2,tp2 is missing"):
            collect_ranks(self.shape, [{at: each for at, each in self.whole.items() if at != (1, 0)}])

    def test_a_rank_twice(self) -> None:
        with pytest.raises(ConfigError, match="pp rank 0, tp rank 1 is reported twice"):
            collect_ranks(self.shape, [self.whole, {(0, 1): "again"}])

    def test_a_stage_beyond_the_shape(self) -> None:
        with pytest.raises(ConfigError, match=r"pp rank 2 is outside 0\.\.1"):
            collect_ranks(self.shape, [self.whole, {(2, 0): "more"}])


def _layouts(shape: str, heads: int = 4) -> list[Layout]:
    return list(compact_instance(shape, heads).layouts)


def _with_layers(layout: Layout, layers: tuple[int, ...]) -> Layout:
    return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(layout.groups[0], layers=layers),))


def _with_split(layout: Layout, split: TokenSplit) -> Layout:
    return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(layout.groups[0], tokens=split),))


@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp8", "pp2", "pp2,tp2", "pp4,tp4"])
def test_an_instance_that_holds_the_model_once_has_no_problem(shape: str) -> None:
    assert instance_problem(Shape.parse(shape), _layouts(shape)) == ""


class TestIncompleteInstances:
    """Ranks whose layouts do not make up the model are refused by name."""

    def test_a_rank_too_few(self) -> None:
        assert instance_problem(Shape(tp=2), _layouts("tp1")) == "1 ranks where shape tp2 has 2"

    def test_a_stage_twice(self) -> None:
        first, _ = _layouts("pp2")
        assert "stages 0 and 1 are the same: both hold layers 0, 1" in instance_problem(Shape(pp=2), [first, first])

    def test_stages_that_overlap(self) -> None:
        first, second = _layouts("pp2")
        assert "stages 0 and 1 overlap in layers 1" in instance_problem(Shape(pp=2), [first, _with_layers(second, (1, 2))])

    def test_a_gap(self) -> None:
        first, second = _layouts("pp2")
        found = instance_problem(Shape(pp=2), [first, _with_layers(second, (3, 4))])
        assert "no rank holds layers 2: there is a gap" in found

    def test_a_huge_number_of_a_peer_costs_nothing(self) -> None:
        """A layer, or a number of context-parallel ranks, that no real card has is reported as a gap at once."""
        (layout,) = _layouts("tp1")
        huge = 3_000_000
        tracemalloc.start()
        gap = instance_problem(Shape(), [_with_layers(layout, (0, 1, 2, huge))])
        split = instance_problem(Shape(), [_with_split(layout, TokenSplit(0, huge, 1))])
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert gap == f"no rank holds layers 3-{huge - 1}: there is a gap in the layers"
        assert f"no rank holds the tokens of context-parallel rank 1 of {huge}" in split
        assert peak_bytes < 1 << 20

    def test_ranks_of_a_stage_that_differ(self) -> None:
        first, second = _layouts("tp2")
        found = instance_problem(Shape(tp=2), [first, _with_layers(second, (0, 1, 2, 9))])
        assert "ranks 0 and 1 of stage 0 hold layers 0-3 and 0, 1, 2, 9" in found

    def test_a_head_that_no_rank_holds(self) -> None:
        first, _ = _layouts("tp2")
        assert "no rank holds head 2 of 4 of group 0 plane k" in instance_problem(Shape(tp=2), [first, first])

    def test_tokens_that_no_rank_holds(self) -> None:
        (layout,) = _layouts("tp1")
        split = [_with_split(layout, TokenSplit(0, 2, 1)), _with_split(layout, TokenSplit(0, 2, 1))]
        assert "tokens of context-parallel rank 1 of 2" in instance_problem(Shape(cp=2), split)

    def test_tokens_that_no_rank_holds_in_one_stage(self) -> None:
        """The other stage has them; that is no help for these layers."""
        first, second = _layouts("pp2")
        ranks = [_with_split(each, TokenSplit(rank, 2, 1)) for each, rank in ((first, 0), (first, 1), (second, 0), (second, 0))]
        found = instance_problem(Shape(pp=2, cp=2), ranks)
        assert found == "stage 1: no rank holds the tokens of context-parallel rank 1 of 2 of group 0"

    def test_a_head_that_no_rank_holds_for_some_of_the_tokens(self) -> None:
        first, second = _layouts("tp2")
        ranks = [_with_split(first, TokenSplit(0, 2, 1)), _with_split(second, TokenSplit(1, 2, 1))]
        found = instance_problem(Shape(cp=2), ranks)
        assert "no rank holds head 2 of 4 of group 0 plane k for the tokens of context-parallel rank 0 of 2" in found

    def test_ranks_of_a_stage_that_differ_in_one_group(self) -> None:
        """Another group has the layer, so that none is missing all in all."""
        first, second = (msgspec.structs.replace(each, groups=each.groups * 2) for each in _layouts("tp2"))
        short = _with_layers(second, (0, 1, 2)).groups[0]
        planes = tuple(msgspec.structs.replace(each, layer_offsets=each.layer_offsets[:3]) for each in short.planes)
        lacking = msgspec.structs.replace(second, groups=(second.groups[0], msgspec.structs.replace(short, planes=planes)))
        found = instance_problem(Shape(tp=2), [first, lacking])
        assert found == "ranks 0 and 1 of stage 0 hold layers 0-3 and 0-2 of group 1"
        assert instance_problem(Shape(tp=2), [first, second]) == ""

    def test_tokens_split_in_two_ways(self) -> None:
        (layout,) = _layouts("tp1")
        split = [_with_split(layout, TokenSplit(0, 2, 1)), _with_split(layout, TokenSplit(1, 2, 2))]
        assert "split tokens differently" in instance_problem(Shape(cp=2), split)
