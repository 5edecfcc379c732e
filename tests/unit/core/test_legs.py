"""Hand-offs between whole instances: every target element is filled once with the right bytes, whatever the two shapes are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from caches import Rolled
from instances import Instance, Memory, compact_instance, draw_meet, hand_off, tagged

from kvbaton.core.layout import Layout, TokenSplit
from kvbaton.core.legs import Legs, assign_legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.topology import instance_problem
from kvbaton.errors import Incompatible


def _differences(target: Instance, found: list[Memory], total: int) -> int:
    """Bytes that are not what they should be, those beside the request included."""
    return sum(int((one != other).sum()) for one, other in zip(found, tagged(target, total), strict=True))


@pytest.mark.parametrize("seed", range(100))
def test_any_shape_to_any_shape_fills_every_element_once_and_no_other(seed: int) -> None:
    meet = draw_meet(Rolled(seed))
    legs = assign_legs(meet.source.layouts, meet.target.layouts)
    # A window is counted from the end, so what lies before it stays empty on the target and is no difference.
    wanted = [np.zeros(rank.layout.region_bytes, np.uint8) for rank in meet.target.ranks]
    for memory, rank, whole in zip(wanted, meet.target.ranks, tagged(meet.target, meet.total), strict=True):
        for element, at in rank.elements(0, meet.total, meet.total):
            memory[at : at + rank.element_bytes(element)] = whole[at : at + rank.element_bytes(element)]
    found, times, _ = hand_off(meet.source, meet.target, legs, meet.cuts, tagged(meet.source, meet.total), meet.total)
    for one, other, count in zip(found, wanted, times, strict=True):
        assert (one == other).all()
        assert (count == (other != 0)).all()


CASES = {
    "tp2": ("tp4", 8),
    "tp4": ("tp2", 8),
    "tp4 ": ("tp1", 4),
    "tp3": ("tp2", 6),
    "tp1": ("tp4", 2),
    "tp2 ": ("tp8", 4),
    "tp4  ": ("tp2", 2),
    "tp2  ": ("tp4", 2),
    "tp4   ": ("tp1", 2),
    "pp2": ("pp1", 4),
    "pp1": ("pp2", 4),
    "pp2,tp2": ("tp4", 4),
    "tp4    ": ("pp2,tp2", 4),
    "pp4": ("pp3", 1),
}


@pytest.mark.parametrize(("prefill", "decode", "heads"), [(name.strip(), *case) for name, case in CASES.items()])
def test_the_shapes_that_are_promised(prefill: str, decode: str, heads: int) -> None:
    source, target = compact_instance(prefill, heads), compact_instance(decode, heads)
    assert instance_problem(source.shape, source.layouts) == ""
    legs = assign_legs(source.layouts, target.layouts)
    found, times, moved = hand_off(source, target, legs, [0, 5, 8], tagged(source, 8), 8)
    assert _differences(target, found, 8) == 0
    unique = sum(8 * group.token_bytes * len(group.layers) for layout in target.layouts for group in layout.groups)
    assert moved == unique == sum(int(count.sum()) for count in times)


@pytest.mark.parametrize(("prefill", "decode", "heads"), [("tp2", "tp4", 8), ("tp4", "tp1", 2), ("pp2", "pp1", 4)])
def test_control_one_leg_less_or_one_head_less_is_seen(prefill: str, decode: str, heads: int) -> None:
    source, target = compact_instance(prefill, heads), compact_instance(decode, heads)
    whole = assign_legs(source.layouts, target.layouts)
    first, *others = whole.legs
    fewer = dataclasses.replace(first, share=first.share[1:])
    for legs in (others, [fewer, *others]):
        found, _, _ = hand_off(source, target, Legs(tuple(legs)), [0, 8], tagged(source, 8), 8)
        assert _differences(target, found, 8) > 0


def _served(legs: Legs) -> dict[int, list[int]]:
    return {rank: [leg.source for leg in legs.of_target(rank)] for rank in sorted({leg.target for leg in legs.legs})}


def test_replicas_are_shared_out_over_those_that_need_them() -> None:
    """Each target meets as few sources as possible, and each source as few targets."""
    four, eight = compact_instance("tp4", 1), compact_instance("tp8", 1)
    assert _served(assign_legs(four.layouts, eight.layouts)) == {rank: [rank // 2] for rank in range(8)}
    assert _served(assign_legs(eight.layouts, four.layouts)) == {rank: [2 * rank, 2 * rank + 1] for rank in range(4)}
    assert _served(assign_legs(four.layouts, four.layouts)) == {rank: [rank] for rank in range(4)}


def test_a_target_with_several_replicas_takes_layers_from_them_in_turn() -> None:
    legs = assign_legs(compact_instance("tp2", 1).layouts, compact_instance("tp1", 1).layouts)
    assert [sorted(leg.share[0].layers) for leg in legs.legs] == [[0, 2], [1, 3]]


def _sharing(layout: Layout) -> Layout:
    """The same, with the memory of its first layer for its last one too."""
    (group,) = layout.groups
    planes = (
        msgspec.structs.replace(each, layer_offsets=(*each.layer_offsets[:-1], each.layer_offsets[0])) for each in group.planes
    )
    return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, planes=tuple(planes)),))


def test_layers_that_share_memory_come_from_one_replica_and_are_moved_once() -> None:
    sources, targets = ([_sharing(each) for each in compact_instance(shape, 1).layouts] for shape in ("tp2", "tp1"))
    legs = assign_legs(sources, targets).legs
    assert [sorted(leg.share[0].layers) for leg in legs] == [[0, 2, 3], [1]]
    runs = [plan_runs(pair_layouts(sources[leg.source], targets[0], leg.share), ((2, 0),), ((2, 0),), 0, 8) for leg in legs]
    assert sum(int(each[:, 2].sum()) for each in runs) == 3 * 8 * targets[0].groups[0].token_bytes


@pytest.mark.parametrize("shape", ["tp1", "tp2", "pp2", "pp4,tp2"])
def test_memory_that_only_the_target_shares_between_layers_is_refused_however_many_sources_there_are(shape: str) -> None:
    sources, targets = compact_instance(shape, 1), [_sharing(each) for each in compact_instance("tp1", 1).layouts]
    with pytest.raises(Incompatible, match="memory of layers 0 and 3 is 'shared' here and 'apart' there"):
        _intersect(sources.layouts, targets)


def _intersect(sources: Sequence[Layout], targets: Sequence[Layout]) -> None:
    """All that a handshake works out."""
    for leg in assign_legs(sources, targets).legs:
        pair_layouts(sources[leg.source], targets[leg.target], leg.share)


def test_ranks_that_have_nothing_to_send_have_no_legs() -> None:
    legs = assign_legs(compact_instance("tp8", 1, layers=2).layouts, compact_instance("tp1", 1, layers=2).layouts)
    assert [leg.source for leg in legs.legs] == [0, 1]
    assert legs.of_source(7) == ()


def test_ranks_of_the_same_token_split_meet_only_their_own_kind() -> None:
    def split(size: int, interleave: int) -> list[Layout]:
        (layout,) = compact_instance("tp1", 2).layouts
        return [
            Layout(layout.region_bytes, (msgspec.structs.replace(layout.groups[0], tokens=TokenSplit(rank, size, interleave)),))
            for rank in range(size)
        ]

    assert _served(assign_legs(split(2, 4), split(2, 4))) == {0: [0], 1: [1]}
    assert _served(assign_legs(split(2, 4), split(2, 8))) == {0: [0, 1], 1: [0, 1]}
    assert _served(assign_legs(split(2, 0), split(3, 0))) == {0: [0, 1], 1: [0, 1], 2: [0, 1]}


REFUSED = {
    "layers": (
        compact_instance("tp1", 2, layers=3),
        compact_instance("tp1", 2, layers=4),
        "layers is '0-3' here and '0-2' there",
    ),
    "heads": (compact_instance("tp1", 2), compact_instance("tp1", 4), "total_heads is 4 here and 2 there"),
    "head size": (compact_instance("tp1", 2, head_size=3), compact_instance("tp1", 2), "head_size is 2 here and 3 there"),
    "kind": (compact_instance("tp1", 2, kind="sliding"), compact_instance("tp1", 2), "kind is 'full' here and 'sliding' there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_both_values(name: str) -> None:
    source, target, words = REFUSED[name]
    with pytest.raises(Incompatible, match=words):
        assign_legs(source.layouts, target.layouts)


def test_a_rank_that_is_missing_is_refused() -> None:
    source, target = compact_instance("tp2", 4), compact_instance("tp1", 4)
    with pytest.raises(Incompatible, match="plane k of target rank 0"):
        assign_legs(source.layouts[:1], target.layouts)
