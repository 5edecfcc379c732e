"""From plans to launches: the kernel's arithmetic over slots, places and tokens copies exactly the runs of the plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_stand_in import run_strip
from kvbaton.core.strips import NO_SLOT, Numbers, Plan, Strip, TokenPattern, unroll
from kvbaton.transport.cuda.launch import LINE_BYTES, Placement, Segment
from kvbaton.transport.cuda.strip_launch import StripLaunch, strip_launches

SIZE = 1 << 18
POISON = 0xA5


def aligned(count: int) -> npt.NDArray[np.uint8]:
    spare = np.empty(count + LINE_BYTES, np.uint8)
    return spare[-int(spare.ctypes.data) % LINE_BYTES :][:count]


def whole(memory: npt.NDArray[np.uint8]) -> Placement:
    return Placement([Segment(0, len(memory), int(memory.ctypes.data))])


def rows(*found: tuple[int, int, int]) -> Numbers:
    return np.array(found, np.int64).reshape(-1, 3)


def copied(plan: Plan, launched: Plan | None = None) -> tuple[bool, list[StripLaunch]]:
    """Whether target memory is right after the launches of `launched`, by default of the plan; and the launches."""
    source, target = aligned(SIZE), aligned(SIZE)
    source[:] = np.random.default_rng(1).integers(0, POISON, SIZE, dtype=np.uint8)
    target[:] = POISON
    expected = target.copy()
    for at, to, count in unroll(plan).tolist():
        expected[to : to + count] = source[at : at + count]
    places = whole(source), whole(target)
    launches = strip_launches(launched or plan, *places)
    assert launches is not None
    for launch in launches:
        run_strip(launch, places[0].floor, places[1].floor)
    return np.array_equal(target, expected), launches


LINES = st.integers(1, 40).map(lambda lines: lines * LINE_BYTES)


@st.composite
def strips(draw: st.DrawFn) -> Strip:
    """Layers of pages; tokens of some items each, or pages without tokens, of even or uneven counts."""
    layers, pages = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(1, 20), min_size=pages, max_size=pages))
    if draw(st.booleans()):
        counts = [counts[0]] * pages
    lengths = draw(st.lists(LINES, min_size=1, max_size=3))
    token = sum(lengths)
    pattern = None
    if draw(st.booleans()):
        starts = np.cumsum([0, *lengths[:-1]])
        items = np.stack([starts + LINE_BYTES, starts, np.array(lengths)], axis=1).astype(np.int64)
        pattern = TokenPattern(items, token + draw(st.integers(0, 3)) * LINE_BYTES, token)
    page = 20 * (token + 3 * LINE_BYTES) + LINE_BYTES
    order = draw(st.permutations(range(pages)))
    scale = 1 if pattern is not None else LINE_BYTES
    places = rows(*((n * page, to * page, count * scale) for n, (to, count) in enumerate(zip(order, counts, strict=True))))
    slots = rows(*((n * page * pages, (layers - 1 - n) * page * pages, 7) for n in range(layers)))
    return Strip(slots, places, pattern)


@given(strips())
def test_any_strip_is_copied_exactly(strip: Strip) -> None:
    if len(strip.slots) * len(strip.places) * int(strip.places[-1, 0] // max(1, len(strip.places) - 1) or 1) <= SIZE:
        assert copied(Plan((strip,)))[0]


def test_control_a_layer_a_page_and_a_token_that_are_left_out_are_noticed() -> None:
    slots, places = rows((0, 0, 0), (1 << 16, 1 << 16, 0)), rows((0, 4096, 4), (8192, 0, 4))
    token = TokenPattern(rows((0, 0, 64)), 256, 64)
    plan = Plan((Strip(slots, places, token),))
    assert copied(plan)[0]
    assert not copied(plan, Plan((Strip(slots[:1], places, token),)))[0]
    assert not copied(plan, Plan((Strip(slots, places[:1], token),)))[0]
    assert not copied(plan, Plan((Strip(slots, rows((0, 4096, 4), (8192, 0, 3)), token),)))[0]


def test_a_table_is_as_long_as_slots_and_places_however_many_runs_there_are() -> None:
    slots = rows(*((n * 16384, n * 8192, 0) for n in range(8)))
    plan = Plan((Strip(slots, rows(*((n * 4096, n * 2048, 16) for n in range(4))), TokenPattern(rows((0, 0, 128)), 256, 128)),))
    is_right, [launch] = copied(plan)
    assert is_right
    assert len(unroll(plan)) == launch.pieces == 8 * 4 * 16
    assert [table.shape for table in launch.tables] == [(8, 2), (4, 3), (0, 3)]
    assert launch.is_even


@pytest.mark.parametrize(
    "strip",
    [
        Strip(NO_SLOT, rows((8, 0, 64))),
        Strip(NO_SLOT, rows((0, 0, 40))),
        Strip(rows((4, 0, 0)), rows((0, 0, 64))),
        Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 16)), 24, 16)),
        Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 20)), 32, 32)),
    ],
)
def test_what_does_not_lie_on_lines_is_unrolled(strip: Strip) -> None:
    memory = whole(aligned(SIZE))
    assert strip_launches(Plan((strip,)), memory, memory) is None


def test_long_places_beside_short_ones_are_cut() -> None:
    is_right, [launch] = copied(Plan((Strip(NO_SLOT, rows((0, 0, 65536), (70000 // 16 * 16, 65536, 1024))),)))
    assert is_right
    assert launch.pieces * launch.piece_bytes <= 1.07 * (65536 + 1024) + 1024
    token = TokenPattern(rows((0, 0, 64)), 64, 128)
    is_right, [launch] = copied(Plan((Strip(NO_SLOT, rows((0, 0, 1000), (64000, 128000, 3)), token),)))
    assert is_right
    assert launch.tokens == 16
    assert launch.pieces == 64 * 16


def test_items_of_very_different_lengths_are_unrolled() -> None:
    memory = whole(aligned(SIZE))
    items = rows((0, 0, 65536), *((65536 + n * 16, 65536 + n * 16, 16) for n in range(100)))
    assert strip_launches(Plan((Strip(NO_SLOT, rows((0, 0, 1)), TokenPattern(items, 131072, 131072)),)), memory, memory) is None


class TestSegments:
    """Layers that are allocations of their own."""

    segments = (Segment(0, 4096, 1 << 20), Segment(8192, 4096, 1 << 16))

    def test_a_slot_that_stays_in_a_layer_is_found_there(self) -> None:
        placement, flat = Placement(self.segments), Placement([Segment(0, 1 << 20, 1 << 30)])
        plan = Plan((Strip(rows((0, 0, 0), (8192, 4096, 0)), rows((0, 0, 1024), (3072, 1024, 1024))),))
        [launch] = strip_launches(plan, placement, flat) or []
        assert (launch.slots[:, 0] + placement.floor).tolist() == [1 << 20, 1 << 16]

    @pytest.mark.parametrize("place", [(3584, 0, 1024), (4096, 0, 16), (5000 // 16 * 16, 0, 16), (12288, 0, 16)])
    def test_one_that_leaves_it_is_not(self, place: tuple[int, int, int]) -> None:
        placement, flat = Placement(self.segments), Placement([Segment(0, 1 << 20, 1 << 30)])
        assert strip_launches(Plan((Strip(NO_SLOT, rows(place)),)), placement, flat) is None
        assert strip_launches(Plan((Strip(NO_SLOT, rows((place[1], place[0], place[2]))),)), flat, placement) is None

    def test_before_the_first_there_is_nothing(self) -> None:
        late, flat = Placement([Segment(4096, 4096, 1 << 20)]), Placement([Segment(0, 1 << 20, 1 << 30)])
        assert strip_launches(Plan((Strip(NO_SLOT, rows((0, 0, 16))),)), late, flat) is None
