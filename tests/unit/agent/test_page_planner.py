"""Plans of a few pages by the loop in C, against `core/plan.py`, which plans whatever the loop leaves alone; and copies that
are planned in the same call."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.agent.page_planner import PagePlanner
from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Group, HeadRange, Layout
from kvbaton.core.pair import Pair, pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.strips import Runs
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.errors import RangeError
from kvbaton.transport.runs import CopyCrew, Loops, Pages, RunCopier, load_loops

BLOCKS, SIZE = 40, 4
AXES = ("plane", "block", "token", "head", "channel")


@pytest.fixture(scope="module")
def loops() -> Loops:
    found = load_loops()
    if found is None:
        pytest.skip("no C compiler")
    return found


def _group(layers: int, planes: int, blocks: int = BLOCKS, heads: int = 2) -> Group:
    tensors = split_layers(dense_tensor((layers, planes, blocks, SIZE, heads, 3), "float16", 2))
    names = tuple(f"plane{index}" for index in range(planes))
    return tensor_group("full", range(layers), tensors, AXES, heads=(HeadRange(0, heads),), total_heads=heads, planes=names)


def _spread(group: Group, times: int) -> Group:
    """The same with gaps: blocks lie so many times as far apart, and so do layers."""
    planes = (
        msgspec.structs.replace(
            plane,
            block_stride=times * plane.block_stride,
            layer_offsets=tuple(times * offset for offset in plane.layer_offsets),
        )
        for plane in group.planes
    )
    return msgspec.structs.replace(group, planes=tuple(planes))


def _layout(*groups: Group) -> Layout:
    return Layout(max(group.end for group in groups), groups)


def _planner(pair: Pair, loops: Loops) -> PagePlanner:
    planner = PagePlanner.of(pair, loops)
    assert planner is not None
    return planner


def _planned(
    planner: PagePlanner, source: BlockLists, target: BlockLists, first: int, end: int, total: int | None, layers: range
) -> tuple[Runs, int] | None:
    """The runs of these tokens, and the bytes that they are said to have."""
    pages = planner.pages(source, target, first, end, total, layers)
    runs = None if pages is None else planner.plan(pages)
    return None if pages is None or runs is None else (runs, pages.wire_bytes)


def _ids(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Blocks in any order; some of them neighbours, as a pool gives them."""
    runs = st.integers(0, BLOCKS - count).map(lambda first: tuple(range(first, first + count)))
    return st.one_of(st.permutations(range(BLOCKS)).map(lambda ids: tuple(ids[:count])), runs)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_loop_plans_what_the_reference_plans(data: st.DataObject, loops: Loops) -> None:
    layers, planes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    source, target = (_spread(_group(layers, planes), data.draw(st.integers(1, 3))) for _ in range(2))
    pair = pair_layouts(_layout(source), _layout(target))
    count = data.draw(st.integers(1, 32))
    total = data.draw(st.integers((count - 1) * SIZE + 1, count * SIZE))
    first = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(first + 1, total))
    some = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(1, layers))
    chosen = range(min(some), max(some)) if some[0] != some[1] else range(layers)
    blocks = (data.draw(_ids(count)),), (data.draw(_ids(count)),)
    whole = data.draw(st.sampled_from([total, None]))
    planned = _planned(_planner(pair, loops), *blocks, first, end, whole, chosen)
    expected = plan_runs(pair, *blocks, first, end, chosen, total_tokens=whole)
    assert planned is not None
    runs, wire_bytes = planned
    assert runs.tolist() == expected.tolist()
    assert runs.dtype == expected.dtype
    assert wire_bytes == int(expected[:, 2].sum())


@pytest.mark.parametrize(
    ("sources", "targets", "first", "end", "total"),
    [
        ((0, 1), (0, 1), 0, 9, 9),
        ((0,), (0, 1), 0, 8, 8),
        ((0, 1), (0,), 0, 8, 8),
        ((0, 0), (0, 1), 0, 8, 8),
        ((0, 1), (1, 1), 0, 8, 8),
        ((0, BLOCKS), (0, 1), 0, 8, 8),
        ((0, 1), (0, BLOCKS), 0, 8, 8),
        ((0, -1), (0, 1), 0, 8, 8),
        ((0, 1), (-1, 1), 0, 8, 8),
        ((0, 2**63), (0, 1), 0, 8, 8),
        ((0, 1), (0, 1), -1, 8, 8),
        ((0, 1), (0, 1), 0, 8, 7),
    ],
)
def test_what_is_wrong_is_left_to_the_reference_which_names_it(
    sources: tuple[int, ...], targets: tuple[int, ...], first: int, end: int, total: int, loops: Loops
) -> None:
    pair = pair_layouts(_layout(_group(2, 2)), _layout(_group(2, 2)))
    assert _planned(_planner(pair, loops), (sources,), (targets,), first, end, total, range(2)) is None
    with pytest.raises(RangeError):
        plan_runs(pair, (sources,), (targets,), first, end, total_tokens=total)


