"""Sums of pieces: the loop in C and zlib give the same values, and neither reads outside the region."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.checks import BlockSums, Pieces
from kvbaton.errors import RangeError
from kvbaton.transport.runs import Loops, RegionSummer, load_loops

Region = npt.NDArray[np.uint8]
LOOPS = load_loops()
ALL_WAYS = 2


class OneWay:
    """The loops in C with only so many ways to sum: 0 the table, 1 folding too, 2 wide folding or the instruction too."""

    can_sum = True

    def __init__(self, loops: Loops, ways: int) -> None:
        self._loops = loops
        self._ways = ways
        self.name = ("table", "folding", "all")[ways]

    def sums(self, start: int, region_bytes: int, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        self._loops.limit_sums(self._ways)
        try:
            return self._loops.sums(start, region_bytes, pieces, ends, value)
        finally:
            self._loops.limit_sums(ALL_WAYS)

    def sum_blocks(
        self, start: int, region_bytes: int, grid: ctypes.Array[ctypes.c_int64], blocks: BlockSums, most_bytes: int
    ) -> tuple[list[int], int] | None:
        self._loops.limit_sums(self._ways)
        try:
            return self._loops.sum_blocks(start, region_bytes, grid, blocks, most_bytes)
        finally:
            self._loops.limit_sums(ALL_WAYS)


HERE = [OneWay(LOOPS, ways) for ways in range(ALL_WAYS + 1) if LOOPS.limit_sums(ways) == ways] if LOOPS else []
WAYS = pytest.mark.parametrize("loops", [None, *HERE], ids=lambda loops: f"C, {loops.name}" if loops else "Python")
REGION = np.random.default_rng(7).integers(0, 256, 5000, np.uint8)
SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([63, 64, 65, 128, 255, 256, 257, 512, 575, 576, 577, 1024, 4031, 4032, 4040, 4095, 4096]),
)
PIECES = st.lists(st.tuples(st.integers(0, 900), SIZES), max_size=9)


def sum_of(loops: Loops | OneWay | None, pieces: list[tuple[int, int]], value: int = 0, region: Region = REGION) -> int:
    (value,) = sums_of(loops, pieces, [len(pieces)], value, region)
    return value


def sums_of(
    loops: Loops | OneWay | None, pieces: list[tuple[int, int]], ends: list[int], value: int = 0, region: Region = REGION
) -> list[int]:
    summer = RegionSummer(region.data, cast(Loops | None, loops))
    return summer.sums(np.array(pieces, np.int64).reshape(-1, 2), ends, value)


@WAYS
@given(PIECES, st.integers(0, 2**32 - 1))
def test_a_sum_is_that_of_zlib_over_all_pieces_in_order(
    loops: Loops | OneWay | None, pieces: list[tuple[int, int]], value: int
) -> None:
    whole = b"".join(REGION[offset : offset + size].tobytes() for offset, size in pieces)
    assert sum_of(loops, pieces, value) == zlib.crc32(whole, value)


@WAYS
@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_piece_of_every_length_has_the_sum_of_zlib(loops: Loops | OneWay | None, first: int) -> None:
    """Streams, their tails, steps of eight bytes and single ones begin and end at every place there is."""
    pieces = [(first, size) for size in range(4300)]
    whole = REGION.tobytes()
    expected = [zlib.crc32(whole[first : first + size]) for _, size in pieces]
    assert sums_of(loops, pieces, list(range(1, len(pieces) + 1))) == expected


@WAYS
@given(PIECES, st.integers(0, 9))
def test_a_sum_can_be_continued_between_any_two_pieces(
    loops: Loops | OneWay | None, pieces: list[tuple[int, int]], cut: int
) -> None:
    assert sum_of(loops, pieces[cut:], sum_of(loops, pieces[:cut])) == sum_of(loops, pieces)


@WAYS
@given(PIECES, st.lists(st.integers(0, 9), max_size=4), st.integers(0, 2**32 - 1))
def test_parts_are_summed_apart_and_the_first_one_continues(
    loops: Loops | OneWay | None, pieces: list[tuple[int, int]], cuts: list[int], value: int
) -> None:
    ends = [*sorted(min(cut, len(pieces)) for cut in cuts), len(pieces)]
    parts = [pieces[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    expected = [sum_of(loops, part, 0 if index else value) for index, part in enumerate(parts)]
    assert sums_of(loops, pieces, ends, value) == expected


@WAYS
@pytest.mark.parametrize("at", [100, 163, 164, 227, 228, 4195])
def test_control_one_changed_bit_changes_the_sum(loops: Loops | OneWay | None, at: int) -> None:
    changed = REGION.copy()
    changed[at] ^= 1
    pieces = [(100, 64), (164, 4032)]
    assert sum_of(loops, pieces, region=changed) != sum_of(loops, pieces)


@WAYS
@pytest.mark.parametrize("size", [(256 << 10) - 1, 256 << 10, (256 << 10) + 1])
@pytest.mark.parametrize("at", [0, 8191, 8192, -1])
def test_control_a_changed_bit_shows_in_sums_with_and_without_the_interpreters_lock(
    loops: Loops | OneWay | None, size: int, at: int
) -> None:
    region = np.resize(REGION, size)
    pieces = [(0, 8192), (8192, size - 8192)]
    whole = sums_of(loops, pieces, [1, 2], region=region)
    assert whole == [zlib.crc32(region[:8192].tobytes()), zlib.crc32(region[8192:].tobytes())]
    region[at] ^= 1
    assert sums_of(loops, pieces, [1, 2], region=region) != whole


@WAYS
def test_more_pieces_than_are_summed_at_once(loops: Loops | OneWay | None) -> None:
    pieces = [(at, 3) for at in range(1025)]
    assert sum_of(loops, pieces) == zlib.crc32(b"".join(REGION[at : at + 3].tobytes() for at in range(1025)))


@WAYS
@pytest.mark.parametrize("piece", [(4999, 2), (-1, 1), (0, -1), (5001, 0), (0, 5001), (2**62, 2**62), (1, 2**63 - 1)])
def test_a_piece_outside_the_region_is_refused_before_anything_is_read(
    loops: Loops | OneWay | None, piece: tuple[int, int]
) -> None:
    with pytest.raises(RangeError, match=rf"offset {piece[0]} with {piece[1]} bytes .* 5000 bytes"):
        sum_of(loops, [(0, 5000), piece])


def test_a_loop_that_does_not_sum_as_zlib_does_is_not_used() -> None:
    class Wrong:
        can_sum = False

        def sums(self, *_: object) -> list[int]:
            raise AssertionError("it must not be asked")

    assert sum_of(Wrong(), [(3, 400)]) == zlib.crc32(REGION[3:403])  # type: ignore[arg-type]


def test_the_compiled_loop_agrees_with_zlib_here() -> None:
    assert LOOPS is None or LOOPS.can_sum
