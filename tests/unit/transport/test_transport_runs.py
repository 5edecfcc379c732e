"""The check of runs and the cursor that cuts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import RangeError
from kvbaton.transport.base import Runs
from kvbaton.transport.runs import MAX_SLICE_RUNS, RunCursor, check_runs

ROWS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 60)), max_size=12)
EDGES = st.sampled_from([0, 1, 99, 100, 2**63, 2**64 - 100, 2**64 - 1])


def runs_of(rows: list[tuple[int, int, int]]) -> Runs:
    return np.array(rows, np.uint64).reshape(-1, 3)


def is_legal(rows: list[tuple[int, int, int]], source_bytes: int, target_bytes: int) -> bool:
    """The rule in plain words: inside both regions, no target byte twice."""
    if any(source + count > source_bytes or target + count > target_bytes for source, target, count in rows):
        return False
    touched = [byte for _, target, count in rows for byte in range(target, target + count)]
    return len(touched) == len(set(touched))


@given(ROWS)
def test_check_agrees_with_the_rule_in_plain_words(rows: list[tuple[int, int, int]]) -> None:
    if is_legal(rows, 130, 120):
        assert check_runs(runs_of(rows), 130, 120).tolist() == [list(row) for row in rows if row[2]]
    else:
        with pytest.raises(RangeError):
            check_runs(runs_of(rows), 130, 120)


@given(EDGES, EDGES, EDGES)
def test_sums_near_the_limit_do_not_wrap(source: int, target: int, count: int) -> None:
    legal = source + count <= 100 and target + count <= 100
    if legal:
        check_runs(runs_of([(source, target, count)]), 100, 100)
    else:
        with pytest.raises(RangeError, match="run 0"):
            check_runs(runs_of([(source, target, count)]), 100, 100)


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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 7))
def test_pages_of_one_size_in_any_order_are_checked_like_any_runs(slots: list[int], page: int, start: int) -> None:
    rows = [(0, start + slot * page, page) for slot in slots]
    if len(set(slots)) == len(slots):
        assert len(check_runs(runs_of(rows), 8, 400)) == len(rows)
    else:
        with pytest.raises(RangeError, match="overlap"):
            check_runs(runs_of(rows), 8, 400)


def test_a_batch_that_fits_is_handed_out_as_it_is() -> None:
    runs = check_runs(runs_of([(n, n * 10, 10) for n in range(3000)]), 10_000, 40_000)
    assert RunCursor(runs).peek(1 << 20, 4096) is runs
    assert len(RunCursor(runs).peek(1 << 20)) == MAX_SLICE_RUNS
    assert RunCursor(runs).peek(25, 4096).tolist() == [[0, 0, 10], [1, 10, 10], [2, 20, 5]]
