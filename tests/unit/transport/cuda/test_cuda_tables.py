"""From runs to launches: whatever the lengths, the places and the gaps, the kernel's arithmetic copies exactly the runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_stand_in import run_launch
from kvbaton.errors import RangeError
from kvbaton.transport.base import Runs
from kvbaton.transport.cuda.launch import LINE_BYTES, Launch, Placement, Segment, launches_for

SIZE = 1 << 16
POISON = 0xA5


def aligned(count: int) -> npt.NDArray[np.uint8]:
    spare = np.empty(count + LINE_BYTES, np.uint8)
    return spare[-int(spare.ctypes.data) % LINE_BYTES :][:count]


def whole(memory: npt.NDArray[np.uint8], bias: int = 0) -> Placement:
    return Placement([Segment(0, len(memory) - bias, int(memory.ctypes.data) + bias)])


def runs_of(*rows: tuple[int, int, int]) -> Runs:
    return np.array(rows, np.uint64).reshape(-1, 3)


def copied(runs: Runs, biases: tuple[int, int] = (0, 0), leave_out: int = 0) -> tuple[bool, list[Launch]]:
    """Whether target memory is right after the launches, and the launches."""
    source, target = aligned(SIZE), aligned(SIZE)
    source[:] = np.random.default_rng(1).integers(0, POISON, SIZE, dtype=np.uint8)
    target[:] = POISON
    expected = target.copy()
    for at, to, count in runs.tolist():
        expected[to + biases[1] : to + biases[1] + count] = source[at + biases[0] : at + biases[0] + count]
    places = whole(source, biases[0]), whole(target, biases[1])
    launches = launches_for(runs[: len(runs) - leave_out], *places)
    for launch in launches:
        run_launch(launch, places[0].floor, places[1].floor)
    return np.array_equal(target, expected), launches


ROW_LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=20)


@given(ROW_LENGTHS, st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 17), st.integers(0, 17))
def test_any_runs_are_copied_exactly(lengths: list[int], unit: int, source_bias: int, target_bias: int) -> None:
    cell = 3008
    rows = [(n * cell, (len(lengths) - 1 - n) * cell, -(-length // unit) * unit) for n, length in enumerate(lengths)]
    assert copied(runs_of(*rows), (source_bias, target_bias))[0]


def test_control_a_run_that_is_left_out_is_noticed() -> None:
    runs = runs_of((0, 4096, 256), (1024, 0, 256))
    assert copied(runs)[0]
    assert not copied(runs, leave_out=1)[0]


@pytest.mark.parametrize(("length", "piece", "per_run"), [(256, 256, 1), (1024, 1024, 1), (1152, 128, 9), (128, 128, 1)])
def test_runs_of_one_length_need_one_word_each(length: int, piece: int, per_run: int) -> None:
    is_right, [launch] = copied(runs_of(*((n * 2048, n * length, length) for n in range(20))))
    assert is_right
    assert (launch.unit_bytes, launch.piece_bytes, launch.pieces_per_run) == (LINE_BYTES, piece, per_run)
    assert launch.is_even
    assert launch.offsets.nbytes == 8 * 20
    assert launch.lengths.nbytes == 0


def test_odd_runs_do_not_slow_down_the_others() -> None:
    is_right, launches = copied(runs_of((0, 0, 1024), (2048, 2048, 1024), (4097, 5000, 37)))
    assert is_right
    assert [(launch.unit_bytes, launch.pieces) for launch in launches] == [(LINE_BYTES, 2), (1, 1)]


@pytest.mark.parametrize(("bias", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_unit_is_the_largest_that_fits(bias: int, unit: int) -> None:
    is_right, [launch] = copied(runs_of((bias, 64, 512), (1024 + bias, 1024, 512)))
    assert is_right
    assert launch.unit_bytes == unit


def test_regions_beyond_half_a_word_get_a_word_per_offset() -> None:
    far = Placement([Segment(0, 1 << 40, 1 << 41)])
    near = Placement([Segment(0, 1 << 30, 1 << 12)])
    runs = runs_of(((1 << 40) - 4096, 4096, 4096))
    [launch] = launches_for(runs, far, near)
    assert (launch.offsets * LINE_BYTES).tolist() == [[(1 << 40) - 4096, 4096]]
    [launch] = launches_for(runs_of((1 << 20, 4096, 4096)), near, near)
    assert launch.offsets.ndim == 1


def test_nothing_to_copy_needs_no_launch() -> None:
    place = Placement([Segment(0, 64, 4096)])
    assert launches_for(runs_of(), place, place) == []


class TestGaps:
    """A region whose memory is in parts: two that touch, but lie apart here, a gap, and a third."""

    segments = (Segment(0, 4096, 1 << 20), Segment(4096, 4096, 1 << 30), Segment(16384, 4096, 1 << 16))

    @pytest.mark.parametrize("row", [(0, 0, 8192), (4000, 0, 200), (16384, 0, 4096), (8000, 0, 192), (9000, 0, 0)])
    def test_what_lies_in_memory_passes(self, row: tuple[int, int, int]) -> None:
        Placement(self.segments).check(runs_of(row), 0, "source")

    @pytest.mark.parametrize("row", [(8000, 0, 200), (8192, 0, 1), (16000, 0, 400), (0, 0, 20000), (20000, 0, 1000)])
    def test_what_does_not_is_refused_by_number(self, row: tuple[int, int, int]) -> None:
        with pytest.raises(RangeError, match=r"run 1: source offset .* lies in a gap of the source region"):
            Placement(self.segments).check(runs_of((0, 0, 1), row), 0, "source")

    def test_a_region_that_starts_with_a_gap_is_checked_too(self) -> None:
        with pytest.raises(RangeError, match="gap of the target region"):
            Placement([Segment(4096, 4096, 1 << 20)]).check(runs_of((0, 0, 8)), 1, "target")

    @given(st.integers(0, 8191), st.integers(1, 8192))
    def test_runs_are_cut_where_memory_is(self, offset: int, count: int) -> None:
        placement = Placement(self.segments)
        count = min(count, 8192 - offset)
        pieces = placement.cut(runs_of((offset, 100, count)), 0)
        assert int(pieces[:, 2].sum()) == count
        for at, to, length in pieces.tolist():
            assert to - 100 == at - offset
            first, last = (placement.floor + int(placement.locate(np.array([x], np.uint64))[0]) for x in (at, at + length - 1))
            assert last - first == length - 1
            segment = self.segments[at >= 4096]
            assert first == segment.address + at - segment.offset
