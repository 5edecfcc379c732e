"""Plans in short form: what they unroll to is what is planned run by run, for any layouts; and how they are cut."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from caches import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.core import plan
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_blocks, plan_layers
from kvbaton.core.strips import NO_RUNS, NO_SLOT, Plan, Runs, Strip, TokenPattern, count_bytes, count_runs, cut_runs, unroll
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group

LISTED, SHORT = 1 << 60, 0
"""Up to how many runs are planned one by one: all, or none."""


def _plan(case: Case, few_runs: int, layers: range | None = None) -> Runs | Plan:
    pair = pair_layouts(case.source.layout, case.target.layout)
    with mock.patch.object(plan, "_FEW_RUNS", few_runs):
        blocks = plan_blocks(pair, case.source.blocks, case.target.blocks, case.first_token, case.tokens, case.total)
        return plan_layers(pair, blocks, layers)


def _by_target(runs: Runs | Plan) -> list[list[int]]:
    """The runs in one order: which comes first is free."""
    return sorted(unroll(runs).tolist(), key=lambda run: (run[1], run))


@settings(max_examples=400, deadline=None)
@given(cases(), st.sampled_from([None, range(1), range(1, 3)]))
def test_a_plan_in_short_form_unrolls_to_the_runs_that_are_planned_one_by_one(case: Case, layers: range | None) -> None:
    listed, short = _plan(case, LISTED, layers), _plan(case, SHORT, layers)
    assert not isinstance(listed, Plan)
    assert isinstance(short, Plan) or not len(listed)
    assert _by_target(short) == _by_target(listed)
    assert (count_runs(short), count_bytes(short)) == (len(listed), int(listed[:, 2].sum()))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_offset_of_a_plan_is_negative(case: Case) -> None:
    """The planes of a block may lie in any order; what is added up must not be below 0, as whoever checks a plan relies on."""
    short = _plan(case, SHORT)
    for strip in short.strips if isinstance(short, Plan) else ():
        assert min(strip.slots.min(), strip.places.min()) >= 0
        if strip.pattern is not None:
            assert min(strip.pattern.items.min(), strip.pattern.source_step, strip.pattern.target_step) >= 0


def _layout(heads: HeadRange, axes: tuple[str, ...], layers: int = 4, blocks: int = 128, block_tokens: int = 16) -> Layout:
    counts = {"plane": 2, "block": blocks, "token": block_tokens, "head": heads.count, "channel": 8}
    cache = dense_tensor((layers, *(counts[axis] for axis in axes)), "bfloat16", 2)
    group = tensor_group("full", range(layers), split_layers(cache), axes, heads=(heads,), total_heads=8)
    return Layout(group.end, (group,))


TOKENS_MAJOR = ("plane", "block", "token", "head", "channel")
HEADS_MAJOR = ("plane", "block", "head", "token", "channel")


@pytest.mark.parametrize(
    ("source", "target", "items"),
    [
        pytest.param((HeadRange(0, 2), TOKENS_MAJOR), (HeadRange(0, 4), TOKENS_MAJOR), 1, id="heads split"),
        pytest.param((HeadRange(0, 8), TOKENS_MAJOR), (HeadRange(4, 2), TOKENS_MAJOR), 1, id="heads merged"),
        pytest.param((HeadRange(0, 4), TOKENS_MAJOR), (HeadRange(0, 4), HEADS_MAJOR), 4, id="another order of axes"),
        pytest.param((HeadRange(0, 4), HEADS_MAJOR), (HeadRange(0, 8), TOKENS_MAJOR), 4, id="another order, and split"),
    ],
)
def test_where_tokens_are_runs_of_their_own_a_plan_has_a_row_per_block(
    source: tuple[HeadRange, tuple[str, ...]], target: tuple[HeadRange, tuple[str, ...]], items: int
) -> None:
    pair = pair_layouts(_layout(*source), _layout(*target))
    dice = np.random.default_rng(1)
    lists = [(tuple(dice.permutation(128)[:90].tolist()),) for _ in range(2)]
    blocks = plan_blocks(pair, lists[0], lists[1], 3, 1430)
    short = plan_layers(pair, blocks)
    assert isinstance(short, Plan)
    (strip,) = short.strips
    assert strip.pattern is not None
    assert (len(strip.slots), len(strip.places), len(strip.pattern.items)) == (4 * 2, 90, items)
    assert short.run_count == 4 * 2 * 1427 * items
    with mock.patch.object(plan, "_FEW_RUNS", LISTED):
        listed = plan_layers(pair, plan_blocks(pair, lists[0], lists[1], 3, 1430))
    assert _by_target(short) == _by_target(listed)


def test_whole_blocks_are_runs_and_a_plan_has_a_row_per_block() -> None:
    layout = _layout(HeadRange(0, 8), TOKENS_MAJOR, layers=40)
    ids = tuple(range(0, 64, 2))
    short = plan_layers(pair := pair_layouts(layout, layout), plan_blocks(pair, (ids,), (ids,), 0, 512))
    assert isinstance(short, Plan)
    (strip,) = short.strips
    assert (len(strip.slots), len(strip.places), strip.pattern) == (80, 32, None)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 300), st.sampled_from([LISTED, SHORT]))
def test_parts_are_the_whole_and_hold_no_more_than_they_may(case: Case, most_bytes: int, few_runs: int) -> None:
    whole = _plan(case, few_runs)
    parts = list(cut_runs(whole, count_bytes(whole), most_bytes))
    assert sorted(run for part in parts for run in _by_target(part)) == sorted(_by_target(whole))
    for part in parts:
        assert count_bytes(part) > 0
        if isinstance(part, Plan) and count_bytes(part) > most_bytes:
            (strip,) = part.strips
            # Places are cut where their bytes pass a multiple of the share of a part: one of them may be on top.
            assert len(strip.slots) == 1
            assert (
                len(strip.places) == 1
                or count_bytes(Plan((Strip(strip.slots, strip.places[1:], strip.pattern),))) <= most_bytes
            )


def test_a_long_slot_is_cut_into_parts_of_one_size() -> None:
    places = np.stack([np.arange(100) * 10, np.arange(100) * 10, np.full(100, 10)], axis=1)
    slots = np.array([[0, 0, 0], [5000, 5000, 0]])
    parts = list(cut_runs(Plan((Strip(slots, places),)), 2000, 300))
    assert [count_bytes(part) for part in parts] == [250] * 8


def test_short_strips_share_a_part() -> None:
    strips = tuple(Strip(NO_SLOT, np.array([[at, at, 10]])) for at in range(0, 100, 10))
    parts = list(cut_runs(Plan(strips), 100, 35))
    assert [count_bytes(part) for part in parts] == [30, 30, 30, 10]


def test_the_order_of_runs_is_slots_places_tokens_items() -> None:
    pattern = TokenPattern(np.array([[0, 0, 2], [5, 3, 1]]), 10, 20)
    strip = Strip(np.array([[0, 0, 0], [1000, 2000, 0]]), np.array([[100, 200, 2], [300, 400, 1]]), pattern)
    first = [[100, 200, 2], [105, 203, 1], [110, 220, 2], [115, 223, 1], [300, 400, 2], [305, 403, 1]]
    assert unroll(Plan((strip,))).tolist() == [*first, *([a + 1000, b + 2000, c] for a, b, c in first)]


def test_nothing_is_no_run_and_no_part() -> None:
    assert unroll(Plan(())).tolist() == []
    assert (count_runs(Plan(())), count_bytes(Plan(()))) == (0, 0)
    assert list(cut_runs(Plan(()), 0, 10)) == list(cut_runs(NO_RUNS, 0, 10)) == []
