"""Copies of many runs at once, in C and without, held against a plain loop."""

from __future__ import annotations

import logging
import os
import pwd
import select
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.strips import Plan, Strip, TokenPattern, unroll
from kvbaton.errors import RangeError
from kvbaton.transport.base import Runs
from kvbaton.transport.runs import CopyCrew, RunCopier, RunCursor, load_loops

Bytes = npt.NDArray[np.uint8]

CELL = 40_000
LOOPS = load_loops()
WAYS = [
    pytest.param(0, id="no compiler"),
    pytest.param(1, id="C", marks=pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")),
    pytest.param(3, id="C, three threads", marks=pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")),
]


def copy(source: Bytes, target: Bytes, runs: Runs, threads: int, step: tuple[int, int] = (1 << 40, 1 << 40)) -> None:
    """Copy all of `runs`: without the loop in C (0 threads), or with it, at most `step` bytes and runs at a time."""
    if not threads:
        RunCopier(source, target).copy(runs)
        return
    assert LOOPS is not None
    crew, cursor = CopyCrew(LOOPS, threads - 1), RunCursor(runs)
    copier = RunCopier(source, target, crew)
    while cursor.remaining_bytes:
        count = copier.copy_on(cursor, *step)
        assert 0 < count <= step[0]
        cursor.advance(count)
    crew.close()
    crew.close()


@pytest.mark.parametrize("threads", WAYS)
@pytest.mark.parametrize("order", ["C", "F"])
@given(
    st.lists(st.sampled_from([1, 7, 64, 100, 4096, 33_000, 40_000]), min_size=1, max_size=40),
    st.tuples(st.sampled_from([1000, 99_999, 600_000, 1 << 40]), st.sampled_from([1, 3, 1 << 40])),
    st.integers(0, 2**32),
)
def test_every_byte_lands_where_a_loop_puts_it(
    threads: int, order: str, sizes: list[int], step: tuple[int, int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    source = random.integers(0, 255, len(sizes) * CELL, dtype=np.uint8)
    target, expected = np.full_like(source, 255), np.full_like(source, 255)
    source.flags.writeable = False
    starts = np.stack([random.permutation(len(sizes)), random.permutation(len(sizes))], axis=1) * CELL
    runs = np.column_stack([starts, sizes]).astype(np.uint64)
    copy(source, target, np.asfortranarray(runs) if order == "F" else runs, threads, step)
    for at, to, count in runs.tolist():
        expected[to : to + count] = source[at : at + count]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("threads", WAYS)
def test_runs_at_odd_offsets_and_at_both_ends(threads: int) -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    runs = np.array([[3, 0, 8], [248, 9, 8], [17, 30, 8], [0, 248, 8], [99, 101, 8]], np.uint64)
    copy(source, target, runs, threads)
    for at, to in ((3, 0), (248, 9), (17, 30), (0, 248), (99, 101)):
        assert np.array_equal(target[to : to + 8], source[at : at + 8])
    assert target.astype(bool).sum() == 39


@pytest.mark.parametrize("threads", WAYS[1:])
def test_one_long_run_is_shared_by_threads(threads: int) -> None:
    source = np.random.default_rng(1).integers(0, 255, 5_000_001, dtype=np.uint8)
    target = np.zeros_like(source)
    copy(source, target, np.array([[0, 0, len(source)]], np.uint64), threads, (2_000_003, 10))
    assert np.array_equal(target, source)


def test_without_a_compiler_there_is_no_loop_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvbaton.transport"):
        assert load_loops(tmp_path, compiler="no-such-compiler") is None
        assert load_loops(tmp_path, compiler="false") is None
    assert "there is no no-such-compiler" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_directory_there_are_no_loops(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a container whose user is in no list of users."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with caplog.at_level(logging.INFO, "kvbaton.transport"):
        assert load_loops() is None
    assert "home directory" in caplog.text


@pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")
def test_it_is_compiled_once(tmp_path: Path) -> None:
    assert load_loops(tmp_path) is not None
    assert len(list(tmp_path.iterdir())) == 1
    assert load_loops(tmp_path, compiler="no-such-compiler") is not None


def test_a_place_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.INFO, "kvbaton.transport"):
        assert load_loops(tmp_path) is None
    assert "another user" in caplog.text


@pytest.mark.parametrize(
    ("rows", "most", "moved"),
    [
        ([[4, 0, 8], [0, 8, 4]], 12, 12),
        ([[4, 0, 8], [0, 8, 4]], 11, 0),
        ([[0, 8, 4], [4, 0, 4]], 12, 8),
        ([[0, 0, 16]], 16, 16),
        ([[1, 0, 16]], 16, 0),
        ([[0, 1, 16]], 16, 0),
        ([[0, 0, 4], [8, 3, 4]], 16, 0),
        ([[0, 0, 0], [8, 3, 4]], 16, 0),
        ([[2**64 - 1, 0, 4]], 16, 0),
        ([], 16, 0),
    ],
)
def test_a_few_runs_are_copied_at_once_or_not_at_all(rows: list[list[int]], most: int, moved: int) -> None:
    """What leaves a region, overlaps, is empty or is too long copies nothing: it is refused by name where that is checked."""
    loops = load_loops()
    if loops is None:
        pytest.skip("no C compiler")
    source, target = np.arange(1, 17, dtype=np.uint8), np.zeros(16, np.uint8)
    crew = CopyCrew(loops, 0)
    copier = RunCopier(source, target, crew)
    assert copier.move_few(np.array(rows, np.uint64).reshape(-1, 3), most) == moved
    expected = np.zeros(16, np.uint8)
    for of, at, count in rows if moved else ():
        expected[at : at + count] = source[of : of + count]
    assert target.tolist() == expected.tolist()
    crew.close()


def test_many_runs_are_left_to_the_mover() -> None:
    loops = load_loops()
    if loops is None:
        pytest.skip("no C compiler")
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    crew = CopyCrew(loops, 0)
    runs = np.stack([np.arange(0, 4096, 4), np.arange(0, 4096, 4), np.full(1024, 4)], axis=1).astype(np.uint64)
    assert RunCopier(source, target, crew).move_few(runs, 4096) == 0
    assert not target.any()
    assert RunCopier(source, target, crew).move_few(runs[::2], 4096) == 2048
    runs.flags.writeable = False
    assert RunCopier(source, target, crew).move_few(runs[:512], 4096) == 2048
    assert RunCopier(source, target).move_few(runs[:1], 4096) == 0
    crew.close()


needs_compiler = pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")


def begin(source: Bytes, target: Bytes, runs: Runs | Plan, helpers: int = 1, most: tuple[int, int] = (1 << 30, 1 << 20)) -> int:
    """Begin to copy, wait until a byte is there, look that this was the end, and give everything back."""
    assert LOOPS is not None
    outlet, inlet = os.pipe()
    crew = CopyCrew(LOOPS, helpers, begins=True)
    try:
        count = RunCopier(source, target, crew).begin(runs, *most, inlet)
        if count:
            assert select.select([outlet], [], [], 60)[0], "no byte came"
            assert os.read(outlet, 2) == b"\0"
        else:
            assert not select.select([outlet], [], [], 0)[0]
        assert crew.has_ended()
        crew.wait_end()
        return count
    finally:
        crew.close()
        os.close(inlet)
        os.close(outlet)


@needs_compiler
@pytest.mark.parametrize("helpers", [0, 1, 3])
@given(st.lists(st.sampled_from([1, 7, 4096, 33_000, 40_000]), min_size=1, max_size=80), st.integers(0, 2**32))
def test_what_is_begun_lands_where_a_loop_puts_it(helpers: int, sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random.integers(0, 255, len(sizes) * CELL, dtype=np.uint8)
    target, expected = np.full_like(source, 255), np.full_like(source, 255)
    sources, targets = random.permutation(len(sizes)) * CELL, np.arange(len(sizes)) * CELL
    runs = np.column_stack([sources, targets, sizes]).astype(np.uint64)
    for of, at, count in runs.tolist():
        expected[at : at + count] = source[of : of + count]
    assert begin(source, target, runs, helpers) == sum(sizes)
    assert np.array_equal(target, expected)


@needs_compiler
@pytest.mark.parametrize(
    "rows",
    [
        [[1, 0, 16]],
        [[0, 1, 16]],
        [[0, 0, 4], [8, 3, 4]],
        [[0, 0, 0], [8, 3, 4]],
        [[2**64 - 1, 0, 4]],
        [[0, 0, 4], [8, 8, 5]],
        [[0, 0, 1], [1, 1, 1], [2, 2, 1], [3, 3, 1]],
        [],
    ],
)
def test_what_cannot_be_seen_to_be_right_is_not_begun(rows: list[list[int]]) -> None:
    source, target = np.arange(1, 17, dtype=np.uint8), np.zeros(16, np.uint8)
    most = (8, 3) if len(rows) in (2, 4) else (1 << 20, 1 << 20)
    assert begin(source, target, np.array(rows, np.uint64).reshape(-1, 3), most=most) == 0
    assert not target.any()
    assert begin(source, target, np.array([[0, 0, 4], [8, 8, 4]], np.uint64), most=(8, 3)) == 8  # the control
    assert target.tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 12, 0, 0, 0, 0]


@needs_compiler
@pytest.mark.parametrize(("most", "is_begun"), [((1 << 20, 1 << 10), True), ((1599, 1 << 10), False), ((1 << 20, 199), False)])
def test_a_plan_is_begun_as_it_is(most: tuple[int, int], is_begun: bool) -> None:
    source, target = np.arange(4000, dtype=np.uint8), np.full(4000, 255, np.uint8)
    pattern = TokenPattern(np.array([[0, 0, 8]]), 16, 16)
    plan = Plan((Strip(np.array([[0, 0, 0], [2000, 2000, 0]]), np.array([[0, 800, 50], [800, 0, 50]]), pattern),))
    expected = target.copy()
    for of, at, count in unroll(plan).tolist() if is_begun else ():
        expected[at : at + count] = source[of : of + count]
    # Places in no order are not seen to stand apart: that plan goes the usual way.
    assert begin(source, target, plan, most=most) == 0
    ordered = Plan((Strip(plan.strips[0].slots, plan.strips[0].places[::-1].copy(), pattern),))
    assert begin(source, target, ordered, most=most) == (1600 if is_begun else 0)
    assert np.array_equal(target, expected)


@needs_compiler
def test_a_plan_with_a_pattern_of_no_items_is_not_begun() -> None:
    """Its tokens are no bytes."""
    source, target = np.arange(4000, dtype=np.uint8), np.zeros(4000, np.uint8)
    empty = Strip(np.array([[0, 0, 0]]), np.array([[0, 0, 100]]), TokenPattern(np.zeros((0, 3), np.int64), 16, 16))
    whole = Strip(np.array([[0, 0, 0]]), np.array([[2000, 2000, 400]]), None)
    assert begin(source, target, Plan((empty, whole))) == 0
    assert not target.any()
    assert begin(source, target, Plan((whole,))) == 400  # the control


@needs_compiler
@pytest.mark.parametrize("places", [np.zeros(3, np.int64), np.full((1, 3), np.nan), np.zeros((1, 2), np.int64)])
def test_a_plan_of_other_arrays_is_refused_by_name(places: Any) -> None:
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(RangeError, match=r"int64 arrays of shape \(n, 3\)"):
        begin(source, target, Plan((Strip(np.array([[0, 0, 0]]), places, None),)))
    assert begin(source, target, np.array(5, np.uint64)) == 0


@needs_compiler
def test_a_crew_that_was_closed_has_ended() -> None:
    assert LOOPS is not None
    crew = CopyCrew(LOOPS, 1, begins=True)
    crew.close()
    crew.wait_end()
    assert crew.has_ended()


@needs_compiler
@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_the_end_waits_for_what_was_begun(helpers: int) -> None:
    assert LOOPS is not None
    source = np.arange(4 << 20, dtype=np.uint8)
    outlet, inlet = os.pipe()
    for _ in range(20):  # the end comes at any time: before a helper has begun, and while the last one copies
        target = np.zeros(4 << 20, np.uint8)
        crew = CopyCrew(LOOPS, helpers, begins=True)
        assert RunCopier(source, target, crew).begin(np.array([[0, 0, 4 << 20]], np.uint64), 4 << 20, 1, inlet) == 4 << 20
        crew.close()
        assert np.array_equal(source, target)
        assert os.read(outlet, 2) == b"\0"
    os.close(inlet)
    os.close(outlet)


@needs_compiler
def test_a_crew_without_the_extra_helper_begins_nothing() -> None:
    assert LOOPS is not None
    crew = CopyCrew(LOOPS, 1)
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    assert RunCopier(source, target, crew).begin(np.array([[0, 0, 16]], np.uint64), 16, 1, -1) == 0
    assert RunCopier(source, target).begin(np.array([[0, 0, 16]], np.uint64), 16, 1, -1) == 0
    assert not target.any()
    crew.close()
