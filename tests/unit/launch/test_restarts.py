"""The restart policy by itself: how long to wait, when to give up, and that parts do not count for each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.launch.restarts import RestartPolicy, RestartSchedule


def test_the_back_off_doubles_up_to_its_maximum() -> None:
    policy = RestartPolicy(limit=1000)
    assert [policy.wait_s(restarts) for restarts in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.wait_s(999) == 30


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_after_the_limit_there_is_no_restart(limit: int) -> None:
    schedule = RestartSchedule(RestartPolicy(limit))
    waits = [schedule.on_death("decode-0", float(now)) for now in range(limit + 1)]
    assert None not in waits[:limit]
    assert waits[limit] is None
    assert schedule.restarts("decode-0") == limit


def test_restarts_older_than_the_window_are_forgotten_and_the_back_off_starts_again() -> None:
    schedule = RestartSchedule(RestartPolicy(limit=2))
    assert schedule.on_death("router", 0.0) == 1
    assert schedule.on_death("router", 599.0) == 2
    assert schedule.on_death("router", 600.0) == 2
    assert schedule.on_death("router", 700.0) is None
    assert schedule.on_death("router", 2000.0) == 1


def test_a_part_uses_up_no_other_parts_restarts() -> None:
    schedule = RestartSchedule(RestartPolicy(limit=1))
    assert schedule.on_death("decode-0", 0.0) == 1
    assert schedule.on_death("decode-0", 1.0) is None
    assert schedule.on_death("decode-1", 1.0) == 1


@given(st.integers(0, 6), st.lists(st.floats(0, 400), max_size=40))
def test_no_window_holds_more_restarts_than_the_limit(limit: int, gaps: list[float]) -> None:
    schedule = RestartSchedule(RestartPolicy(limit))
    now, allowed = 0.0, []
    for gap in gaps:
        now += gap
        wait_s = schedule.on_death("part", now)
        if wait_s is not None:
            assert 1 <= wait_s <= 30
            allowed.append(now)
        assert len([at for at in allowed if at > now - 600]) <= limit