@pytest.mark.parametrize(("more", "fewer"), [(49, 40), (40, 49)], ids=["more at the source", "more at the target"])
def test_each_side_has_as_many_blocks_as_its_own_layout(more: int, fewer: int, loops: Loops) -> None:
    pair = pair_layouts(_layout(_group(2, 2, blocks=more)), _layout(_group(2, 2, blocks=fewer)))
    planner = _planner(pair, loops)
    planned = _planned(planner, ((more - 1,),), ((fewer - 1,),), 0, 4, 4, range(2))
    assert planned is not None
    assert planned[0].tolist() == plan_runs(pair, ((more - 1,),), ((fewer - 1,),), 0, 4).tolist()
    assert _planned(planner, ((more,),), ((0,),), 0, 4, 4, range(2)) is None
    assert _planned(planner, ((0,),), ((fewer,),), 0, 4, 4, range(2)) is None


def test_nothing_and_too_much_are_left_to_the_reference(loops: Loops) -> None:
    pair = pair_layouts(_layout(_group(9, 2)), _layout(_group(9, 2)))
    planner, ids = _planner(pair, loops), tuple(range(BLOCKS))
    assert _planned(planner, (ids,), (ids,), 4, 4, 8, range(9)) is None, "no token"
    assert _planned(planner, (ids,), (ids,), 0, 8, 8, range(9, 12)) is None, "no layer of this pair"
    assert _planned(planner, (ids,), (ids,), 0, 33 * SIZE, 33 * SIZE, range(9)) is None, "33 pages"
    assert _planned(planner, (ids,), (ids[::-1],), 0, 28 * SIZE, 28 * SIZE, range(9)) is not None, "504 runs"
    assert _planned(planner, (ids,), (ids[::-1],), 0, 29 * SIZE, 29 * SIZE, range(9)) is None, "522 runs"
    assert _planned(planner, (ids, ids), (ids, ids), 0, 8, 8, range(9)) is None, "lists of two groups"
    assert _planned(planner, (ids,), (ids,), 0, 8, 8, range(0)) is None, "no layer at all"


def test_other_pairs_are_left_to_the_reference(loops: Loops) -> None:
    plain, group = _layout(_group(2, 2)), _group(2, 2)
    windowed = _layout(msgspec.structs.replace(group, window=8))
    others = {
        "two groups": pair_layouts(_layout(_group(1, 1), _group(1, 1)), _layout(_group(1, 1), _group(1, 1))),
        "fewer heads": pair_layouts(plain, _layout(_narrow(group))),
        "a window": pair_layouts(windowed, windowed),
    }
    assert {name: PagePlanner.of(pair, loops) for name, pair in others.items()} == dict.fromkeys(others)
    assert PagePlanner.of(pair_layouts(plain, plain), None) is None, "there is no loop"


def _narrow(group: Group) -> Group:
    return msgspec.structs.replace(
        group, planes=tuple(msgspec.structs.replace(plane, heads=(HeadRange(1, 1),)) for plane in group.planes)
    )


def test_layers_of_a_block_that_lie_in_it_are_left_to_the_reference(loops: Loops) -> None:
    pair = pair_layouts(_layout(_group(2, 2)), _layout(_group(2, 2)))
    (whole,) = pair.groups
    (piece,) = whole.pieces
    inside = dataclasses.replace(whole, pieces=(dataclasses.replace(piece, slots_in_block=True),))
    assert PagePlanner.of(dataclasses.replace(pair, groups=(inside,)), loops) is None


def test_ranges_of_layers_that_a_peer_names_are_not_kept_without_a_bound(loops: Loops) -> None:
    pair = pair_layouts(_layout(_group(1, 1)), _layout(_group(1, 1)))
    planner = _planner(pair, loops)
    for end in range(1, 1000):
        assert _planned(planner, ((3,),), ((5,),), 0, 4, 4, range(end)) is not None
    assert len(vars(planner)["_tables"]) <= 256


Bytes = npt.NDArray[np.uint8]


