"""Alarms ring early if need be, never late, and never for what was dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.agent.timers import Alarms, Backoff
from kvbaton.config import Limits

KEYS = st.integers(0, 5)
TIMES = st.integers(0, 100).map(float)
STEPS = st.lists(st.one_of(st.tuples(st.just("set"), KEYS, TIMES), st.tuples(st.just("drop"), KEYS, TIMES)), max_size=300)


@given(STEPS, st.lists(TIMES, max_size=20))
def test_alarms_ring_at_the_earliest_time_set_for_a_key(steps: list[tuple[str, int, float]], looks: list[float]) -> None:
    alarms: Alarms[int] = Alarms()
    wanted: dict[int, float] = {}
    for what, key, when in steps:
        if what == "set":
            alarms.set(key, when)
            wanted[key] = min(when, wanted.get(key, when))
        else:
            alarms.drop(key)
            wanted.pop(key, None)
        assert alarms.next_deadline() == min(wanted.values(), default=None)
    for now in sorted(looks):
        rung = list(alarms.ring(now))
        assert sorted(rung) == sorted(key for key, when in wanted.items() if when <= now)
        times = [wanted.pop(key) for key in rung]
        assert times == sorted(times)
        assert len(alarms) == len(wanted)
        assert alarms.next_deadline() == min(wanted.values(), default=None)


def test_what_was_answered_waits_again_as_for_the_first_time() -> None:
    limits = Limits(retry=0.1)
    backoff = Backoff.start(limits, 1.0)
    for now in (2.0, 3.0):
        backoff.double(now)
    assert (backoff.at, backoff.wait_s) == pytest.approx((3.0 + min(0.4, limits.beat_s), min(0.4, limits.beat_s)))
    backoff.restart(5.0)
    assert (backoff.at, backoff.wait_s) == pytest.approx((5.1, 0.1))


def test_the_earliest_rings_first_and_only_once() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.set("late", 3.0)
    alarms.set("early", 1.0)
    alarms.set("middle", 2.0)
    assert list(alarms.ring(2.5)) == ["early", "middle"]
    assert list(alarms.ring(2.5)) == []
    assert alarms.next_deadline() == 3.0


def test_those_behind_a_failure_ring_the_next_time() -> None:
    alarms: Alarms[str] = Alarms()
    for key in ("first", "second", "third"):
        alarms.set(key, 1.0)
    assert next(alarms.ring(2.0)) == "first"
    assert alarms.next_deadline() == 1.0
    assert list(alarms.ring(2.0)) == ["second", "third"]


def test_what_is_set_while_alarms_ring_waits_for_the_next_time() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.set("again", 1.0)
    for key in alarms.ring(2.0):
        alarms.set(key, 1.5)
    assert alarms.next_deadline() == 1.5


def test_a_renewed_deadline_keeps_its_alarm_and_takes_no_memory() -> None:
    alarms: Alarms[str] = Alarms()
    for now in range(100_000):
        alarms.set("renewed", now + 30.0)
    assert alarms.next_deadline() == 30.0
    assert len(alarms._heap) == 1


def test_what_comes_and_goes_takes_no_memory() -> None:
    alarms: Alarms[int] = Alarms()
    for number in range(10_000):
        alarms.set(number, 1000.0 + number)
        alarms.drop(number)
    alarms.set(-1, 1.0)
    assert len(alarms._heap) < 100
    assert list(alarms.ring(1e9)) == [-1]


def test_what_stays_rings_however_many_come_and_go_beside_it() -> None:
    alarms: Alarms[int] = Alarms()
    alarms.set(-1, 5.0)
    for number in range(1000):
        alarms.set(number, 10.0 + number)
        alarms.drop(number)
    assert len(alarms._heap) < 100
    assert list(alarms.ring(6.0)) == [-1]
