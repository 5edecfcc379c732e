"""Grant numbers against a model that forgets nothing, and the reserve against deadlock."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbaton.core.grants import GrantWindow, GrantWindows, may_start_prefill
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import Bug


class _Model:
    """What a window is meant to be: every number ever used, and the rule about old ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: set[int] = set()

    def use(self, number: int) -> bool:
        high = max(self.used, default=0)
        if number < 1 or number <= high - self.size or number in self.used:
            return False
        self.used.add(number)
        return True


@given(st.integers(1, 8), st.lists(st.integers(-2, 40) | st.integers(0, 1 << 62)))
@example(1, [1, 1, 2, 1])
@example(3, [1, 1 << 62, 1, (1 << 62) - 2, (1 << 62) - 2])
def test_a_window_is_the_set_of_all_used_numbers_without_the_memory(size: int, numbers: list[int]) -> None:
    window, model = GrantWindow(size), _Model(size)
    for number in numbers:
        assert window.use(number) == model.use(number), number


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


def test_a_leap_to_the_largest_number_of_the_wire_costs_nothing() -> None:
    window = GrantWindow()
    assert window.use(1)
    assert window.use(1 << 62)
    assert sys.getsizeof(window._used) < 1000
    assert not window.use(1)


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
