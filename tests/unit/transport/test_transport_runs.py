"""The check of runs and the cursor that cuts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import RangeError
from kvbaton.transport.base import Runs
from kvbaton.transport.runs import MAX_SLICE_RUNS, Loops, RunCursor, check_runs, load_loops

ROWS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 60)), max_size=12)
LOOPS = load_loops()
WAYS = pytest.mark.parametrize("loops", [None, LOOPS] if LOOPS else [None], ids=lambda loops: "C" if loops else "Python")
EDGES = st.sampled_from([0, 1, 99, 100, 2**63, 2**64 - 100, 2**64 - 1])


def runs_of(rows: list[tuple[int, int, int]]) -> Runs:
    return np.array(rows, np.uint64).reshape(-1, 3)


def is_legal(rows: list[tuple[int, int, int]], source_bytes: int, target_bytes: int) -> bool:
    """The rule in plain words: inside both regions, no target byte twice."""
    if any(source + count > source_bytes or target + count > target_bytes for source, target, count in rows):
        return False
    touched = [byte for _, target, count in rows for byte in range(target, target + count)]
    return len(touched) == len(set(touched))


@WAYS
@given(ROWS)
def test_check_agrees_with_the_rule_in_plain_words(loops: Loops | None, rows: list[tuple[int, int, int]]) -> None:
    if is_legal(rows, 130, 120):
        assert check_runs(runs_of(rows), 130, 120, loops).tolist() == [list(row) for row in rows if row[2]]
    else:
        with pytest.raises(RangeError):
            check_runs(runs_of(rows), 130, 120, loops)


@WAYS
@given(EDGES, EDGES, EDGES)
def test_sums_near_the_limit_do_not_wrap(loops: Loops | None, source: int, target: int, count: int) -> None:
    legal = source + count <= 100 and target + count <= 100
    if legal:
        check_runs(runs_of([(source, target, count)]), 100, 100, loops)
    else:
        with pytest.raises(RangeError, match="run 0"):
            check_runs(runs_of([(source, target, count)]), 100, 100, loops)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 70), st.data())
def test_slices_put_together_are_the_runs(lengths: list[int], max_bytes: int, data: st.DataObject) -> None:
    rows = [(1000 * n, 2000 * n, count) for n, count in enumerate(lengths)]
    cursor = RunCursor(runs_of(rows))
    seen: list[tuple[int, int]] = []
    while cursor.remaining_bytes:
        window = cursor.peek(max_bytes)
        pairs = [(source + n, target + n) for source, target, count in window.tolist() for n in range(count)]
        assert 0 < len(pairs) <= max_bytes
        assert window[:, 2].all()
        taken = data.draw(st.integers(1, len(pairs)))
        seen += pairs[:taken]
        cursor.advance(taken)
    assert seen == [(source + n, target + n) for source, target, count in rows for n in range(count)]
    assert len(cursor.peek(max_bytes)) == 0


def test_a_slice_has_a_bounded_number_of_runs() -> None:
    count = 3 * MAX_SLICE_RUNS
    cursor = RunCursor(np.stack([np.arange(count), np.arange(count), np.ones(count)], axis=1).astype(np.uint64))
    assert [len(cursor.peek(1 << 30)), cursor.total_bytes] == [MAX_SLICE_RUNS, count]
    cursor.advance(MAX_SLICE_RUNS)
    assert cursor.peek(1 << 30)[0].tolist() == [MAX_SLICE_RUNS, MAX_SLICE_RUNS, 1]


@WAYS
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 7))
def test_pages_of_one_size_in_any_order_are_checked_like_any_runs(
    loops: Loops | None, slots: list[int], page: int, start: int
) -> None:
    rows = [(0, start + slot * page, page) for slot in slots]
    if len(set(slots)) == len(slots):
        assert len(check_runs(runs_of(rows), 8, 400, loops)) == len(rows)
    else:
        with pytest.raises(RangeError, match="overlap"):
            check_runs(runs_of(rows), 8, 400, loops)


@pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")
@given(ROWS, st.integers(0, 3))
def test_the_loop_in_c_says_yes_only_to_what_is_right_and_copies_it(rows: list[tuple[int, int, int]], way: int) -> None:
    """Whatever lies how in memory: rows or columns in one piece, in steps, backwards. What it leaves open, Python decides."""
    assert LOOPS is not None
    runs = runs_of(rows)
    given_runs = [runs, np.asfortranarray(runs), np.repeat(runs, 2, axis=0)[::2], runs[::-1].copy()[::-1]][way]
    checked = LOOPS.checked(given_runs, 130, 120)
    if checked is not None:
        assert is_legal(rows, 130, 120)
        assert checked.tolist() == [list(row) for row in rows]
        assert checked.flags.f_contiguous
        assert not np.shares_memory(checked, given_runs)


@pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")
def test_the_loop_in_c_settles_pages_in_order_and_in_any_order_but_not_numbers_that_lie_askew() -> None:
    assert LOOPS is not None
    pages = runs_of([(n, slot * 24 + 8, 24) for n, slot in enumerate([7, 3, 5, 0, 200])])
    assert LOOPS.checked(pages, 30, 5000) is not None
    assert LOOPS.checked(pages[[3, 1, 2, 0]] + np.array([0, 1, 0], np.uint64), 30, 5000) is not None
    assert LOOPS.checked(pages[[0, 0]], 30, 5000) is None
    askew = np.frombuffer(b"\0" + pages.tobytes(), np.uint8)[1:].view(np.uint64).reshape(-1, 3)
    assert LOOPS.checked(askew, 30, 5000) is None
    assert check_runs(askew, 30, 5000, LOOPS).tolist() == pages.tolist()


def test_a_batch_that_fits_is_handed_out_as_it_is() -> None:
    runs = check_runs(runs_of([(n, n * 10, 10) for n in range(3000)]), 10_000, 40_000)
    assert RunCursor(runs).peek(1 << 20, 4096) is runs
    assert len(RunCursor(runs).peek(1 << 20)) == MAX_SLICE_RUNS
    assert RunCursor(runs).peek(25, 4096).tolist() == [[0, 0, 10], [1, 10, 10], [2, 20, 5]]
