"""Grant numbers against a model that forgets nothing, and the reserve against deadlock."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbaton.core.grants import REACH, GrantWindow, GrantWindows, Reserve, may_start_prefill, next_sequence
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.errors import Bug


class _Model:
    """What a window is meant to be: every number ever used, and the rules about old ones and those too far ahead."""

    def __init__(self, size: int, reach: int) -> None:
        self.size = size
        self.reach = reach
        self.used: set[int] = set()

    def use(self, number: int) -> bool:
        high = max(self.used, default=0)
        if number < 1 or not high - self.size < number <= high + self.reach or number in self.used:
            return False
        self.used.add(number)
        return True


@given(st.integers(1, 8), st.sampled_from([1, 5, 30, REACH, 1 << 62]), st.lists(st.integers(-2, 40) | st.integers(0, 1 << 62)))
@example(1, REACH, [1, 1, 2, 1])
@example(3, 1 << 62, [1, 1 << 62, 1, (1 << 62) - 2, (1 << 62) - 2])
@example(3, 4, [1, 6, 5, 10])
def test_a_window_is_the_set_of_all_used_numbers_without_the_memory(size: int, reach: int, numbers: list[int]) -> None:
    window, model = GrantWindow(size, reach), _Model(size, reach)
    for number in numbers:
        assert window.use(number) == model.use(number), number
        assert window.used_up_to == max(model.used, default=0)


@given(st.lists(st.integers(1, 3000)))
def test_no_number_counts_twice(numbers: list[int]) -> None:
    window = GrantWindow()
    taken = [number for number in numbers if window.use(number)]
    assert len(taken) == len(set(taken))


def test_numbers_out_of_order_within_the_window_all_count() -> None:
    window = GrantWindow(4)
    assert [window.use(number) for number in (4, 2, 3, 1, 5, 1)] == [True, True, True, True, True, False]


def test_a_million_grants_need_no_more_memory_than_ten_thousand() -> None:
    window = GrantWindow()
    for number in range(1, 10_001):
        window.use(number)
    few = sys.getsizeof(window._used)
    for number in range(10_001, 1_000_001):
        assert window.use(number)
    assert sys.getsizeof(window._used) <= 2 * few
    assert not window.use(1)
    assert not window.use(1_000_000)


def test_the_widest_leap_costs_nothing() -> None:
    window = GrantWindow()
    assert window.use(1)
    assert window.use(1 + REACH)
    assert sys.getsizeof(window._used) < 1000
    assert not window.use(1)


@pytest.mark.parametrize("number", [2 + REACH, 1 << 40, (1 << 62) - 1, 1 << 62])
def test_a_number_too_far_ahead_is_refused_and_changes_nothing(number: int) -> None:
    window = GrantWindow()
    assert window.use(1)
    assert not window.use(number)
    assert window.used_up_to == 1
    assert window.use(2)
    assert window.use(3)


@given(st.integers(0, 1 << 61), st.integers(0, 1 << 61))
@example(5, 1 << 40)
@example(1 << 61, 5)
@example(10_000, 1)
def test_a_target_that_was_refused_takes_a_number_that_the_source_accepts(last: int, used_up_to: int) -> None:
    """Whichever of the two sides lost count: a target behind its source goes up, one far ahead of it comes down."""
    window = GrantWindow(reach=1 << 62)
    assert not used_up_to or window.use(used_up_to)
    following = next_sequence(last, used_up_to)
    assert used_up_to < following <= used_up_to + REACH
    assert window.use(following)


def test_grants_that_are_refused_together_take_different_numbers() -> None:
    last, taken = 5, []
    for _ in range(4):
        last = next_sequence(last, 1 << 30)
        taken.append(last)
    assert taken == [(1 << 30) + each for each in (1, 2, 3, 4)]


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_of_no_grants_is_a_bug(size: int) -> None:
    with pytest.raises(Bug, match=str(size)):
        GrantWindow(size)


def test_numbers_are_counted_for_each_peer() -> None:
    windows = GrantWindows()
    assert windows.use(Incarnation("a"), 1)
    assert windows.use(Incarnation("b"), 1)
    assert not windows.use(Incarnation("a"), 1)


def test_only_the_longest_silent_peers_are_forgotten() -> None:
    windows = GrantWindows(limit=3)
    for name in "abc":
        windows.use(Incarnation(name), 1)
    windows.use(Incarnation("a"), 2)
    for name in "de":
        windows.use(Incarnation(name), 1)
    assert len(windows) == 3
    assert not windows.use(Incarnation("a"), 1)


@given(free=st.integers(0, 50), needed=st.integers(0, 50), reserved=st.integers(0, 50))
def test_work_without_a_grant_never_takes_the_last_blocks(free: int, needed: int, reserved: int) -> None:
    granted, ungranted = (
        may_start_prefill(free_blocks=free, needed_blocks=needed, reserved_blocks=reserved, has_grant=has_grant)
        for has_grant in (True, False)
    )
    assert granted == (needed <= free)
    assert ungranted == (needed + reserved <= free)


@given(st.integers(1, 30), st.data())
def test_two_full_pools_cannot_wait_for_each_other(largest: int, data: st.DataObject) -> None:
    """However ungranted work fills a source, the largest request fits as soon as it has a grant."""
    free = total = data.draw(st.integers(largest, 3 * largest))
    for needed in data.draw(st.lists(st.integers(1, largest))):
        if may_start_prefill(free_blocks=free, needed_blocks=needed, reserved_blocks=largest, has_grant=False):
            free -= needed
    assert free <= total
    assert may_start_prefill(free_blocks=free, needed_blocks=largest, reserved_blocks=largest, has_grant=True)


def test_a_source_in_pull_leaves_room_for_one_of_the_largest_requests() -> None:
    assert Reserve.of(Mode.PULL, largest=4, total=20, both_roles=True).source == 4
    assert Reserve.of(Mode.PUSH, largest=4, total=20, both_roles=True).source == 8


def test_a_target_leaves_room_for_a_source_with_a_grant_where_it_waits_for_one() -> None:
    assert Reserve.of(Mode.PUSH, largest=4, total=20, both_roles=True).target == 4
    assert Reserve.of(Mode.PULL, largest=4, total=20, both_roles=True).target == 0, "its source is complete"


def test_with_one_role_a_push_source_leaves_room_for_one_and_nothing_else_leaves_any() -> None:
    assert Reserve.of(Mode.PUSH, largest=4, total=6, both_roles=False) == Reserve(source=4, has_grants=True)
    assert Reserve.of(Mode.PULL, largest=4, total=6, both_roles=False) == Reserve()
