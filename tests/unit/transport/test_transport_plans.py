"""Plans in short form: checked as their runs are, unrolled slice by slice, and copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.core.strips import NO_SLOT, Numbers, Plan, Strip, TokenPattern, count_bytes, unroll
from kvbaton.errors import RangeError
from kvbaton.transport import checks
from kvbaton.transport.checks import check_plan
from kvbaton.transport.runs import CopyCrew, Loops, RunCopier, RunCursor, StripTable, check_runs, load_loops

LOOPS = load_loops()
WAYS = pytest.mark.parametrize("loops", [None, LOOPS] if LOOPS else [None], ids=lambda loops: "C" if loops else "Python")
needs_loops = pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")

SOURCE_BYTES, TARGET_BYTES = 130, 120


def _rows(most: int, most_count: int, least: int = 1) -> st.SearchStrategy[Numbers]:
    row = st.tuples(st.integers(0, most), st.integers(0, most), st.integers(0, most_count))
    return st.lists(row, min_size=least, max_size=4).map(lambda rows: np.array(rows, np.int64).reshape(-1, 3))


PATTERNS = st.builds(TokenPattern, _rows(12, 4), st.integers(0, 20), st.integers(0, 20))
STRIPS = st.one_of(
    st.builds(Strip, _rows(60, 0, 0), _rows(60, 20, 0), st.none()),
    st.builds(Strip, _rows(60, 0), _rows(40, 4), PATTERNS),
)
PLANS = st.lists(STRIPS, max_size=3).map(lambda strips: Plan(tuple(strips)))


def _tidy(slots: list[int], places: list[int], tokens: int, items: int, item_bytes: int) -> Plan:
    """Nearly right, as made by a planner: tokens in places, places in slots, on both sides."""
    step = items * item_bytes
    pattern = TokenPattern(np.array([[n * item_bytes, n * item_bytes, item_bytes] for n in range(items)]), step, step)
    size = tokens * step
    rows = np.array([[n * size, n * size, tokens] for n in places])
    width = (max(places) + 1) * size
    return Plan((Strip(np.array([[n * width, n * width, 0] for n in slots]), rows, pattern),))


TIDY = st.builds(
    _tidy,
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)


def rows_of(plan: Plan) -> list[tuple[int, int, int]]:
    """The runs of a plan by its definition, in whole numbers without a limit."""
    rows = []
    for strip in plan.strips:
        for slot_source, slot_target, _ in strip.slots.tolist():
            for source, target, count in strip.places.tolist():
                at = slot_source + source, slot_target + target
                if strip.pattern is None:
                    rows.append((*at, count))
                    continue
                steps = strip.pattern.source_step, strip.pattern.target_step
                for token in range(count):
                    for item_source, item_target, size in strip.pattern.items.tolist():
                        rows.append((at[0] + token * steps[0] + item_source, at[1] + token * steps[1] + item_target, size))
    return rows


def is_legal(rows: list[tuple[int, int, int]], source_bytes: int, target_bytes: int) -> bool:
    """The rule in plain words: inside both regions, no target byte twice."""
    if any(source + count > source_bytes or target + count > target_bytes for source, target, count in rows):
        return False
    touched = [byte for _, target, count in rows for byte in range(target, target + count)]
    return len(touched) == len(set(touched))


@WAYS
@settings(max_examples=400, deadline=None)
@given(plan=st.one_of(PLANS, TIDY))
def test_check_agrees_with_the_rule_in_plain_words_and_with_the_check_of_runs(loops: Loops | None, plan: Plan) -> None:
    rows = rows_of(plan)
    assert unroll(plan).tolist() == [list(row) for row in rows]
    if is_legal(rows, SOURCE_BYTES, TARGET_BYTES):
        checked = check_plan(plan, SOURCE_BYTES, TARGET_BYTES, loops)
        assert unroll(checked.plan).tolist() == [list(row) for row in rows if row[2]]
        check_runs(unroll(plan), SOURCE_BYTES, TARGET_BYTES, loops)
    else:
        with pytest.raises(RangeError):
            check_plan(plan, SOURCE_BYTES, TARGET_BYTES, loops)
        with pytest.raises(RangeError):
            check_runs(unroll(plan), SOURCE_BYTES, TARGET_BYTES, loops)


@needs_loops
@settings(max_examples=600, deadline=None)
@given(st.one_of(PLANS, TIDY))
def test_the_loop_in_c_passes_only_what_is_right(plan: Plan) -> None:
    assert LOOPS is not None
    if LOOPS.passes(StripTable(plan), SOURCE_BYTES, TARGET_BYTES):
        assert is_legal(rows_of(plan), SOURCE_BYTES, TARGET_BYTES)


EDGES = [0, 1, 2, 7, 50, 99, 100, 101, 2**31, 2**62, 2**63 - 1, -1, -50, -(2**63)]


def _right() -> Plan:
    """Two layers of three blocks, of two tokens with two items each; and two runs. Inside 100 bytes on both sides."""
    pattern = TokenPattern(np.array([[0, 0, 2], [3, 2, 2]]), 6, 4)
    strip = Strip(np.array([[0, 0, 0], [40, 40, 0]]), np.array([[0, 0, 2], [12, 10, 2], [24, 20, 1]]), pattern)
    return Plan((strip, Strip(NO_SLOT, np.array([[80, 80, 5], [90, 90, 10]]))))


def _put(plan: Plan, strip: int, array: str, row: int, column: int, value: int) -> Plan:
    changed = plan.strips[strip]
    if array == "steps":
        assert changed.pattern is not None
        steps = [changed.pattern.source_step, changed.pattern.target_step]
        steps[column % 2] = value
        changed = dataclasses.replace(changed, pattern=TokenPattern(changed.pattern.items, *steps))
    elif array == "items":
        assert changed.pattern is not None
        items = changed.pattern.items.copy()
        items[row % len(items), column] = value
        changed = dataclasses.replace(changed, pattern=dataclasses.replace(changed.pattern, items=items))
    else:
        numbers = getattr(changed, array).copy()
        numbers[row % len(numbers), column if array == "places" else column % 2] = value
        changed = dataclasses.replace(changed, **{array: numbers})
    return Plan((*plan.strips[:strip], changed, *plan.strips[strip + 1 :]))


@WAYS
@settings(max_examples=500, deadline=None)
@given(
    where=st.one_of(
        st.tuples(st.just(0), st.sampled_from(["slots", "places", "items", "steps"])),
        st.tuples(st.just(1), st.sampled_from(["slots", "places"])),
    ),
    row=st.integers(0, 2),
    column=st.integers(0, 2),
    value=st.one_of(st.sampled_from(EDGES), st.integers(0, 100)),
)
def test_a_plan_with_one_wrong_number_is_refused_as_its_runs_are(
    loops: Loops | None, where: tuple[int, str], row: int, column: int, value: int
) -> None:
    plan = _put(_right(), *where, row, column, value)
    is_count = where[1] == "places" and column == 2
    # Counts beyond any region cannot be written down run by run: they are out of range, or overlap, whatever the rest is.
    legal = value >= 0 and not (is_count and value > 1000) and is_legal(rows_of(plan), 100, 100)
    if legal:
        assert count_bytes(check_plan(plan, 100, 100, loops).plan) == sum(count for *_, count in rows_of(plan))
    else:
        with pytest.raises(RangeError):
            check_plan(plan, 100, 100, loops)


@WAYS
def test_the_right_one_is_accepted_whole_and_regions_one_byte_shorter_are_refused(loops: Loops | None) -> None:
    plan = _right()
    assert unroll(check_plan(plan, 100, 100, loops).plan).tolist() == unroll(plan).tolist()
    for sizes, words in (((99, 100), "strip 1: source offsets up to 100"), ((100, 99), "strip 1: target offsets up to 100")):
        with pytest.raises(RangeError, match=words):
            check_plan(plan, *sizes, loops)


@WAYS
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (_put(_right(), 0, "slots", 1, 0, -1), "strip 0: source slot -1 lies outside the source region"),
        (_put(_right(), 1, "places", 0, 1, 101), "strip 1: target place 101 lies outside the target region"),
        (_put(_right(), 0, "items", 0, 1, 2**62), "strip 0: target item 4611686018427387904 lies outside"),
        (_put(_right(), 0, "steps", 0, 1, -4), "a step from token to token is .6, -4.; it must be at least 0"),
        (_put(_right(), 0, "steps", 0, 0, 2**63), "a step from token to token"),
        (_put(_right(), 0, "slots", 1, 1, 10), "target runs overlap"),
        (_put(_right(), 0, "steps", 0, 1, 0), "target runs overlap"),
        (Plan((_right().strips[0],) * 2), "target runs overlap"),
        (Plan((Strip(NO_SLOT, np.array([[0, 0, 100]] * 2)),)), "target runs overlap: 200 bytes would go to a region of 100"),
        (Plan((Strip(NO_SLOT, np.zeros((1, 2), np.int64)),)), "shape"),
        (Plan((Strip(NO_SLOT, cast(Numbers, np.zeros((1, 3)))),)), "float64"),
    ],
)
def test_what_is_wrong_is_named(loops: Loops | None, plan: Plan, words: str) -> None:
    with pytest.raises(RangeError, match=words):
        check_plan(plan, 100, 100, loops)


def _layers_in_blocks() -> Plan:
    slots = np.array([[0, 0, 0], [1000, 10, 0], [2000, 20, 0]])
    return Plan((Strip(slots, np.array([[n * 10, n * 30, 10] for n in (3, 0, 2, 1)])),))


def _heads_between_tokens() -> Plan:
    """In the target, tokens lie between heads and channels: no order of whole loops is the order of memory."""
    items = np.array([[0, 0, 2], [2, 4, 2], [4, 100, 2], [6, 104, 2]])
    slots = np.array([[0, 0, 0], [100, 500, 0]])
    return Plan((Strip(slots, np.array([[0, 0, 4], [32, 200, 4]]), TokenPattern(items, 8, 8)),))


@pytest.mark.parametrize("make", [_layers_in_blocks, _heads_between_tokens])
def test_parts_that_lie_within_each_other_are_seen_to_be_apart_without_unrolling(
    make: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "unroll", lambda _: pytest.fail("it was unrolled"))
    check_plan(make(), 5000, 5000)


def test_what_is_not_seen_to_be_apart_is_unrolled_and_checked_run_by_run() -> None:
    """Two strips whose blocks alternate: groups that share a pool."""
    even, odd = (Strip(NO_SLOT, np.array([[n * 10, n * 10, 10] for n in range(first, 10, 2)])) for first in (0, 1))
    for loops in {None, LOOPS}:
        assert len(unroll(check_plan(Plan((even, odd)), 100, 100, loops).plan)) == 10
        with pytest.raises(RangeError, match="target runs overlap: offset"):
            check_plan(Plan((even, Strip(NO_SLOT, odd.places - np.array([0, 1, 0])))), 100, 100, loops)


@WAYS
@settings(deadline=None)
@given(plan=TIDY, max_bytes=st.integers(1, 40), max_runs=st.integers(1, 9), data=st.data())
def test_slices_put_together_are_the_runs(
    loops: Loops | None, plan: Plan, max_bytes: int, max_runs: int, data: st.DataObject
) -> None:
    cursor = RunCursor(StripTable(plan), loops)
    seen: list[tuple[int, int]] = []
    while cursor.remaining_bytes:
        window = cursor.peek(max_bytes, max_runs)
        assert np.array_equal(window, cursor.peek(max_bytes, max_runs))
        assert len(window) <= max_runs
        pairs = [(source + n, target + n) for source, target, count in window.tolist() for n in range(count)]
        assert 0 < len(pairs) <= max_bytes
        taken = data.draw(st.integers(1, len(pairs)))
        seen += pairs[:taken]
        cursor.advance(taken)
    assert seen == [(source + n, target + n) for source, target, count in rows_of(plan) for n in range(count)]
    assert len(cursor.peek(max_bytes)) == 0


@needs_loops
@pytest.mark.parametrize("threads", [1, 3])
@given(plan=TIDY, step=st.tuples(st.sampled_from([1, 5, 64, 1 << 40]), st.sampled_from([1, 3, 1 << 40])))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_copied_as_its_runs_are(threads: int, plan: Plan, step: tuple[int, int]) -> None:
    assert LOOPS is not None
    source = np.random.default_rng(1).integers(0, 255, 1000, dtype=np.uint8)
    target, expected = np.full_like(source, 255), np.full_like(source, 255)
    crew, cursor = CopyCrew(LOOPS, threads - 1), RunCursor(StripTable(plan), LOOPS)
    copier = RunCopier(source, target, crew)
    while cursor.remaining_bytes:
        next_runs = cursor.peek(*step)
        assert 0 < copier.copy_on(cursor, *step) == count_bytes(next_runs) <= step[0]
        cursor.advance(count_bytes(next_runs))
    crew.close()
    for at, to, count in rows_of(plan):
        expected[to : to + count] = source[at : at + count]
    assert np.array_equal(target, expected)


@needs_loops
@pytest.mark.parametrize("threads", [1, 3])
def test_millions_of_bytes_are_shared_by_threads(threads: int) -> None:
    """More than a helper's chunk, in runs of 100 bytes: heads split in the target."""
    assert LOOPS is not None
    pattern = TokenPattern(np.array([[0, 50, 100]]), 100, 200)
    ids = np.random.default_rng(1).permutation(500)
    places = np.stack([np.arange(500) * 1600, ids * 3200, np.full(500, 16)], axis=1)
    plan = Plan((Strip(np.array([[0, 0, 0], [900_000, 1_700_000, 0], [1_800_000, 3_400_000, 0]]), places, pattern),))
    source = np.random.default_rng(2).integers(0, 255, 2_700_000, dtype=np.uint8)
    target, expected = np.zeros(5_100_000, np.uint8), np.zeros(5_100_000, np.uint8)
    crew, cursor = CopyCrew(LOOPS, threads - 1), RunCursor(check_plan(plan, len(source), len(target), LOOPS), LOOPS)
    while cursor.remaining_bytes:
        cursor.advance(RunCopier(source, target, crew).copy_on(cursor, 2_000_003, 1 << 40))
    crew.close()
    for at, to, count in unroll(plan).tolist():
        expected[to : to + count] = source[at : at + count]
    assert np.array_equal(target, expected)


def test_what_is_checked_is_a_copy() -> None:
    plan = _right()
    checked = check_plan(plan, 100, 100, LOOPS)
    for strip in plan.strips:
        for mine in checked.plan.strips:
            assert not np.shares_memory(mine.places, strip.places)
            assert not np.shares_memory(mine.slots, strip.slots)