class Copies:
    """Pages of a pair, and two regions with random bytes."""

    def __init__(self, pair: Pair, sizes: tuple[int, int], loops: Loops, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.pair, self.planner = pair, _planner(pair, loops)
        self.source, self.target = (random.integers(0, 256, size, dtype=np.uint8) for size in sizes)
        self._crew = CopyCrew(loops, 0)
        self._copier = RunCopier(self.source, self.target, self._crew)

    def close(self) -> None:
        self._crew.close()

    def pages(
        self, sources: tuple[int, ...], targets: tuple[int, ...], first: int, end: int, layers: range = range(2)
    ) -> Pages:
        pages = self.planner.pages((sources,), (targets,), first, end, None, layers)
        assert pages is not None
        return pages

    def move(self, pages: Pages, most_bytes: int) -> tuple[int, int]:
        """Have pages moved; if they are not, no byte may be another than before."""
        before = self.target.copy()
        moved = self._copier.move_pages(pages, most_bytes)
        assert moved != (0, 0) or np.array_equal(self.target, before)
        return moved


def _copied(runs: Runs, source: Bytes, target: Bytes) -> Bytes:
    """Target memory when these runs are in, and nothing else."""
    wanted = target.copy()
    for of, at, count in runs.tolist():
        wanted[at : at + count] = source[of : of + count]
    return wanted


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pages_are_moved_to_where_the_reference_plans_them_and_no_other_byte_is(data: st.DataObject, loops: Loops) -> None:
    layers, planes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    source, target = (_layout(_spread(_group(layers, planes), data.draw(st.integers(1, 3)))) for _ in range(2))
    pair = pair_layouts(source, target)
    copies = Copies(pair, (source.region_bytes, target.region_bytes), loops, data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 32))
    first = data.draw(st.integers(0, count * SIZE - 1))
    end = data.draw(st.integers(max(first, (count - 1) * SIZE) + 1, count * SIZE))
    some = range(data.draw(st.integers(0, layers - 1)), layers)
    sources, targets = data.draw(_ids(count)), data.draw(_ids(count))
    planned = plan_runs(pair, (sources,), (targets,), first, end, some)
    wanted, wire_bytes = _copied(planned, copies.source, copies.target), int(planned[:, 2].sum())
    pages = copies.pages(sources, targets, first, end, some)
    assert copies.move(pages, wire_bytes - 1) == (0, 0), "more than may be moved"
    assert copies.move(pages, wire_bytes) == (wire_bytes, len(planned)) == (pages.wire_bytes, len(planned))
    assert np.array_equal(copies.target, wanted)
    copies.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": (0, BLOCKS)},
        {"targets": (0, BLOCKS)},
        {"sources": (0, -1)},
        {"targets": (-1, 0)},
        {"sources": (0, 2**63)},
        {"targets": (2**63, 0)},
        {"targets": (0, -(2**63) - 1)},
        {"sources": (3, 3)},
        {"targets": (3, 3)},
        {"first": -1},
        {"first": 2 * SIZE},
        {"end": 0},
        {"end": -1},
        {"end": 2 * SIZE + 1},
        {"end": 2**63 - 1},
        {"sources": (), "targets": ()},
        {"sources": tuple(range(33)), "targets": tuple(range(33))},
    ],
    ids=str,
)
def test_pages_with_something_wrong_are_not_moved(changes: dict[str, Any], loops: Loops) -> None:
    layout = _layout(_group(2, 2))
    copies = Copies(pair_layouts(layout, layout), (layout.region_bytes, layout.region_bytes), loops)
    right = copies.pages((4, 9), (8, 2), 0, 2 * SIZE)
    assert copies.move(right._replace(**changes), 1 << 20) == (0, 0)
    assert copies.move(right, 1 << 20) == (right.wire_bytes, 8)
    copies.close()


@pytest.mark.parametrize("short", [0, 1], ids=["source", "target"])
def test_pages_that_leave_a_region_are_not_moved(short: int, loops: Loops) -> None:
    """A layout that is larger than the memory: every block exists, and its last byte does not."""
    layout = _layout(_group(2, 2))
    sizes = [layout.region_bytes, layout.region_bytes]
    sizes[short] -= 1
    copies = Copies(pair_layouts(layout, layout), (sizes[0], sizes[1]), loops)
    last = BLOCKS - 1
    assert copies.move(copies.pages((last,), (last,), 0, SIZE), 1 << 20) == (0, 0)
    assert copies.move(copies.pages((last - 1,), (last - 1,), 0, SIZE), 1 << 20) != (0, 0)
    copies.close()


def test_pages_of_too_many_runs_or_bytes_are_not_moved(loops: Loops) -> None:
    layout = _layout(_group(9, 2))
    copies, ids = Copies(pair_layouts(layout, layout), (layout.region_bytes, layout.region_bytes), loops), tuple(range(BLOCKS))
    fewer, more = (copies.pages(ids, ids[::-1], 0, count * SIZE, range(9)) for count in (28, 29))
    assert copies.move(more, 1 << 20) == (0, 0), "522 runs"
    assert copies.move(fewer, 0) == (0, 0)
    assert copies.move(fewer, 1 << 32) == (0, 0), "bytes of which the answer has no room to report"
    assert copies.move(fewer, (1 << 32) - 1) == (fewer.wire_bytes, 504)
    assert RunCopier(copies.source, copies.target).move_pages(fewer, 1 << 20) == (0, 0), "no loop"
    copies.close()
